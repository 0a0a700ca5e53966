"""A model with gated delta nets in six of eight layers, as one server with a canary: its tokens are the oracle's, its states are nowhere
lost, and when KV changes in host memory the states behind it go, too."""

from __future__ import annotations

import random
import re
import threading
from types import SimpleNamespace

import pytest

from clients import assert_only_the_tree_holds_pages, stay_while_others_end
from families import HYBRIDS, VOCABULARY, make_model
from oracle import Oracle, OracleSettings
from room import room_for
from serving import FaultyServer, freekv, start_all, stop_all, wait_until
from sglang_freekv.launch.server import ServerFailed

NEW_TOKENS, ROWS, CHUNK, TRACKED = 24, 4, 512, 256  # decode steps leave a state every 256 tokens
SLOTS = 2 * 5 * ROWS  # for states: five of a request by SGLang's count, and as many again for the prefix cache
RETRIEVAL, HEAD = (3, 7), 1
LONG = 40  # tokens of an answer that ends behind the first state of its own
SETTINGS = OracleSettings(budget=304, sink=16, window=32, tau=0.0, page=8, dense_layers=(), digest="two-bit", hysteresis=1.0)
ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "SGLANG_TEST_RETRACT": "1",  # one of several requests
    "SGLANG_TEST_RETRACT_INTERVAL": "7",  # passes: some are retracted before their first state, some behind it
}


def make_prompts(seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(VOCABULARY), k=length) for length in lengths]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> SimpleNamespace:
    path = tmp_path_factory.mktemp("hybrid")
    make_model(HYBRIDS["qwen3-next"], path, num_hidden_layers=8)
    flags = freekv(SETTINGS.budget, preset="accurate", sink=SETTINGS.sink, window=SETTINGS.window, tau=SETTINGS.tau)
    flags |= {"--model-path": path, "--skip-tokenizer-init": True, "--page-size": SETTINGS.page, "--chunked-prefill-size": CHUNK}
    flags |= {"--max-running-requests": ROWS, "--max-total-tokens": 8192, "--prefill-max-requests": 1}
    flags |= {"--freekv-canary": "full"}
    with room_for(1):
        [server] = start_all([FaultyServer(flags, tmp_path_factory.mktemp("server") / "log.txt", ENVIRONMENT, RETRIEVAL)])
    yield SimpleNamespace(server=server, oracle=Oracle(path))
    stop_all([server])


def assert_states_are_free(server) -> None:
    kept = server.when_idle()["states"]
    assert 0 < kept["used"] < kept["total"] == SLOTS == server.get("/server_info")["freekv"]["state_slots"]
    assert_only_the_tree_holds_pages(server)  # and empties it
    assert server.state()["states"]["used"] == 0


def test_tokens_are_the_oracle_s_cold_and_behind_a_state(served):
    server, oracle = served.server, served.oracle
    prompts = make_prompts(0, 3, 77, 300, 901, 250)
    prompts.append(prompts[3][:640] + make_prompts(1, 50)[0])
    expected = [oracle.generate(prompt, NEW_TOKENS, SETTINGS) for prompt in prompts]
    dense = [oracle.generate(prompt, NEW_TOKENS).tokens for prompt in prompts]
    assert [len(prompt) for prompt, result, whole in zip(prompts, expected, dense) if result.tokens != whole] == [300, 901, 690]
    # a state is kept behind whole chunks of 64 tokens: of each prefill the last, and where a prompt leaves another's path
    for cached in ([0, 0, 0, 0, 0, 512], [0, 64, 256, 896, 192, 640]):
        answers = [server.generate(prompt, NEW_TOKENS) for prompt in prompts]
        assert [answer["output_ids"] for answer in answers] == [result.tokens for result in expected]
        assert [answer["meta_info"]["cached_tokens"] for answer in answers] == cached
        corrections = [answer["meta_info"]["freekv"]["corrections"] for answer in answers]
        assert corrections == [sum(flag for step in result.corrected for layer in step for flag in layer) for result in expected]
        assert 0 < sum(corrections) < len(prompts) * (NEW_TOKENS - 1) * 2 * 2  # of two layers and two kv heads
        assert answers[3]["meta_info"]["freekv"]["recalled_units"] > 0
    again = prompts[4] + expected[4].tokens + prompts[0]  # the decode step with 256 tokens has left its state
    answer = server.generate(again, NEW_TOKENS)
    assert answer["output_ids"] == oracle.generate(again, NEW_TOKENS, SETTINGS).tokens
    assert answer["meta_info"]["cached_tokens"] == TRACKED
    assert_states_are_free(server)


def test_a_retracted_request_resumes_behind_its_last_state(served):
    """The budget covers these contexts, so that it does not matter who was retracted when."""
    server, oracle = served.server, served.oracle
    prompts = make_prompts(2, *[TRACKED - 2] * 3 * ROWS)
    begun = len(server.log.read_text())
    answers = server.generate_all(prompts, LONG, concurrency=3 * ROWS)
    assert [answer["output_ids"] for answer in answers] == [oracle.generate(prompt, LONG).tokens for prompt in prompts]
    resumed = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    batches = re.findall(r"Prefill batch.*#new-token: (\d+), #cached-token: (\d+)", server.log.read_text()[begun:])
    assert resumed > ROWS and len(batches) == len(prompts) + resumed
    cached = [int(tokens) for _, tokens in batches]
    assert [tokens for tokens in cached if not tokens] == [0] * len(prompts)
    assert TRACKED in cached and set(cached) <= {0, 192, TRACKED}  # the last state of its prompt, then its own
    assert all(int(new) <= TRACKED + 1 - 192 for new, tokens in batches if int(tokens) == 192)  # behind 256 tokens it has its own
    assert_states_are_free(server)


@pytest.mark.parametrize("how", ["disconnect", "abort", "timeout"])
def test_a_request_that_ends_early_leaves_no_state(served, how):
    """Some end in a chunk of their prompt, some wait for a row, some decode; those that stay are answered as ever."""
    server, oracle = served.server, served.oracle
    ended, stay = make_prompts(3, *[901] * 4, *[100] * 4), make_prompts(4, *[77] * 4)
    expected = [oracle.generate(prompt, NEW_TOKENS).tokens for prompt in stay]
    answers = stay_while_others_end(server, how, ended, stay, NEW_TOKENS)
    assert [answer["output_ids"] for answer in answers] == expected
    assert_states_are_free(server)


def refused(server: FaultyServer, prompt: list[int], new_tokens: int = NEW_TOKENS) -> str:
    """What the client reads whose request had a page that changed."""
    with pytest.raises(ServerFailed, match="500") as error:
        server.generate(prompt, new_tokens)
    return str(error.value)


@pytest.mark.parametrize("page, hits", [(80, (512, 576, 896)), (20, (0, 896))])
def test_a_prefix_that_changed_is_computed_anew_from_the_state_before_it(served, page, hits):
    """The prompt has left states behind 512 and 896 tokens. Page 80 begins at token 632, and where it leaves what is kept, it leaves one."""
    server, oracle = served.server, served.oracle
    [prompt] = make_prompts(5, 901)
    server.flush()  # so that the prompt gets host pages 1, 2, ...
    expected = oracle.generate(prompt, NEW_TOKENS, SETTINGS).tokens
    assert server.generate(prompt, NEW_TOKENS)["output_ids"] == expected
    server.damage(RETRIEVAL[1], HEAD, page)
    assert f"canary: host page {page}, layer {RETRIEVAL[1]}, kv head {HEAD}: the KV changed in host memory" in refused(server, prompt)
    for cached in hits:
        answer = server.generate(prompt, NEW_TOKENS)
        assert answer["output_ids"] == expected and answer["meta_info"]["cached_tokens"] == cached
    assert_states_are_free(server)


@pytest.mark.parametrize("length, steps, held", [(901, 3, 0), (3500, 0, 200)], ids=["while it decodes", "in a chunk of its prompt"])
def test_a_request_ends_where_it_is_and_leaves_no_state(served, length, steps, held):
    """Damaged are pages of its first chunk, behind so many decode steps, or when so many pages are held."""
    server, oracle = served.server, served.oracle
    [prompt] = make_prompts(6, length)
    server.flush()
    before, ended = server.state(), []
    asked = threading.Thread(target=lambda: ended.append(refused(server, prompt, 500)))
    asked.start()
    begun = before["totals"]["decode_steps"]
    wait_until(lambda: (now := server.state())["host_pages_used"] >= held and now["totals"]["decode_steps"] >= begun + steps)
    server.damage(RETRIEVAL[0], HEAD, *range(5, 60))
    asked.join()
    assert f"layer {RETRIEVAL[0]}, kv head {HEAD}: the KV changed in host memory" in ended[0]
    assert server.when_idle()["canary"]["requests_ended"] == before["canary"]["requests_ended"] + 1
    server.flush()  # of the pages that were damaged, only those that were recalled have been found
    assert server.generate(prompt, NEW_TOKENS)["output_ids"] == oracle.generate(prompt, NEW_TOKENS, SETTINGS).tokens
    assert_states_are_free(server)
