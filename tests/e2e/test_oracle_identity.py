"""A budget below the context: token-identical to the oracle, and corrected as often, for several settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import engines
from benchmarks.needle import tasks
from likeness import assert_same_but_for_ties
from oracle import LayerStep, Oracle, OracleSettings
from room import wait_for_room
from serving import HEAD_DIM, KV_HEADS, LAYERS, NEEDLE_MODEL, TestServer, freekv
from sglang_freekv.config import GIB

pytestmark = pytest.mark.both_releases

NEW_TOKENS = 24
OF_THE_FLEET = OracleSettings(budget=512, sink=128, window=128, tau=0.9, page=32)
TAUS = (0.65, 0.8, 0.65, -2.0, 0.5, 0.65, 2.0, 0.65)
CODED = "on-turn-two-bit-int8"
SETTINGS = {  # three, because three servers of the fleet run beside theirs, and memory holds six
    "never-corrected-small-pages": OracleSettings(
        budget=192, sink=0, window=32, tau=-2, page=16, dense_layers=(0, 3), digest="min-max", dense_below=1024
    ),
    "least-window-no-dense-layer": OracleSettings(budget=320, sink=64, window=128, tau=TAUS, page=64, dense_layers=(), hysteresis=0.5),
    CODED: OracleSettings(budget=192, sink=16, window=32, tau=0.65, page=8, digest="two-bit", on_turn=True, int8=True),
}
IN_FULL = "never-corrected-small-pages"  # contexts below a limit, which one of the prompts outgrows
RESIDENT = {  # pages in device memory beside the slots of all rows; settings without a number have none, and every row has slots
    IN_FULL: None,  # as many as the host pool has
    "least-window-no-dense-layer": 12,
    CODED: 60,
}


FLOATS = OracleSettings(budget=128, sink=16, window=32, tau=0.8, page=16, dense_layers=(0, 3), fp8=True)
SCALED = {"with scales": (0.01, 0.004), "without": (1.0, 1.0)}  # of keys and values; with the former many are beyond the largest float
TIE, LEAST_COMPARED = 0.01, 0.8  # between the logits of two tokens, which deviate by 3; and the least share of tokens that is compared
COVERING = 1024  # a budget that covers every context, so that it does not matter who was retracted when
OF_FLOATS = dict(
    model_path=str(NEEDLE_MODEL), device="cpu", dtype="float32", skip_tokenizer_init=True, max_total_tokens=8192, max_running_requests=8,
    random_seed=0, chunked_prefill_size=256, page_size=FLOATS.page, kv_cache_dtype="fp8_e4m3", kv_retrieval="freekv", freekv_preset="fast",
    freekv_budget=FLOATS.budget, freekv_sink=FLOATS.sink, freekv_window=FLOATS.window, freekv_tau=FLOATS.tau, freekv_dense_layers="0,3",
    freekv_resident_memory=0, freekv_canary="full",
)  # fmt: skip


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(NEEDLE_MODEL)


@pytest.fixture(scope="module")
def servers(serve, tmp_path_factory) -> dict[str, TestServer]:
    file = tmp_path_factory.mktemp("taus") / "tau.json"
    with serve(*(flags_of(settings, RESIDENT.get(name, 0), file) for name, settings in SETTINGS.items())) as servers:
        yield dict(zip(SETTINGS, servers))


def flags_of(settings: OracleSettings, resident: int | None, file: Path) -> dict:
    """Flags of a server. Thresholds by layer are written to ``file``."""
    dense = ",".join(map(str, settings.dense_layers)) or "none"
    edges = {"sink": settings.sink, "window": settings.window}
    flags = freekv(settings.budget, **edges, dense_layers=dense, digest=settings.digest)
    if isinstance(settings.tau, tuple):
        file.write_text(json.dumps({"model": "LlamaForCausalLM", "tau": settings.tau}))
        flags["--freekv-tau-by-layer"] = file
    else:
        flags["--freekv-tau"] = settings.tau
    head_bytes = HEAD_DIM + 2 if settings.int8 else 4 * HEAD_DIM
    page_bytes = settings.page * (LAYERS - len(settings.dense_layers)) * 2 * KV_HEADS * head_bytes
    flags["--freekv-dense-below"], flags["--freekv-hysteresis"] = settings.dense_below, settings.hysteresis
    flags["--freekv-kv-dtype"] = "int8" if settings.int8 else "auto"
    flags["--freekv-selection"] = "on-turn" if settings.on_turn else "every-step"
    flags["--freekv-resident-memory"] = resident and (resident + 0.5) * page_bytes / GIB
    return flags | {"--page-size": settings.page, "--chunked-prefill-size": 512}


def prompts_of(seed: int) -> list[tuple[int, ...]]:
    """Needle questions of ragged lengths, and prose that the model goes on with."""
    rng = np.random.default_rng(seed)
    kinds = ["magic-number", "code-word", "multi-value", "variable-2"]
    questions = [tasks.make_prompt(rng, kind, int(rng.integers(600, 1500))).token_ids for kind in kinds]
    prose = [tasks.make_document(rng, int(rng.integers(400, 1800)), needle_count=4).token_ids for _ in range(3)]
    return questions + prose


def near(tau: float, step: list[LayerStep]) -> int:
    """Kv heads of a decode step whose queries are about as much like their last ones as ``tau``."""
    return sum(abs(cosine - tau) < 1e-3 for layer in step for cosine in layer.similarity)


def check(
    server: TestServer, oracle: Oracle, settings: OracleSettings, prompts: list[tuple[int, ...]], resident: int | None = 0
) -> list[int]:
    """Compare tokens and corrections, cold and on prefix hits; returns the corrections of each prompt.

    What is recalled depends on the pages that are ``resident``, and on those of the requests before if these are some.
    """
    before = server.flush()
    assert before["host_pages_used"] == 0
    cold, hits = (server.generate_all(prompts, NEW_TOKENS) for _ in range(2))
    after = server.when_idle()
    expected = [oracle.generate(prompt, NEW_TOKENS, settings) for prompt in prompts]
    corrected = [sum(flag for step in result.corrected for layer in step for flag in layer) for result in expected]
    # a number that is nearly between two codes takes either of them, and moves later queries by as much
    unclear = [sum(near(settings.tau, step) for step in result.steps) if settings.int8 else 0 for result in expected]
    for answers in (cold, hits):
        assert [answer["output_ids"] for answer in answers] == [result.tokens for result in expected]
        found = [answer["meta_info"]["freekv"]["corrections"] for answer in answers]
        assert all(abs(a - b) <= most for a, b, most in zip(found, corrected, unclear, strict=True))
    for prompt, first, again in zip(prompts, cold, hits):
        varying = (
            dict.fromkeys(("resident_pages", "selected_units", "recalled_units"), "some") if resident else {}
        )  # a kv head that lost a page selects anew
        told = [answer["meta_info"]["freekv"] | varying for answer in (first, again)]
        assert told[0] == told[1]  # hits or not, the same pages
        assert again["meta_info"]["cached_tokens"] == (len(prompt) - 1) // settings.page * settings.page
    assert abs(after["totals"]["corrections"] - before["totals"]["corrections"] - 2 * sum(corrected)) <= 2 * sum(unclear)
    assert (after["totals"]["recalled_units"] > before["totals"]["recalled_units"]) == (resident is not None)
    assert server.flush()["host_pages_used"] == 0
    return corrected


def test_the_default_way(fleet, oracle):
    check(fleet.small, oracle, OF_THE_FLEET, prompts_of(seed=0))


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings(servers, oracle, name):
    settings, built = SETTINGS[name], servers[name].get("/server_info")["freekv"]
    resident = RESIDENT.get(name, 0)
    slots = (built["device_rows"] + 1) * settings.budget
    assert built["frame_tokens"] == slots + (built["host_tokens"] if resident is None else resident * settings.page)
    corrected = check(servers[name], oracle, settings, prompts_of(seed=len(name)), resident)
    every_head = KV_HEADS * (LAYERS - len(settings.dense_layers)) * (NEW_TOKENS - 1)
    if isinstance(settings.tau, tuple):
        assert all(KV_HEADS * (NEW_TOKENS - 1) < count < every_head for count in corrected)  # those of one layer always, of another never
    elif settings.tau < -1:
        assert not any(corrected)
    else:
        assert all(0 < count < every_head for count in corrected)


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> tuple[list[list[int]], dict[str, list[dict]]]:
    """Prompts, and what engines with KV in floats of 8 bits answer to them twice: cold, and on prefix hits."""
    rng = np.random.default_rng(9)
    prompts = [[int(token) for token in tasks.make_document(rng, length, needle_count=2).token_ids] for length in (90, 330, 520)]
    requests = [{"input_ids": prompts}] * 2
    job = {"requests": requests, "new_tokens": NEW_TOKENS, "engine": OF_FLOATS}
    wait_for_room(1)
    jobs = {name: job | {"kv_scales": scales} for name, scales in SCALED.items()}
    wide = {"engine": OF_FLOATS | {"freekv_budget": COVERING}, "requests": requests[:1], "retract_every": 7}
    jobs["retracted"] = jobs["with scales"] | wide
    return prompts, engines.run_all(jobs, tmp_path_factory.mktemp("floats"))


@pytest.mark.parametrize("name", SCALED)
def test_floats_of_8_bits_over_the_scales_of_a_checkpoint(floats, oracle, name):
    """Dense layers are SGLang's, which leaves scales out on a CPU. A number near the middle of two floats may become either."""
    prompts, settings = floats[0], replace(FLOATS, kv_scales=SCALED[name])
    expected = [oracle.generate(prompt, NEW_TOKENS, settings) for prompt in prompts]
    corrected = [sum(flag for step in result.corrected for layer in step for flag in layer) for result in expected]
    unclear = [sum(near(settings.tau, step) for step in result.steps) for result in expected]
    cold, hits = floats[1][name]
    for answers in (cold, hits):
        assert [answer["output_ids"] for answer in answers] == [result.tokens for result in expected]
    found = [answer["meta_info"]["freekv"] for answer in hits]
    assert all(abs(each["corrections"] - count) <= most for each, count, most in zip(found, corrected, unclear, strict=True))
    assert any(corrected) and all(each["recalled_units"] for each in found[1:])
    assert [answer["meta_info"]["cached_tokens"] for answer in hits] == [
        (len(prompt) - 1) // settings.page * settings.page for prompt in prompts
    ]
    plain = [oracle.generate(prompt, NEW_TOKENS, replace(settings, fp8=False)).tokens for prompt in prompts]
    assert all(result.tokens != tokens for result, tokens in zip(expected, plain)) or name == "without"  # else no scales would pass, too


def test_a_retracted_request_with_floats_of_8_bits_resumes(floats, oracle):
    """When it is retracted depends on time, and so does which of its numbers a prefill rounds."""
    settings, (answers,) = replace(FLOATS, budget=COVERING, kv_scales=SCALED["with scales"]), floats[1]["retracted"]
    expected = [oracle.generate(prompt, NEW_TOKENS, settings) for prompt in floats[0]]
    assert_same_but_for_ties([answer["output_ids"] for answer in answers], expected, TIE, LEAST_COMPARED)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


def test_contexts_below_the_limit_give_the_tokens_of_dense_attention(servers, oracle):
    limit, prompts = SETTINGS[IN_FULL].dense_below, prompts_of(seed=len(IN_FULL))
    assert any(len(prompt) < limit < len(prompt) + NEW_TOKENS for prompt in prompts)
    short = [prompt for prompt in prompts if SETTINGS[IN_FULL].budget < len(prompt) <= limit - NEW_TOKENS]
    dense, ours = [oracle.generate(prompt, NEW_TOKENS, None).tokens for prompt in short], servers[IN_FULL].generate_all(short, NEW_TOKENS)
    assert len(short) > 1 and [answer["output_ids"] for answer in ours] == dense
    counts = [answer["meta_info"]["freekv"] for answer in ours]
    assert [each["attended_pages"] for each in counts] == [each["context_pages"] for each in counts]


def test_requests_become_partial_while_they_run(servers, oracle):
    """Four prompts and a page in hand of each take all frames, until their answers begin a page. Alone a request stays whole."""
    name, rng = "least-window-no-dense-layer", np.random.default_rng(21)
    server, settings = servers[name], SETTINGS[name]
    before = server.flush()
    pages = before["frames_total"] // 4 - 1
    assert before["frames_total"] == 4 * (pages + 1) and pages > settings.budget // settings.page
    prompts = [tasks.make_document(rng, pages * settings.page, needle_count=2).token_ids[: pages * settings.page - 6] for _ in range(4)]
    expected = [oracle.generate(prompt, NEW_TOKENS, settings).tokens for prompt in prompts]

    def recalled(concurrency: int) -> int:
        start = server.flush()["totals"]["recalled_units"]
        answers = server.generate_all(prompts, NEW_TOKENS, concurrency)
        assert [answer["output_ids"] for answer in answers] == expected
        return server.when_idle()["totals"]["recalled_units"] - start

    assert recalled(concurrency=1) == 0 < recalled(concurrency=4)
    assert server.state()["given_up_pages_total"] > before["given_up_pages_total"]
    assert server.state()["partial_rows"] == 0  # when nobody runs
