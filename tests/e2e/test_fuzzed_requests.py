"""Whatever a client sends: an answer or an error that says what is wrong, in time, and a server that goes on as before."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import TestServer, freekv, start_all

pytestmark = pytest.mark.two_servers

DEADLINE_S, EXAMPLES = 60, 80
POOL = 8192
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(("", "\x00", "nan", "-1", "a" * 3000)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
token = st.integers(0, 5119) | st.sampled_from((-1, 5119, 5120, 2**31, 2**63, 2**70, 1.5, None, "7", True))
prompts = st.one_of(
    st.lists(st.integers(0, 5119), min_size=1, max_size=200),
    st.lists(token, max_size=6),
    st.lists(st.lists(token, max_size=4), max_size=3),
    st.sampled_from((POOL - 65, POOL - 64, POOL - 63, POOL, 3 * POOL)).map(lambda length: [7] * length),
    anything,
)
number = st.floats() | st.integers(-3, 3) | st.floats(-2, 3) | anything
count = st.integers(-2, 8) | st.sampled_from((0, 2**31, 2**63, 2**70, 1.5, "4", None))
few = st.integers(-2, 8) | st.sampled_from((2**31, 2**63, 2**70, 1.5, "4"))  # None is as many as there is room for
SAMPLING = {
    "max_new_tokens": few, "temperature": number, "top_p": number, "top_k": count | number, "min_p": number, "min_new_tokens": count,
    "frequency_penalty": number, "presence_penalty": number, "repetition_penalty": number, "stop": anything, "n": count | anything,
    "stop_token_ids": st.lists(token, max_size=3) | anything, "ignore_eos": anything, "skip_special_tokens": anything,
    "logit_bias": st.dictionaries(st.sampled_from(("0", "5119", "5120", "-1", "x")), number, max_size=2) | anything,
    "sampling_seed": count, "custom_params": anything, "stop_regex": anything, "unknown": anything,
}  # fmt: skip
GENERATE = {
    "input_ids": prompts, "text": anything, "sampling_params": anything, "stream": anything, "rid": anything, "return_logprob": anything,
    "logprob_start_len": count, "top_logprobs_num": count, "token_ids_logprob": st.lists(token, max_size=3) | anything,
    "priority": anything, "extra_key": anything,
    "session_params": anything, "input_embeds": anything, "image_data": anything, "return_hidden_states": anything,
    "lora_path": anything, "custom_logit_processor": anything, "background": anything, "unknown": anything,
}  # fmt: skip
COMPLETIONS = {
    "model": anything, "prompt": st.text(max_size=40) | prompts, "max_tokens": few, "temperature": number, "top_p": number, "n": count,
    "stop": anything, "stream": anything, "logprobs": count, "echo": anything, "suffix": anything, "logit_bias": anything, "best_of": count,
    "seed": count, "user": anything, "min_tokens": count, "ignore_eos": anything, "stream_options": anything,
}  # fmt: skip
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(("user", "assistant", "system", "x")), "content": st.text(max_size=20) | anything})
CHAT = COMPLETIONS | {
    "messages": st.lists(MESSAGE | anything, max_size=3) | anything, "tools": anything, "tool_choice": anything, "top_logprobs": count,
    "response_format": anything, "chat_template_kwargs": anything,
}  # fmt: skip
SOUND = {  # what a request is made from, and what may be put in the place of its parts
    "/generate": ({"input_ids": [5, 6, 7, 8] * 20, "sampling_params": {"max_new_tokens": 3}}, GENERATE),
    "/v1/completions": ({"model": "needle", "prompt": "a b c", "max_tokens": 3}, COMPLETIONS),
    "/v1/chat/completions": ({"model": "needle", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 3}, CHAT),
}


def changes(parts: dict) -> st.SearchStrategy[dict]:
    """One to three parts, and what they become."""
    return st.lists(st.sampled_from(sorted(parts)), min_size=1, max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: parts[name] for name in names})
    )


@st.composite
def requests(draw, path: str) -> dict:
    sound, parts = SOUND[path]
    if path == "/generate" and draw(st.booleans()):
        return sound | {"sampling_params": sound["sampling_params"] | draw(changes(SAMPLING))}
    return sound | draw(changes(parts))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """SGLang answers some requests with a traceback in its log, so the log tells nothing here."""
    flags = freekv(256, canary="full") | {"--max-total-tokens": POOL}
    (server,) = start_all([TestServer(flags, tmp_path_factory.mktemp("server") / "log.txt")])
    yield server
    server.stop()


def answer_to(server, path: str, body) -> tuple[int, str]:
    """Status and text of the answer; a stream is read to its end."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=DEADLINE_S) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


@pytest.mark.parametrize("path", SOUND)
def test_a_request_is_answered_or_refused(server, path):
    known = server.generate(range(100, 400), 8)["output_ids"]
    seen: dict[int, int] = {}

    @given(requests(path))
    @settings(max_examples=EXAMPLES)
    def send(body) -> None:
        status, text = answer_to(server, path, body)
        seen[status] = seen.get(status, 0) + 1
        assert server.is_alive(), f"{body} ended the server\n{server.tail()}"
        assert text.strip(), f"{body} was answered {status} without a word"

    send()
    print(path, seen)
    assert min(seen.get(200, 0), seen.get(400, 0)) > EXAMPLES // 10
    assert server.generate(range(100, 400), 8)["output_ids"] == known
    assert server.flush()["host_pages_used"] == 0


@pytest.mark.parametrize("changed, named", [
    ({"skip_special_tokens": "yes"}, "skip_special_tokens"), ({"n": 2**31}, "n is 2147483648, expected at most 1024"),
    ({"sampling_seed": 2**70}, "sampling_seed"), ({"stop_token_ids": {"a": 1}}, "stop_token_ids"),
])  # fmt: skip
def test_what_would_end_a_process_is_refused_by_name(server, changed, named):
    """Each of these ends a stock server, or fills the machine's memory."""
    status, text = answer_to(server, "/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3} | changed})
    assert status == 400 and named in text
    status, text = answer_to(server, "/generate", {"input_ids": [5, 6, 7], "return_hidden_states": [False]})
    assert status == 400 and "return_hidden_states is '[False]': Expected" in text


@pytest.mark.parametrize("changed, named", [
    ({"input_ids": [[]]}, "input_ids: found no token"), ({"input_ids": [[5, 6], []]}, "input_ids: found no token"),
    ({"return_logprob": True, "logprob_start_len": -9}, "logprob_start_len is -9"),
    ({"positional_embed_overrides": {"a": 1}}, "positional_embed_overrides is"),
    ({"session_params": {"id": ["a"]}}, "at `$.id`"), ({"session_params": {"id": "s", "rid": ["a"]}}, "at `$.rid`"),
    ({"session_params": {"id": "s", "offset": 1.5}}, "at `$.offset`"), ({"session_params": {"bogus": 5}}, "unknown field `bogus`"),
    ({"session_params": {"id": "s", "replace": True}}, "replace without rid"),
])  # fmt: skip
def test_what_would_end_the_scheduler_is_refused_by_name(server, changed, named):
    body = {"input_ids": list(range(5, 55)), "sampling_params": {"max_new_tokens": 4}} | changed
    status, text = answer_to(server, "/generate", body)
    assert server.is_alive() and status == 400 and named in text
    known = {"return_logprob": True, "logprob_start_len": -1}
    assert answer_to(server, "/generate", body | {name: None for name in changed} | {"input_ids": [5, 6, 7]} | known)[0] == 200


def test_a_session_goes_on(server):
    server.post("/open_session", {"capacity_of_str_len": 1000, "session_id": "s"})
    for session in ({"id": "s"}, {"id": "s", "rid": "first"}, {"id": "s", "rid": "first", "replace": True, "offset": 40}):
        body = {"input_ids": list(range(5, 55)), "sampling_params": {"max_new_tokens": 4}, "session_params": session}
        body |= {"rid": "first"} if len(session) == 1 else {}
        assert answer_to(server, "/generate", body)[0] == 200
    server.open("/close_session", {"session_id": "s"}).close()
    assert server.flush()["host_pages_used"] == 0


ENDLESS = b'{"input_ids": [5], "sampling_params": {"max_new_tokens": 1e999}}'


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", ENDLESS])
def test_what_is_no_request_is_refused(server, body):
    status, text = answer_to(server, "/generate", body)
    assert 400 <= status < 500 and text.strip()
    assert server.generate([5, 6, 7, 8], 4)["output_ids"]
