"""The driver of published benchmarks, against a server made here, with evaluators that are ours or stand in for lm-eval."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.accuracy.published import run as driver
from benchmarks.accuracy.published.evaluators import EVALUATORS
from benchmarks.accuracy.published.presets import PRESETS
from benchmarks.accuracy.published.system import name_of
from sglang_freekv.counts import RetrievalCounts

ROOT = Path(__file__).resolve().parents[2]

BUILT = {"method": "freekv", "budget_tokens": 2048, "sink_tokens": 512, "window_tokens": 512, "tau": 0.9, "digest": "min-max"}
BUILT |= {"page_size": 32, "pooling": "softmax-mean", "dense_layers": [0]}
MATH = [{"problem": "1+1?", "answer": "2"}, {"problem": "2+2?", "answer": "4"}]
DIARY = {
    "prompt": "Write 2 weeks.", "prefix": "#*# Week 1:", "type": "Week", "number": 2,
    "checks_once": {"1": "birthday"}, "checks_range": {"2": "trip"}, "checks_periodic": {"2": "club"},
}  # fmt: skip
LM_EVAL = """
import json, pathlib, sys, urllib.request
words = dict(zip(sys.argv, sys.argv[1:]))
model_args = dict(pair.split("=", 1) for pair in words["--model_args"].split(","))
records = json.loads(words["--metadata"])["records"]
for line in open(records):
    body = {"messages": [{"role": "user", "content": json.loads(line)["question"]}]}
    request = urllib.request.Request(model_args["base_url"], json.dumps(body).encode())
    print("answered", json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"], flush=True)
results = {"boxed_answer": {"pass,samples": 1.0, "avg,samples": 0.5, "boxed,samples": 0.75, "pass_stderr,samples": 0.1}}
path = pathlib.Path(words["--output_path"]) / "model" / "results_2025.json"
path.parent.mkdir(parents=True)
path.write_text(json.dumps({"results": results}))
"""


class FakeServer(ThreadingHTTPServer):
    """Answers like SGLang, with the text that ``answer`` gives for a path and a body; retrieval counts up with each answer.

    Args:
        built: the ``freekv`` block of /server_info; None of a stock server.
    """

    request_queue_size = 64

    def __init__(self, built: dict | None = BUILT) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.built, self.bodies, self.totals = built, [], RetrievalCounts().as_dict()
        self.answer = lambda path, body: "yes"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def info(self) -> dict:
        states = [{"freekv": {"totals": dict(self.totals)}} if self.built else {} for _ in range(2)]
        return {"model_path": "org/tiny", "version": "0.5.17", "internal_states": states} | ({"freekv": self.built} if self.built else {})


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, status: int, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply(200, self.server.info())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        try:
            text = self.server.answer(self.path, body)
        except KeyError as error:
            return self.reply(400, {"message": str(error)})
        self.server.totals = {name: total + (10 if name == "selected_units" else 5) for name, total in self.server.totals.items()}
        text = {"message": {"content": text}} if "chat" in self.path else {"text": text}
        self.reply(200, {"choices": [text | {"index": 0, "finish_reason": "stop"}], "usage": {"completion_tokens": 7}})


@pytest.fixture
def serve():
    """``with serve(built) as server``"""

    @contextmanager
    def start(built: dict | None = BUILT):
        server = FakeServer(built)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()

    return start


@pytest.fixture
def lm_eval(tmp_path, monkeypatch):
    """A package that stands in for lm-eval in the evaluator's process; ``lm_eval(source)`` is its program."""
    site = tmp_path / "site"
    for name in ("lm_eval", "aiohttp", "tenacity"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there, and a local server is asked past it
    return lambda source=LM_EVAL: (site / "lm_eval" / "__main__.py").write_text(source)


@pytest.fixture
def drive(tmp_path, capfd, monkeypatch):
    """``drive(server, benchmark, *words)``: exit status, what was printed, and the results' file."""
    monkeypatch.setattr("benchmarks.stamp._output", lambda *command: None)  # of git and the driver, which take their time

    def run(url: str, benchmark: str, *words: object) -> SimpleNamespace:
        common = ["--benchmark", benchmark, "--url", url, "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
        status = driver.main([*common, *map(str, words)])
        out, error = capfd.readouterr()
        path = tmp_path / "out" / f"published-{benchmark}.json"
        return SimpleNamespace(status=status, out=out, error=error, report=json.loads(path.read_text()) if path.exists() else None)

    return run


@pytest.fixture
def problems(tmp_path) -> Path:
    path = tmp_path / "math500.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MATH))
    return path


def test_list_and_dry_run_ask_no_server(drive, capfd):
    assert driver.main(["--list"]) == 0
    listed = capfd.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in listed] == list(PRESETS)
    done = drive("http://127.0.0.1:9", "longbench_v2", "--dry-run", "--model", "M")
    server, dense, evaluator = done.out.splitlines()
    assert server == (
        "server: python -m sglang.launch_server --model-path M --kv-retrieval freekv --freekv-preset paper --freekv-budget 2048 "
        "--freekv-sink 128 --freekv-window 128 --freekv-tau 0.8 --freekv-digest min-max"
    )
    assert dense == "server to compare with: python -m sglang.launch_server --model-path M"
    assert evaluator.startswith("evaluator: ") and " --eval-name longbench_v2 " in evaluator
    assert len(drive("U", "ruler", "--dry-run", "--lengths", 8192, 131072).out.splitlines()) == 4
    assert " --data DATA " in drive("U", "longgenbench", "--dry-run").out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--benchmark", "aime24", "--lengths", "4096"], "--lengths: expected none for aime24; leave it out"),
        (["--benchmark", "ruler", "--data", "d", "--lengths", "4096"], "--lengths: expected none for ruler with --data; leave it out"),
        (["--benchmark", "ruler", "--judge-url", "U"], "--judge-url: it has no effect on ruler; leave it out"),
        (["--benchmark", "ruler", "--limit", "0"], "--limit 0: expected 1 or more; leave it out for all questions"),
        ([], f"--benchmark: expected one of {', '.join(PRESETS)}, got none; see --list"),
    ],
)
def test_options_that_mean_nothing(words, message, capfd):
    assert driver.main([*words, "--dry-run"]) == 2
    assert capfd.readouterr().err == f"error: {message}\n"


def test_a_server_that_is_not_there(drive, problems):
    done = drive("http://127.0.0.1:9", "math500", "--data", problems)
    assert done.status == 2 and done.report is None
    refused = "http://127.0.0.1:9/server_info: <urlopen error [Errno 111] Connection refused>"
    assert done.error == f"error: {refused}; start the server above, or name another with --url\n"


def test_a_server_that_is_another(drive, problems, serve, monkeypatch):
    with serve() as server:
        monkeypatch.setattr(server, "info", lambda: {"object": "list"})
        done = drive(server.url, "math500", "--data", problems)
    assert done.status == 2 and "expected SGLang's, with internal_states; got {'object': 'list'}" in done.error


def test_an_evaluator_that_is_missing(drive, problems, serve, monkeypatch):
    evaluator = EVALUATORS["lm_eval_boxed"]
    monkeypatch.setattr(type(evaluator), "modules", ("json", "lm_eval_gone", "tenacity_gone"), raising=False)
    with serve() as server:
        done = drive(server.url, "math500", "--data", problems)
    assert done.status == 2 and done.report is None and not server.bodies
    assert done.error == (
        f"error: lm_eval: expected json, lm_eval_gone, tenacity_gone in {sys.executable}, missing lm_eval_gone tenacity_gone; "
        'pip install "lm_eval[api,ruler]==0.4.13" html2text beautifulsoup4, in an environment of its own if need be, '
        "and name it with --python\n"
    )


def test_an_interpreter_that_is_missing(drive, problems, serve):
    with serve() as server:
        done = drive(server.url, "math500", "--data", problems, "--python", "/no/python")
    assert done.status == 2 and done.error == "error: --python /no/python: expected an interpreter, got No such file or directory\n"


def test_questions_that_are_wrong(drive, problems, serve, lm_eval):
    lm_eval()
    problems.write_text('{"problem": 1}\n')
    with serve() as server:
        done = drive(server.url, "math500", "--data", problems)
    assert done.status == 2 and done.error == f"error: {problems}, line 1: problem: expected a text, got 1\n"


def test_scores_and_what_retrieval_did(drive, problems, serve, lm_eval):
    lm_eval()
    with serve() as server:
        server.totals = {name: 100 for name in server.totals}
        done = drive(f"{server.url}/v1/", "math500", "--data", problems)
        again = drive(server.url, "math500", "--data", problems, "--limit", 1)
        more = drive(server.url, "math500", "--data", problems, "--limit", 500)
    assert done.status == 0 and "WARNING" not in done.out and "answered yes\nanswered yes\n" in done.out
    (key, result), *_ = done.report["results"].items()
    assert key == "tiny/freekv-2048-512-512-0.9-min-max/all"
    assert result["scores"] == {"pass@8": 100, "avg@8": 50, "boxed": 75}
    assert result["retrieval"] == dict.fromkeys(server.totals, 20) | {"selected_units": 40}  # two answers, two schedulers
    assert result["preset"]["sampling"]["samples"] == 8 and result["server"]["freekv"] == BUILT and result["warnings"] == []
    assert "-m lm_eval --model local-chat-completions" in result["command"]
    assert done.report["runs"][0]["command"].startswith("python3 -m benchmarks.accuracy.published.run --benchmark math500 ")
    assert next(line for line in done.out.splitlines() if line.startswith(key)).split() == [key, "100", "50", "75", "0.5", "20"]
    assert list(more.report["results"]) == [key, *(f"tiny/freekv-2048-512-512-0.9-min-max/first{limit}" for limit in (1, 500))]
    assert again.out.count("answered yes") == 1 and more.out.count("answered yes") == 2


def test_a_server_without_retrieval_is_measured_as_dense(drive, problems, serve, lm_eval):
    lm_eval()
    with serve(built=None) as server:
        done = drive(server.url, "math500", "--data", problems)
    assert done.status == 0 and "WARNING no freekv block in /server_info: this measures dense attention" in done.out
    assert done.report["results"]["tiny/stock/all"]["retrieval"] is None


def test_a_server_with_other_settings(drive, problems, serve, lm_eval):
    lm_eval()
    with serve(built=BUILT | {"tau": 0.8, "dense_layers": []}) as server:
        done = drive(server.url, "math500", "--data", problems)
    expected = ["tau: expected 0.9, the server has 0.8", "dense_layers: expected [0], the server has []"]
    assert done.report["results"]["tiny/freekv-2048-512-512-0.8-min-max/all"]["warnings"] == expected
    assert all(f"WARNING {warning}" in done.out for warning in expected)


def test_retrieval_that_did_nothing(drive, problems, serve, lm_eval):
    lm_eval()
    with serve() as server:
        info = server.info()
        server.info = lambda: info
        done = drive(server.url, "math500", "--data", problems)
    assert done.status == 0 and "WARNING no page was selected" in done.out
    assert set(done.report["results"]["tiny/freekv-2048-512-512-0.9-min-max/all"]["retrieval"].values()) == {0}


def test_an_evaluator_that_fails(drive, problems, serve, lm_eval):
    lm_eval("import sys; print('half way'); sys.exit(7)")
    with serve() as server:
        done = drive(server.url, "math500", "--data", problems)
    assert done.status == 7 and "half way\n" in done.out
    assert "FAILED tiny/freekv-2048-512-512-0.9-min-max/all: EvaluatorFailed: lm_eval ended with status 7" in done.out
    assert done.report["results"] == {} and "tiny/freekv-2048-512-512-0.9-min-max/all" in done.report["runs"][0]["failures"]


def test_an_evaluator_that_leaves_nothing(drive, problems, serve, lm_eval):
    lm_eval("print('Saving failed')")
    with serve() as server:
        done = drive(server.url, "math500", "--data", problems)
    assert done.status == 1 and "expected a results_*.json under" in done.out


def test_a_server_that_is_started_anew(drive, problems, serve, lm_eval):
    lm_eval()

    def answer(path: str, body: dict) -> str:
        server.totals = dict.fromkeys(server.totals, 0)
        return "yes"

    with serve() as server:
        server.totals, server.answer = dict.fromkeys(server.totals, 100), answer
        done = drive(server.url, "math500", "--data", problems)
    assert done.status == 1 and "the server was started anew meanwhile" in done.out


def test_longgenbench(drive, serve, tmp_path):
    data = tmp_path / "Dataset_short.json"
    data.write_text(json.dumps([DIARY, DIARY | {"prompt": "Write two weeks."}]))

    def answer(path: str, body: dict) -> str:
        prompt = body["messages"][0]["content"]
        if prompt.startswith("Write"):
            return " a birthday\n#*# Week 2: a club" if prompt == DIARY["prompt"] else " nothing"
        entry, event = prompt.split("\n\nDoes this text include the following: ")
        return "Yes." if event.split("?")[0] in entry else "No."

    with serve() as server:
        server.answer = answer
        unjudged = drive(server.url, "longgenbench", "--data", data)
        texts = next((tmp_path / "work").rglob("texts.jsonl"))
        done = drive(server.url, "longgenbench", "--data", data, "--texts", texts, "--judge-url", f"{server.url}/v1")
    (_, first), (_, result) = unjudged.report["results"].popitem(), done.report["results"].popitem()
    assert first["scores"] == {"texts": 2, "completion_rate": 75, "unfinished": 0, "judge": None}
    generated, questions = ([body for _, body in server.bodies if body["max_tokens"] == tokens] for tokens in (16000, 50))
    assert len(generated) == 2 and all(body["temperature"] == body["top_p"] == 0.95 for body in generated)
    assert all(body["stop"] == ["*** finished"] for body in generated)
    assert len(questions) == 4 and questions[0]["chat_template_kwargs"] == {"enable_thinking": False}
    scores = result["scores"]
    assert scores["accuracy_once"] == scores["accuracy"] == 50 and (scores["accuracy_range"], scores["accuracy_periodic"]) == (0, 100)
    assert scores["overall"] == 37.5 and scores["judge"] == "Qwen/Qwen3-32B" and done.status == 0
    assert "2 of 2 texts are in" in done.out and "accuracy: expected a judge" in unjudged.out


def test_longgenbench_keeps_what_came_before_a_failure(drive, serve, tmp_path):
    data = tmp_path / "Dataset_short.json"
    data.write_text(json.dumps([DIARY, DIARY | {"prompt": "Refused"}]))
    with serve() as server:
        server.answer = lambda path, body: {DIARY["prompt"]: "#*# Week 2"}[body["messages"][0]["content"]]
        done = drive(server.url, "longgenbench", "--data", data)
        texts = next((tmp_path / "work").rglob("texts.jsonl"))
        assert done.status == 1 and "error: 1 of 2 requests failed, the first: " in done.out and "answered 400" in done.out
        assert len(texts.read_text().splitlines()) == 1
        data.write_text(json.dumps([DIARY | {"prompt": "Another"}]))
        other = drive(server.url, "longgenbench", "--data", data, "--texts", texts)
    assert other.status == 1 and "line 1: expected a text for prompt" in other.out and "name another --out" in other.out
    assert "longgenbench: expected a file" not in other.error
    assert drive(server.url, "longgenbench").status == 2


def test_ruler_files_that_are_wrong(drive, serve, tmp_path):
    (tmp_path / "vt.jsonl").write_text('{"input": "q", "outputs": []}\n')
    with serve() as server:
        done = drive(server.url, "ruler", "--data", tmp_path / "vt.jsonl")
    assert done.status == 2 and done.error == f"error: {tmp_path / 'vt.jsonl'}, line 1: outputs: expected texts, got []\n"


def test_ruler_from_files(drive, serve, tmp_path):
    for task, outputs in (("niah_single_1", ["11"]), ("qa_2", ["x", "Paris"])):
        (tmp_path / "data" / task).mkdir(parents=True)
        row = {"index": 0, "input": f"{task}?", "answer_prefix": " It is", "outputs": outputs, "length": 4096}
        (tmp_path / "data" / task / "validation.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    with serve(built=BUILT | {"sink_tokens": 128, "window_tokens": 128, "tau": 0.8}) as server:
        server.answer = lambda path, body: " 11" if body["prompt"] == "niah_single_1? It is" else " in Paris."
        done = drive(server.url, "ruler", "--data", tmp_path / "data", "--limit", 1)
    assert done.status == 0 and "WARNING" not in done.out
    scores = done.report["results"]["tiny/freekv-2048-128-128-0.8-min-max/first1"]["scores"]
    assert scores == {"mean": 100, "niah_single_1": 100, "qa_2": 100, "questions": 2, "longest": 4096}
    assert sorted((path, body["max_tokens"], body["temperature"]) for path, body in server.bodies) == [
        ("/v1/completions", 32, 0),
        ("/v1/completions", 128, 0),
    ]


@pytest.mark.parametrize(
    "built, name",
    [
        (None, "stock"),
        (BUILT, "freekv-2048-512-512-0.9-min-max"),
        (BUILT | {"method": "quest", "tau": None, "pooling": "max"}, "quest-2048-512-512-min-max"),
        (BUILT | {"page_size": 8, "pooling": "max"}, "freekv-2048-512-512-0.9-min-max-max-page-8"),
    ],
)
def test_a_result_is_named_by_the_system(built, name):
    assert name_of({"freekv": built}) == name
