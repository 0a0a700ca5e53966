"""A model with full and sliding-window layers in turns, and learned sinks, as one server: its tokens are the oracle's, in chunks, behind
prefixes and after retraction, and the KV of both kinds of layers is nowhere lost."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from clients import assert_only_the_tree_holds_pages, stay_while_others_end
from families import VOCABULARY, WINDOWED, make_model
from oracle import Oracle, OracleSettings
from room import room_for
from serving import FaultyServer, freekv, start_all, stop_all, wait_until
from sglang_freekv import releases
from sglang_freekv.launch.server import ServerFailed

pytestmark = pytest.mark.both_releases

NEW_TOKENS, ROWS, CHUNK, TOKENS = 24, 4, 256, 1536
SHORT, LONG = 60, 76  # tokens of an answer: a window slides more than once, and four such requests fill the pool before they end
SETTINGS = OracleSettings(budget=416, sink=16, window=32, tau=0.0, page=8, dense_layers=(1,))
IS_NEW = releases.has("tree paths")  # the canary of the other release knows no windows
ENVIRONMENT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


def make_prompts(seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(VOCABULARY), k=length) for length in lengths]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> SimpleNamespace:
    path = tmp_path_factory.mktemp("windows")
    make_model(WINDOWED["gpt-oss"], path)
    flags = freekv(SETTINGS.budget, sink=SETTINGS.sink, window=SETTINGS.window, tau=SETTINGS.tau, dense_layers=1)
    flags |= {"--freekv-canary": "full" if IS_NEW else "off"}
    flags |= {"--model-path": path, "--skip-tokenizer-init": True, "--page-size": SETTINGS.page, "--chunked-prefill-size": CHUNK}
    flags |= {"--max-running-requests": ROWS, "--max-total-tokens": TOKENS, "--prefill-max-requests": 1, "--schedule-conservativeness": 0.1}
    flags |= {"--enable-priority-scheduling": True}
    with room_for(1):
        (server,) = start_all([FaultyServer(flags, path / "log.txt", ENVIRONMENT)])
    yield SimpleNamespace(server=server, oracle=Oracle(path))
    stop_all([server])


def assert_windows_are_free(server) -> None:
    kept, told = server.when_idle()["windows"], server.get("/server_info")["freekv"]
    assert 0 < kept["used"] < kept["total"] == told["window_pool_tokens"] and told["window_tokens"] == SETTINGS.window
    assert_only_the_tree_holds_pages(server)  # and empties it
    assert server.state()["windows"]["used"] == 0


def test_tokens_are_the_oracle_s_cold_and_behind_a_window(served):
    server, oracle = served.server, served.oracle
    prompts = make_prompts(0, 3, 39, 100, 300, 901)
    expected = [oracle.generate(prompt, NEW_TOKENS, SETTINGS) for prompt in prompts]
    dense = [oracle.generate(prompt, NEW_TOKENS).tokens for prompt in prompts]
    assert [len(prompt) for prompt, result, whole in zip(prompts, expected, dense) if result.tokens != whole] == [901]
    for cached in ([0, 0, 0, 0, 0], [0, 32, 96, 296, 896]):
        answers = [server.generate(prompt, NEW_TOKENS) for prompt in prompts]
        assert [answer["output_ids"] for answer in answers] == [result.tokens for result in expected]
        assert [answer["meta_info"]["cached_tokens"] for answer in answers] == cached
        corrections = [answer["meta_info"]["freekv"]["corrections"] for answer in answers]
        assert corrections == [sum(flag for step in result.corrected for layer in step for flag in layer) for result in expected]
        assert 0 < sum(corrections) < len(prompts) * (NEW_TOKENS - 1) * 2 * 2  # of two retrieval layers and two kv heads
    assert answers[4]["meta_info"]["freekv"]["recalled_units"] > 0
    shared = prompts[4][:640] + prompts[3][:60]  # the host has all 640 tokens, but the newer tree a window behind each chunk
    answer = server.generate(shared, NEW_TOKENS)
    assert answer["output_ids"] == oracle.generate(shared, NEW_TOKENS, SETTINGS).tokens
    assert answer["meta_info"]["cached_tokens"] == (2 * CHUNK if IS_NEW else 640)
    assert_windows_are_free(server)


def test_whoever_is_preempted_resumes_and_computes_no_page_twice(served):
    """The budget covers these contexts, so that it does not matter who was preempted when. Their windows have slid in the prompt."""
    server, oracle = served.server, served.oracle
    prompts = make_prompts(1, *[160] * (2 * ROWS - 1))
    begun = len(server.log.read_text())

    def ask(prompt: list[int], priority: int) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": SHORT, "ignore_eos": True}
        return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, "priority": priority})

    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(ask, prompt, 0) for prompt in prompts[:ROWS]]
        wait_until(lambda: server.state()["rows_used"] == ROWS)
        asked += [pool.submit(ask, prompt, 100) for prompt in prompts[ROWS:]]
        answers = [answer.result() for answer in asked]
    assert [answer["output_ids"] for answer in answers] == [oracle.generate(prompt, SHORT).tokens for prompt in prompts]
    assert [answer["meta_info"]["num_retractions"] for answer in answers[ROWS:]] == [0] * (ROWS - 1)
    resumed = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    batches = re.findall(r"Prefill batch.*#new-token: (\d+), #cached-token: (\d+)", server.log.read_text()[begun:])
    assert resumed == ROWS - 1 and len(batches) == len(prompts) + resumed
    found = sorted(int(cached) for _, cached in batches)  # who is preempted late has pages of its answer, too
    assert found[: len(prompts)] == [0] * len(prompts) and all(160 <= cached < 160 + SHORT for cached in found[len(prompts) :])
    assert all(int(new) <= SETTINGS.page for new, cached in batches if int(cached))
    assert_windows_are_free(server)


def test_a_full_pool_retracts_a_request_that_resumes(served):
    server, oracle = served.server, served.oracle
    prompts = make_prompts(2, *[340] * (ROWS + 1))
    begun = len(server.log.read_text())
    answers = server.generate_all(prompts, LONG, ignore_eos=False)  # else SGLang reserves the whole answers
    assert [answer["output_ids"] for answer in answers] == [oracle.generate(prompt, LONG).tokens for prompt in prompts]
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert "KV cache pool is full. Retract requests." in server.log.read_text()[begun:]
    assert_windows_are_free(server)


@pytest.mark.parametrize("how", ["disconnect", "abort", "timeout"])
def test_a_request_that_ends_early_leaves_nothing(served, how):
    """Some end in a chunk of their prompt, some wait for a row, some decode; those that stay are answered as ever."""
    server, oracle = served.server, served.oracle
    ended, stay = make_prompts(3, *[601] * 4, *[100] * 4), make_prompts(4, *[77] * 4)
    expected = [oracle.generate(prompt, NEW_TOKENS).tokens for prompt in stay]
    answers = stay_while_others_end(server, how, ended, stay, NEW_TOKENS)
    assert [answer["output_ids"] for answer in answers] == expected
    assert_windows_are_free(server)


@pytest.mark.skipif(not IS_NEW, reason="the canary is refused with window layers on this release")
def test_a_page_that_changed_ends_its_request_and_is_computed_anew_behind_a_window(served):
    """Nobody else has been told of a fault until then."""
    server, oracle = served.server, served.oracle
    prompt, other = make_prompts(6, 901, 300)
    assert server.flush()["canary"]["faults"] == 0
    server.generate(prompt, 1)
    server.damage(1, 0, 40)  # the first retrieval layer, which is the fourth of the model
    with pytest.raises(ServerFailed, match="500.*canary: host page 40, layer 3"):
        server.generate(prompt, NEW_TOKENS)
    answers = [server.generate(each, NEW_TOKENS) for each in (prompt, other)]
    assert [answer["output_ids"] for answer in answers] == [oracle.generate(each, NEW_TOKENS, SETTINGS).tokens for each in (prompt, other)]
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [CHUNK, 0]
    assert server.state()["canary"]["faults"] > 0
    assert_windows_are_free(server)
