"""A budget that covers the context: token-identical to stock SGLang, cold and on prefix hits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tasks
from serving import freekv_flags, stock_env, stock_flags

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """64 prompts of 16 to 6,000 tokens; every fourth continues an earlier one, so that it may hit its prefix."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(16), np.log(6000), 48)).astype(int)
    lengths[:2] = 16, 6000
    documents = [tasks.make_document(rng, max(int(length), 64), needle_count=1 if length < 400 else 8) for length in lengths]
    prompts = [tuple(document.token_ids)[:length] for document, length in zip(documents, lengths)]
    for index in rng.choice(len(prompts), 16, replace=False):
        stem = prompts[index]
        prompts.append(stem[: max(8, len(stem) // 2)] + tuple(int(token) for token in rng.integers(10, 5000, 40)))
    return prompts


@pytest.fixture(scope="module")
def stock_tokens(serve, prompts) -> list[list[int]]:
    with serve(stock_flags() | {"--max-total-tokens": 131072}, stock_env()) as server:
        return [answer["output_ids"] for answer in server.generate_all(prompts, NEW_TOKENS)]


def test_same_tokens_as_stock(serve, prompts, stock_tokens):
    with serve(freekv_flags(6400, sink=512, window=512) | {"--max-total-tokens": 131072}) as server:
        before = server.when_idle()["totals"]["decode_steps"]
        cold = server.generate_all(prompts, NEW_TOKENS)
        hits = server.generate_all(prompts, NEW_TOKENS)
        state = server.when_idle()
    assert [answer["output_ids"] for answer in cold] == stock_tokens
    assert [answer["output_ids"] for answer in hits] == stock_tokens
    cached = [answer["meta_info"]["cached_tokens"] for answer in hits]
    assert cached == [(len(prompt) - 1) // 32 * 32 for prompt in prompts], json.dumps(cached)
    assert state["totals"]["pages_recalled"] == 0
    assert state["totals"]["decode_steps"] - before == 2 * len(prompts) * (NEW_TOKENS - 1)
