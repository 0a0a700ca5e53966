"""A budget below the context: token-identical to the oracle, and corrected as often, for several settings."""

from __future__ import annotations

import numpy as np
import pytest
import tasks
from oracle import Oracle, OracleSettings
from serving import NEEDLE_MODEL, Server, freekv_flags

NEW_TOKENS = 24
SETTINGS = {
    "default-like": OracleSettings(budget=512, sink=128, window=128, tau=0.9, page=32),
    "always-corrected": OracleSettings(budget=256, sink=64, window=64, tau=2, page=32),
    "never-corrected-small-pages": OracleSettings(budget=192, sink=0, window=16, tau=-2, page=16, dense_layers=(0, 3)),
    "one-page-window-no-dense-layer": OracleSettings(budget=320, sink=64, window=64, tau=0.8, page=64, dense_layers=()),
}


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(NEEDLE_MODEL)


def prompts_of(seed: int) -> list[tuple[int, ...]]:
    """Needle questions of ragged lengths, and prose that the model goes on with."""
    rng = np.random.default_rng(seed)
    kinds = ["magic-number", "code-word", "multi-value", "variable-2"]
    questions = [tasks.make_prompt(rng, kind, int(rng.integers(600, 1500))).token_ids for kind in kinds]
    prose = [tasks.make_document(rng, int(rng.integers(400, 1800)), needle_count=4).token_ids for _ in range(3)]
    return questions + prose


def flags_of(settings: OracleSettings) -> dict:
    dense = ",".join(map(str, settings.dense_layers)) or "none"
    freekv = freekv_flags(settings.budget, sink=settings.sink, window=settings.window, tau=settings.tau, dense_layers=dense)
    return freekv | {"--page-size": settings.page, "--chunked-prefill-size": 512}


@pytest.mark.parametrize("name", SETTINGS)
def test_same_tokens_and_corrections_as_the_oracle(serve, oracle, name):
    settings = SETTINGS[name]
    prompts = prompts_of(seed=len(name))
    with serve(flags_of(settings)) as server:
        before = server.when_idle()["totals"]["heads_corrected"]
        cold = server.generate_all(prompts, NEW_TOKENS)
        hits = server.generate_all(prompts, NEW_TOKENS)
        state = server.when_idle()
        assert state["host_pages_used"] == held_by_tree(server, settings.page)
    expected = [oracle.generate(prompt, NEW_TOKENS, settings) for prompt in prompts]
    corrected = [sum(flag for step in result.corrected for layer in step for flag in layer) for result in expected]
    for answers in (cold, hits):
        assert [answer["output_ids"] for answer in answers] == [result.tokens for result in expected]
        assert [answer["meta_info"]["freekv"]["heads_corrected"] for answer in answers] == corrected
    assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in hits)
    assert sum(answer["meta_info"]["freekv"]["pages_recalled"] for answer in cold) > 0
    assert state["totals"]["heads_corrected"] - before == 2 * sum(corrected)


def held_by_tree(server: Server, page: int) -> int:
    """Host pages that the radix tree holds, by flushing it: what is left must be nothing."""
    before = server.when_idle()["host_pages_used"]
    server.flush()
    assert server.when_idle()["host_pages_used"] == 0
    return before
