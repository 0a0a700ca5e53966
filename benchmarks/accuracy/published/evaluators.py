"""Programs that put a benchmark to a server: their command lines, what they need, and the scores they leave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.accuracy.published import longbench_v2
from benchmarks.accuracy.published.endpoint import LOCAL
from benchmarks.accuracy.published.presets import Preset

HERE = Path(__file__).resolve().parent
LM_EVAL = "lm_eval[api,ruler]==0.4.13"
TEMPLATE_TOKENS = 256  # a chat template adds them to RULER's lengths
REQUEST_S = 7200


class EvaluatorFailed(RuntimeError):
    """It ended with ``status``, or left no result."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def call(command: list[str], log: Path) -> tuple[int, str]:
    """Runs an evaluator and shows what it prints; its exit status, and all that."""
    past_proxies = ",".join([os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "", *LOCAL]).lstrip(",")
    environment = {"OPENAI_API_KEY": "EMPTY", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    environment |= {"no_proxy": past_proxies, "NO_PROXY": past_proxies}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment)
        try:
            for line in process.stdout:
                file.write(line)
                print(line, end="", flush=True)
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return status, log.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Run:
    """One run of an evaluator.

    Args:
        url: of the server.
        model: name or directory of the model, for its tokenizer.
        directory: takes what the evaluator writes.
        records: the questions, where the driver wrote or was given them.
        length: context length of the questions; None, their own.
        python: interpreter that has the evaluator.
        judge: options of LongGenBench's judge and its generations, as typed.
    """

    url: str
    model: str
    directory: Path
    concurrency: int = 16
    records: Path | None = None
    length: int | None = None
    limit: int | None = None
    python: str = sys.executable
    judge: dict[str, str] = field(default_factory=dict)


ANSWER_S = 60  # of an interpreter that is asked what it has
WHAT_IS_THERE = """
import sys
from importlib import machinery, metadata, util

def lacks(module):  # packages are not imported: SGLang's takes half a minute
    name, *parts = module.split(".")
    spec = util.find_spec(name)
    for part in parts:
        name = f"{name}.{part}"
        spec = spec and machinery.PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is None

name, *modules = sys.argv[1:]
print(*filter(lacks, modules))
try:
    print(metadata.version(name))
except metadata.PackageNotFoundError:
    print("unknown")
"""


class Evaluator(ABC):
    """A program; ``modules`` are those it imports, ``remedy`` is how to get them, empty for those of this repository."""

    name: str
    modules: tuple[str, ...] = ()
    remedy = ""

    @abstractmethod
    def command(self, preset: Preset, run: Run) -> list[str]:
        """What is typed."""

    @abstractmethod
    def scores(self, preset: Preset, run: Run, log: str) -> dict[str, float]:
        """In percent, from the files of ``run`` and what the evaluator printed.

        Raises:
            EvaluatorFailed: there is no result, or one of questions that were not answered.
        """

    def version(self, python: str) -> str:
        """Raises EvaluatorFailed, in one line, if a module is missing."""
        if not self.modules:
            return "this repository's"
        command = [python, "-P", "-c", WHAT_IS_THERE, self.name, *self.modules]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
        except OSError as error:
            raise EvaluatorFailed(f"--python {python}: expected an interpreter, got {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise EvaluatorFailed(f"--python {python}: expected an answer within {ANSWER_S} s, got none; try it by hand") from None
        if found.returncode:
            raise EvaluatorFailed(f"--python {python}: expected Python 3.11 or later, got {found.stderr.strip().splitlines()[-1:]}")
        missing, version = found.stdout.splitlines()
        if missing:
            raise EvaluatorFailed(f"{self.name}: expected {', '.join(self.modules)} in {python}, missing {missing}; {self.remedy}")
        return version


class LongBenchV2(Evaluator):
    """SGLang's own, on prompts that the driver has cut. SGLang 0.5.17 has it, and 0.5.23 has not."""

    name, modules = "sglang", ("sglang.test.simple_eval_longbench_v2", "openai")
    remedy = "pip install sglang==0.5.17, in an environment of its own if need be, and name its interpreter with --python"
    lost = ("Bad Request Error", "All retry attempts exhausted")  # it counts these requests as wrong answers

    def command(self, preset: Preset, run: Run) -> list[str]:
        sampling = preset.sampling
        return [run.python, "-P", "-m", "sglang.test.run_eval", "--eval-name", "longbench_v2"] + [
            *("--base-url", run.url, "--model", run.model, "--dataset-path", str(run.records)),
            *("--max-tokens", str(sampling.max_tokens), "--temperature", str(sampling.temperature), "--top-p", str(sampling.top_p)),
            *("--num-threads", str(run.concurrency)),
        ]

    def scores(self, preset: Preset, run: Run, log: str) -> dict[str, float]:
        if lost := sum(log.count(mark) for mark in self.lost):
            raise EvaluatorFailed(f"{lost} requests were not answered, and would count as wrong; see {run.directory / 'evaluator.log'}")
        written = re.search(r"^Writing results to (.+\.json)\s*$", log, re.MULTILINE)
        if written is None:
            raise EvaluatorFailed("sglang.test.run_eval: expected a line 'Writing results to FILE', there is none")
        return longbench_v2.scores(json.loads(Path(written[1]).read_text()), run.records)


class LmEval(Evaluator):
    """lm-evaluation-harness, by the server's OpenAI API."""

    name, modules = "lm_eval", ("lm_eval", "aiohttp", "tenacity")
    remedy = f'pip install "{LM_EVAL}" html2text beautifulsoup4, in an environment of its own if need be, and name it with --python'

    def common(self, run: Run, model: str, path: str, **more: object) -> list[str]:
        facts = {"model": run.model, "base_url": run.url + path, "num_concurrent": run.concurrency, "timeout": REQUEST_S} | more
        model_args = ",".join(f"{name}={value}" for name, value in facts.items())
        options = ["--model", model, "--model_args", model_args, "--apply_chat_template", "--output_path", str(run.directory)]
        return [run.python, "-P", "-m", "lm_eval", *options]

    def results(self, run: Run) -> dict:
        written = sorted(run.directory.rglob("results_*.json"))
        if not written:
            raise EvaluatorFailed(f"lm_eval: expected a results_*.json under {run.directory}, there is none")
        return json.loads(written[-1].read_text())["results"]


class Ruler(LmEval):
    """Its own RULER, one length at a time: --limit would take the shortest alone."""

    modules = (*LmEval.modules, "nltk", "wonderwords", "html2text", "bs4")

    def command(self, preset: Preset, run: Run) -> list[str]:
        tokens = {"tokenizer_backend": "huggingface", "tokenized_requests": True, "max_length": run.length + TEMPLATE_TOKENS}
        tasks = ["--tasks", "ruler", "--metadata", json.dumps({"max_seq_lengths": [run.length]})]
        limit = ["--limit", str(run.limit)] if run.limit else []
        return [*self.common(run, "local-completions", "/v1/completions", **tokens), *tasks, *limit]

    def scores(self, preset: Preset, run: Run, log: str) -> dict[str, float]:
        key = f"{run.length},none"
        tasks = {name: 100 * result[key] for name, result in self.results(run).items() if name != "ruler" and key in result}
        if not tasks:
            raise EvaluatorFailed(f"lm_eval: expected scores of length {run.length}, there are none")
        return {"mean": sum(tasks.values()) / len(tasks)} | tasks


class Boxed(LmEval):
    """Mathematics and GPQA with several samples of each question; the harness's own tasks are described in README.md."""

    def command(self, preset: Preset, run: Run) -> list[str]:
        sampling = preset.sampling
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_gen_toks": sampling.max_tokens}
        return self.common(run, "local-chat-completions", "/v1/chat/completions") + [
            *("--tasks", "boxed_answer", "--include_path", str(HERE / "tasks")),
            *("--gen_kwargs", ",".join(f"{name}={value}" for name, value in drawn.items())),
            *("--metadata", json.dumps({"records": str(run.records)}), "--log_samples"),
        ]

    def scores(self, preset: Preset, run: Run, log: str) -> dict[str, float]:
        result, samples = self.results(run)["boxed_answer"], preset.sampling.samples
        named = {f"pass@{samples}": "pass", f"avg@{samples}": "avg", "boxed": "boxed"}
        return {name: 100 * result[f"{metric},samples"] for name, metric in named.items()}


class Own(Evaluator):
    """A program beside this file, which writes result.json."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, preset: Preset, run: Run) -> list[str]:
        options = {"--url": run.url, "--model": run.model, "--data": run.records, "--concurrency": run.concurrency} | run.judge
        if preset.sampling:
            sampling = preset.sampling
            options |= {"--max-tokens": sampling.max_tokens, "--temperature": sampling.temperature, "--top-p": sampling.top_p}
        if run.limit:
            options |= {"--limit": run.limit}
        words = [str(word) for pair in options.items() for word in pair]
        return [sys.executable, "-m", f"benchmarks.accuracy.published.{self.name}", *words, "--out", str(run.directory)]

    def scores(self, preset: Preset, run: Run, log: str) -> dict[str, float]:
        result = run.directory / "result.json"
        if not result.exists():
            raise EvaluatorFailed(f"{self.name}: expected {result}, there is none")
        return json.loads(result.read_text())


EVALUATORS = {
    "sglang_longbench_v2": LongBenchV2(),
    "lm_eval_ruler": Ruler(),
    "lm_eval_boxed": Boxed(),
    "longgenbench": Own("longgenbench"),
    "ruler_files": Own("ruler_files"),
}
