"""Whatever clients send, beside each other: an answer or an error that says what is wrong, and a server that goes on as before."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from room import room_for
from serving import DEADLINE_S, NEEDLE_CONFIG, TestServer, freekv, start_all
from sglang_freekv import releases
from traffic_beside import Beside

pytestmark = [pytest.mark.two_servers, pytest.mark.both_releases]

EXAMPLES, AT_ONCE = 16, 5
POOL, CHUNK = 8192, 64
KINDS = {"tree": {}} | ({"bare": {"--disable-radix-cache": True}} if releases.is_since(releases.NEWEST) else {})
HIDDEN = NEEDLE_CONFIG["hidden_size"]
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
processor = st.sampled_from((DisallowedTokensLogitsProcessor().to_str(), "{}", '{"callable": "80"}')) | anything
embeddings = st.tuples(st.integers(0, 70), st.sampled_from((HIDDEN, HIDDEN, 0, HIDDEN + 1)), st.sampled_from((0.1, -3e38, 1e300))).map(
    lambda shape: [[shape[2]] * shape[1]] * shape[0]
)
session = st.fixed_dictionaries({}, optional={"id": st.sampled_from(("fuzzed", "gone")), "rid": anything, "replace": anything}) | anything
SAMPLING = {
    "max_new_tokens": few, "temperature": number, "top_p": number, "top_k": count | number, "min_p": number, "min_new_tokens": count,
    "frequency_penalty": number, "presence_penalty": number, "repetition_penalty": number, "stop": anything, "n": count | anything,
    "stop_token_ids": st.lists(token, max_size=3) | anything, "ignore_eos": anything, "skip_special_tokens": anything,
    "logit_bias": st.dictionaries(st.sampled_from(("0", "5119", "5120", "-1", "x")), number, max_size=2) | anything,
    "sampling_seed": count, "custom_params": st.fixed_dictionaries({"token_ids": st.lists(token, max_size=3)}) | anything,
    "stop_regex": st.sampled_from(("a", "(", r"(\\w+\\s*)+$", "(?<=a+)b")) | anything, "unknown": anything,
    "regex": st.sampled_from(("[ab]+", "(", "")) | anything, "json_schema": st.sampled_from(("{}", "[[", '{"type": "object"}')) | anything,
    "ebnf": st.sampled_from(('start: start start | "a"', "x")) | anything, "structural_tag": anything,
}  # fmt: skip
GENERATE = {
    "input_ids": prompts, "text": anything, "sampling_params": anything, "stream": anything, "rid": anything, "return_logprob": anything,
    "logprob_start_len": count, "top_logprobs_num": count, "token_ids_logprob": st.lists(token, max_size=3) | anything,
    "priority": anything, "extra_key": anything,
    "session_params": session, "input_embeds": embeddings | anything, "image_data": anything, "return_hidden_states": anything,
    "lora_path": anything, "custom_logit_processor": processor, "background": anything, "unknown": anything, "bootstrap_host": anything,
    "return_sampling_mask": anything, "return_flat_raw_top_logprobs": anything, "session_id": anything, "require_reasoning": anything,
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
SCORING = {
    "model": anything, "query": st.text(max_size=20) | prompts, "items": st.lists(st.text(max_size=9), max_size=3) | anything,
    "label_token_ids": st.lists(token, max_size=3) | anything, "apply_softmax": anything, "item_first": anything,
}  # fmt: skip
LONG = [5, 6, 7, 8] * 30  # longer than a chunk
SOUND = {  # what a request is made from, and what may be put in the place of its parts
    "/generate": ({"input_ids": LONG, "sampling_params": {"max_new_tokens": 3}}, GENERATE),
    "/v1/completions": ({"model": "needle", "prompt": "a b c", "max_tokens": 3}, COMPLETIONS),
    "/v1/chat/completions": ({"model": "needle", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 3}, CHAT),
    "/v1/score": ({"model": "needle", "query": "a b", "items": ["c", "d"], "label_token_ids": [5, 6]}, SCORING),
}


def changes(parts: dict) -> st.SearchStrategy[dict]:
    """One to three parts, and what they become."""
    return st.lists(st.sampled_from(sorted(parts)), min_size=1, max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: parts[name] for name in names})
    )


@st.composite
def requests(draw) -> tuple[str, dict]:
    path = draw(st.sampled_from(("/generate", "/generate", *SOUND)))
    sound, parts = SOUND[path]
    if path == "/generate" and draw(st.booleans()):
        return path, sound | {"sampling_params": sound["sampling_params"] | draw(changes(SAMPLING))}
    return path, sound | draw(changes(parts))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """With a prefix tree and without; SGLang answers some requests with a traceback in its log, so the log tells nothing here."""
    flags = freekv(256, canary="full") | {
        "--max-total-tokens": POOL, "--chunked-prefill-size": CHUNK, "--enable-custom-logit-processor": True, "--grammar-backend": "llguidance",
    }  # fmt: skip
    with room_for(len(KINDS)):
        running = start_all(TestServer(flags | more, tmp_path_factory.mktemp("server") / "log.txt") for more in KINDS.values())
    yield dict(zip(KINDS, running))
    for server in running:
        server.stop()


@pytest.fixture(params=KINDS)
def server(servers, request):
    yield servers[request.param]
    assert servers[request.param].flush()["host_pages_used"] == 0


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


def answers_to(server, requests) -> list[tuple[int, str]]:
    """All at once."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: answer_to(server, *request), requests))


def test_requests_are_answered_or_refused(server):
    seen: dict[int, int] = {}
    server.post("/open_session", {"capacity_of_str_len": 1000, "session_id": "fuzzed"})

    @given(st.lists(requests(), min_size=AT_ONCE, max_size=AT_ONCE))
    @settings(max_examples=EXAMPLES, phases=[Phase.generate])  # to find a smaller case takes longer than the servers may
    def send(mixed) -> None:
        for request, (status, text) in zip(mixed, answers_to(server, mixed), strict=True):
            seen[status] = seen.get(status, 0) + 1
            assert server.is_alive(), f"{mixed} ended the server\n{server.tail()}"
            assert status < 500 and text.strip(), f"{request} was answered {status}: {text[:300]}\n{server.tail()}"

    with Beside(server):
        send()
    print(seen)
    assert min(seen.get(200, 0), seen.get(400, 0)) > EXAMPLES * AT_ONCE // 10
    server.open("/close_session", {"session_id": "fuzzed"}).close()


def generate(params: dict | None = None, **parts) -> dict:
    return {"input_ids": LONG, "sampling_params": {"max_new_tokens": 4} | (params or {})} | parts


PROCESSOR = DisallowedTokensLogitsProcessor().to_str()
CHOSEN = {"return_logprob": True, "token_ids_logprob": [5, 6]}
EMBEDS = {"input_ids": None, "input_embeds": [[0.1] * HIDDEN] * 90}
ENDED_A_STOCK_SERVER = {  # or filled its memory, or were answered 500: status now, and the body
    "chosen token ids in a mixed batch": (200, generate(**CHOSEN)),
    "the same with a prefix": (200, generate(**CHOSEN, logprob_start_len=0)),
    "a host of a disaggregated server": (400, generate(bootstrap_host="2.2.2.2")),
    "top_k of 34 bits": (400, generate({"top_k": 2**33})),
    "min_new_tokens of 34 bits": (400, generate({"min_new_tokens": 2**33, "max_new_tokens": None})),
    "an unknown parameter": (400, generate({"unknown": 1})),
    "a parameter of SGLang's own": (400, generate({"is_normalized": True})),
    "half an answer": (400, generate({"n": 1.5})),
    "no count of answers": (200, generate({"n": None})),
    "2 ** 31 answers": (400, generate({"n": 2**31})),
    "a list of names for one request": (400, generate(rid=["a"])),
    "the name of a health check": (400, generate(rid="HEALTH_CHECK_1")),
    "an unknown stop token": (400, generate({"min_new_tokens": 2, "stop_token_ids": [99999]})),
    "no token may come": (200, generate({"min_new_tokens": 2, "stop_token_ids": list(range(5120))})),
    "no token is likely": (200, generate({"logit_bias": {str(token): -1e30 for token in range(5120)}})),
    "a penalty that is 0 in float32": (400, generate({"repetition_penalty": 1e-300})),
    "an endless temperature": (400, generate({"temperature": 1e39})),
    "an endless search": (200, generate({"stop_regex": "(x+x+)+y", "max_new_tokens": 20})),
    "no regular expression": (400, generate({"stop_regex": "(" * 3000})),
    "a processor that is none": (400, generate(custom_logit_processor="x")),
    "a processor without its parameters": (400, generate(custom_logit_processor=PROCESSOR)),
    "a processor with tokens that are none": (400, generate({"custom_params": {"token_ids": [99999]}}, custom_logit_processor=PROCESSOR)),
    "a processor": (200, generate({"custom_params": {"token_ids": [5]}}, custom_logit_processor=PROCESSOR)),
    "the processor with other parameters": (200, generate({"custom_params": {"token_ids": [6]}}, custom_logit_processor=PROCESSOR)),
    "a grammar that wants to end too early": (400, generate({"regex": "a", "min_new_tokens": 3})),
    "a bad grammar": (400, generate({"json_schema": "[" * 9999})),
    "a session without tokens": (400, generate(input_ids=[], session_params={"id": "killers"})),
    "replace without rid": (400, generate(session_params={"id": "killers", "replace": True})),
    "a priority": (200, generate(priority=5)),
    "no token": (400, generate(input_ids=[[5, 6], []])),
    "too few parts for a batch": (400, generate(input_ids=[[5], [6]], lora_path=[None])),
    "more values than memory": (400, generate({"max_new_tokens": 8000}, return_logprob=True, top_logprobs_num=5120)),
    "embeddings of another width": (400, generate(**EMBEDS | {"input_embeds": [[0.1] * (HIDDEN + 1)] * 3})),
    "ragged embeddings": (400, generate(**EMBEDS | {"input_embeds": [[0.1], [0.1, 0.2]]})),
    "embeddings that are empty": (400, generate(**EMBEDS | {"input_embeds": [[]]})),
}


def test_what_ended_a_stock_server(server):
    server.post("/open_session", {"capacity_of_str_len": 1000, "session_id": "killers"})
    with Beside(server), ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda case: answer_to(server, "/generate", case[1]), ENDED_A_STOCK_SERVER.values()))
    assert server.is_alive(), server.tail()
    for (name, (status, _)), answer in zip(ENDED_A_STOCK_SERVER.items(), answers, strict=True):
        assert answer[0] == status, f"{name}: {answer}"
    server.open("/close_session", {"session_id": "killers"}).close()


def test_chosen_token_ids_have_their_logprobs_in_any_company(server):
    def values(answer):
        return [[pair[:2] for pair in position] for position in json.loads(answer)["meta_info"]["output_token_ids_logprobs"]]

    body = generate({"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}, **CHOSEN)
    score = ("/v1/score", SOUND["/v1/score"][0])
    alone = values(answer_to(server, "/generate", body)[1])
    scores = json.loads(answer_to(server, *score)[1])["scores"]
    with Beside(server):
        answers = answers_to(server, [("/generate", body), score, score, ("/generate", body), score, score])
    for (path, _), (status, text) in zip([("/generate", 0), score, score, ("/generate", 0), score, score], answers, strict=True):
        assert status == 200, text
        if path == "/generate":
            assert [[token for _, token in step] for step in values(text)] == [[5, 6]] * 8
            flat = [value for step in values(text) for value, _ in step]
            assert flat == pytest.approx([value for step in alone for value, _ in step], abs=1e-3)
        else:
            assert sum(json.loads(text)["scores"], []) == pytest.approx(sum(scores, []), abs=1e-3)


@pytest.mark.skipif("bare" not in KINDS, reason="the newest release alone has a server without a tree here")
def test_embeddings_share_a_batch(servers):
    """A list of embeddings among tokens ends a stock server; these are longer than a chunk."""
    server = servers["bare"]
    body = generate({"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}, **EMBEDS)
    alone = json.loads(answer_to(server, "/generate", body)[1])["output_ids"]
    with Beside(server):
        for status, text in answers_to(server, [("/generate", body)] * 4):
            assert status == 200 and json.loads(text)["output_ids"] == alone
    assert answer_to(servers["tree"], "/generate", body)[0] == 400  # SGLang takes them with --disable-radix-cache only


CONTROLS = [  # path, body, and whether it can be done
    ("/pause_generation", {"mode": "in_place"}, 200), ("/pause_generation", {"mode": "retract"}, 200), ("/continue_generation", {}, 200),
    ("/pause_generation", {"mode": "retract"}, 200), ("/update_weights_from_disk", {"model_path": "/none", "flush_cache": True}, 400),
    ("/continue_generation", {"torch_empty_cache": True}, 200), ("/pause_generation", {"mode": "x"}, 400),
    ("/slow_down", b'{"forward_sleep_time": NaN}', 400), ("/slow_down", {"forward_sleep_time": 1e300}, 400), ("/slow_down", {"forward_sleep_time": None}, 200),
    ("/release_memory_occupation", {}, 400), ("/resume_memory_occupation", {"tags": ["x"]}, 400),
    ("/start_expert_distribution_record", {}, 400), ("/stop_profile", {}, 400), ("/start_profile", {"profile_by_stage": True}, 200),
    ("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": "x"}}, 400), ("/configure_logging", {"log_level": "x"}, 400),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}, 400), ("/get_weights_by_name", {"name": "x"}, 400),
    ("/update_weights_from_distributed", {"names": ["x"], "dtypes": ["x"], "shapes": [[1]]}, 400), ("/destroy_weights_update_group", {}, 400),
    ("/load_lora_adapter", {"lora_name": "x", "lora_path": "/none"}, 400), ("/unload_lora_adapter", {"lora_name": "x"}, 400),
    ("/weights_checker", {"action": "x"}, 400), ("/abort_request", {"rid": ""}, 200), ("/close_session", {"session_id": "none"}, 200),
    ("/parse_function_call", {"text": "x", "tools": [], "tool_call_parser": "x"}, 400), ("/separate_reasoning", {"text": "x", "reasoning_parser": "x"}, 400),
    ("/encode", {"text": "a"}, 400), ("/classify", {"input_ids": []}, 400), ("/v1/embeddings", {"model": "needle", "input": "a"}, 400),
]  # fmt: skip


TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_call_parser": "qwen25"}
INSTANCE, NO_IMAGE = {"text": "a b"}, [{"role": "user", "content": [{"type": "image"}]}]
LONE = b'{"model": "x", "text": "\\ud800", "prompt": "\\ud800", "input": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}'
TAKE_TEXT = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/api/chat")
CLIENTS_MISTAKES = [  # each was answered with status 500, or could end the scheduler
    ("/vertex_generate", {"instances": [INSTANCE], "parameters": {"bogus": 1}}),
    ("/vertex_generate", {"instances": [INSTANCE, {"text": "b"}, {}]}), ("/vertex_generate", {"instances": [{"sampling_params": 5}]}),
    ("/vertex_generate", {"instances": [{"image_data": 5}]}), ("/vertex_generate", {"instances": [{"text": 5}]}),
    ("/vertex_generate", {"instances": [5]}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [2**40]}),
    ("/v1/responses", {"model": "x", "input": []}), ("/v1/responses", {"model": "x", "input": [{"type": "reasoning"}]}),
    *(("/v1/messages/count_tokens", {"model": "x", "messages": messages}) for messages in ([], NO_IMAGE)),
    *(("/v1/messages", {"model": "x", "max_tokens": 3, "messages": messages}) for messages in ([], NO_IMAGE)),
    ("/api/chat", {"model": "x", "messages": []}), ("/parse_function_call", TOOLS | {"text": "<tool_call>\n[5]\n</tool_call>"}),
    ("/set_internal_state", b'{"server_args": {"pp_max_micro_batch_size": NaN}}'),
    ("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 1.5}}),
    ("/v1/score", SOUND["/v1/score"][0] | {"label_token_ids": []}),
    ("/configure_logging", {"log_requests": True, "log_requests_level": 7}), ("/start_profile", {"num_steps": 2**70}),
    *((path, LONE) for path in TAKE_TEXT),
]  # fmt: skip


def test_a_clients_mistake_is_no_fault_of_the_server(servers):
    server = servers["tree"]
    for path, body in CLIENTS_MISTAKES:
        status, text = answer_to(server, path, body)
        assert server.is_alive() and 400 <= status < 500 and text.strip(), f"{path} {body}: {status} {text[:300]}\n{server.tail()}"
    assert server.generate(LONG, 4)["output_ids"]


def test_control_requests_beside_generation(server):
    with Beside(server):
        for path, body, expected in CONTROLS:
            status, text = answer_to(server, path, body)
            assert server.is_alive() and status == expected, f"{path} {body}: {status} {text[:300]}\n{server.tail()}"


def test_a_session_goes_on(server):
    server.post("/open_session", {"capacity_of_str_len": 1000, "session_id": "s"})
    for session in ({"id": "s"}, {"id": "s", "rid": "first"}, {"id": "s", "rid": "first", "replace": True, "offset": 40}):
        body = {"input_ids": list(range(5, 55)), "sampling_params": {"max_new_tokens": 4}, "session_params": session}
        body |= {"rid": "first"} if len(session) == 1 else {}
        assert answer_to(server, "/generate", body)[0] == 200
    server.open("/close_session", {"session_id": "s"}).close()


ENDLESS = b'{"input_ids": [5], "sampling_params": {"max_new_tokens": 1e999}}'


def test_what_is_no_request_is_refused(servers):
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", ENDLESS):
        status, text = answer_to(servers["tree"], "/generate", body)
        assert 400 <= status < 500 and text.strip()
    assert servers["tree"].generate([5, 6, 7, 8], 4)["output_ids"]
