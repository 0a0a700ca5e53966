"""A budget that covers the context: token-identical to stock SGLang, cold and on prefix hits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.needle import tasks

pytestmark = pytest.mark.both_releases

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """32 prompts of 16 to 6,000 tokens; 8 of them continue half of an earlier one."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(16), np.log(6000), 24)).astype(int)
    lengths[:2] = 16, 6000
    documents = [tasks.make_document(rng, max(int(length), 64), needle_count=1 if length < 400 else 8) for length in lengths]
    prompts = [document.token_ids[:length] for document, length in zip(documents, lengths)]
    for index in rng.choice(len(prompts), 8, replace=False):
        stem = prompts[index]
        prompts.append(stem[: max(8, len(stem) // 2)] + tuple(int(token) for token in rng.integers(10, 5000, 40)))
    return prompts


def test_same_tokens_as_stock(fleet, prompts):
    server = fleet.covering
    before = server.flush()["totals"]["decode_steps"]
    with ThreadPoolExecutor(1) as pool:  # both servers at once: each leaves a core idle half of the time
        stock = pool.submit(lambda: [answer["output_ids"] for answer in fleet.stock.generate_all(prompts, NEW_TOKENS)])
        cold = server.generate_all(prompts, NEW_TOKENS)
        hits = server.generate_all(prompts, NEW_TOKENS)
        stock = stock.result()
    state = server.when_idle()
    assert [answer["output_ids"] for answer in cold] == stock
    assert [answer["output_ids"] for answer in hits] == stock
    pages = [answer["meta_info"]["freekv"] for answer in (*cold, *hits)]
    assert [each["resident_pages"] for each in pages] == [each["context_pages"] for each in pages]
    cached = [answer["meta_info"]["cached_tokens"] for answer in hits]
    assert cached == [(len(prompt) - 1) // 32 * 32 for prompt in prompts]
    assert state["totals"]["recalled_units"] == 0 and 0 < state["frames_used"] < state["host_pages_total"] < state["frames_total"]
    assert state["totals"]["decode_steps"] - before == 2 * len(prompts) * (NEW_TOKENS - 1)
