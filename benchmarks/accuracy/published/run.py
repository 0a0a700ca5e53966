"""Published benchmarks against a running server, stock SGLang or with KV retrieval, through standard evaluators where they exist.

    python -m benchmarks.accuracy.published.run --list
    python -m benchmarks.accuracy.published.run --benchmark aime24 --dry-run      # the commands: of the server, and of the evaluator
    python -m benchmarks.accuracy.published.run --benchmark aime24 --url http://127.0.0.1:30000

Scores and what retrieval did go to published-BENCHMARK.json, one entry for each model, system and context length; what an evaluator
writes besides, texts among it, goes below --work. README.md tells what each measures. Exit status: 0; 2, nothing was run, for a reason in
one line; else the evaluator's.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.accuracy.published import longbench_v2, records, ruler_files, system
from benchmarks.accuracy.published.endpoint import Endpoint, EndpointFailed
from benchmarks.accuracy.published.evaluators import EVALUATORS, Evaluator, EvaluatorFailed, Own, Run, call
from benchmarks.accuracy.published.presets import PRESETS, Preset
from benchmarks.report import ROOT, Report, arguments, say, table
from sglang_freekv.launch.server import ended_by_sigterm

NOTHING_RUN = 2
JUDGE = ("judge_url", "judge_model", "judge_examples", "texts")


def listing() -> str:
    """All presets."""
    header = ("benchmark", "evaluator", "budget", "sink", "window", "tau", "max tokens", "T", "samples", "limit", "in the FreeKV paper")
    rows = []
    for each in PRESETS.values():
        drawn = each.sampling
        sampling = (drawn.max_tokens, drawn.temperature, drawn.samples) if drawn else (None, 0.0, 1)
        settings = (each.evaluator, each.budget, each.sink, each.window, each.tau, *sampling, each.limit or "all")
        rows.append((each.name, *settings, each.about))
    return table(header, rows)


def preset_of(options: argparse.Namespace) -> tuple[Preset, bool]:
    """The preset with what was asked for instead, and whether that is another number of questions.

    Raises:
        records.RecordError: an option that this benchmark has no use for.
    """
    preset = PRESETS[options.benchmark]
    if options.data and preset.offline:
        preset = replace(preset, evaluator=preset.offline, lengths=())
    if options.lengths and not preset.lengths:
        raise records.RecordError(f"--lengths: expected none for {preset.name}{' with --data' * bool(options.data)}; leave it out")
    for name in JUDGE:
        if getattr(options, name) is not None and preset.name != "longgenbench":
            raise records.RecordError(f"--{name.replace('_', '-')}: it has no effect on {preset.name}; leave it out")
    if options.limit is not None and options.limit < 1:
        raise records.RecordError(f"--limit {options.limit}: expected 1 or more; leave it out for all questions")
    if options.lengths:
        preset = replace(preset, lengths=tuple(options.lengths))
    return replace(preset, limit=options.limit or preset.limit), options.limit not in (None, preset.limit)


def prepare(preset: Preset, options: argparse.Namespace, directory: Path, model: str) -> Path | None:
    """The questions where the evaluator reads a file.

    Raises:
        records.RecordError: they are not what the benchmark's format says, or are not to be had.
    """
    if preset.evaluator == "lm_eval_ruler":
        return None
    if preset.evaluator == "ruler_files":
        ruler_files.read_all(options.data, preset.limit)
        return options.data
    rows = records.read(preset.name, options.data, preset.dataset, preset.limit)
    if preset.evaluator == "longgenbench":
        return options.data
    path = directory / "records.jsonl"
    if preset.evaluator == "sglang_longbench_v2":
        longbench_v2.write(rows, path, tokenizer_of(model), preset.max_input)
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def tokenizer_of(model: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise records.RecordError(f"--model {model}: expected a tokenizer, got {str(error).strip().splitlines()[0]}") from None


def measure(preset: Preset, evaluator: Evaluator, run: Run, endpoint: Endpoint) -> dict:
    """One run of the evaluator: scores, and what retrieval did for them.

    Raises:
        EvaluatorFailed
    """
    command, started, before = evaluator.command(preset, run), time.monotonic(), system.totals_of(endpoint.info())
    say(shlex.join(command))
    status, printed = call(command, log := run.directory / "evaluator.log")
    if status:
        raise EvaluatorFailed(f"{evaluator.name} ended with status {status}; its output is above, and in {log}", status)
    scores, typed = evaluator.scores(preset, run, printed), shlex.join(command).replace(f"{ROOT}/", "")
    did = system.done_between(before, system.totals_of(endpoint.info()))
    if did is not None and not did["selected_units"]:
        say("WARNING no page was selected: contexts fit the budget, or the requests went elsewhere; this measures dense attention")
    return {"scores": scores, "retrieval": did, "seconds": time.monotonic() - started, "command": typed}


def measure_all(preset: Preset, runs: dict[str, Run], endpoint: Endpoint, report: Report, facts: dict) -> int:
    """Every part; the status of the first evaluator that failed, or 0."""
    failed = 0
    for key, run in runs.items():
        with report.part(key):
            run.directory.mkdir(parents=True, exist_ok=True)
            try:
                report.add(key, measure(preset, EVALUATORS[preset.evaluator], run, endpoint) | facts)
            except EvaluatorFailed as error:
                failed = failed or error.status
                raise
    return failed


def runs_of(preset: Preset, options: argparse.Namespace, model: str, label: str, other_limit: bool, directory: Path) -> dict[str, Run]:
    """A run of the evaluator for every part, by its key in the results."""
    judge = {f"--{name.replace('_', '-')}": str(getattr(options, name)) for name in JUDGE if getattr(options, name) is not None}
    runs = {}
    for length in preset.parts:
        part = "-".join([*([str(length)] if length else []), *([f"first{preset.limit}"] if other_limit else [])]) or "all"
        where = directory / str(length) if length else directory
        common = {"concurrency": options.concurrency, "length": length, "limit": preset.limit, "python": options.python, "judge": judge}
        runs[f"{Path(model).name}/{label}/{part}"] = Run(options.url.rstrip("/").removesuffix("/v1"), model, where, **common)
    return runs


def make_ready(preset: Preset, options: argparse.Namespace, info: dict, other_limit: bool) -> tuple[dict[str, Run], dict]:
    """All runs, with their questions, and the facts that their results have in common.

    Raises:
        EvaluatorFailed: the evaluator is not installed.
        records.RecordError: as of :func:`prepare`.
    """
    evaluator = EVALUATORS[preset.evaluator]
    version = evaluator.version(options.python)
    model = options.model or info.get("tokenizer_path") or info["model_path"]
    options.work.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{preset.name}-{time.strftime('%Y%m%d-%H%M%S')}-", dir=options.work))
    path = prepare(preset, options, directory, model)
    runs = runs_of(preset, options, model, system.name_of(info), other_limit, directory)
    facts = {"evaluator": f"{evaluator.name} {version}", "server": system.facts_of(info), "preset": asdict(preset)}
    return {key: replace(run, records=path) for key, run in runs.items()}, facts | {"warnings": system.warnings_of(preset, info)}


def summary(preset: Preset, results: dict) -> str:
    """All entries of the results, in percent."""
    header = ("model/system/part", *preset.columns, "recalled / selected", "decode steps")
    rows = []
    for key, result in results.items():
        did = result["retrieval"]
        shares = (None, None)
        if did is not None:
            shares = (did["recalled_units"] / max(1, did["selected_units"]), did["decode_steps"])
        rows.append((key, *(result["scores"].get(name) for name in preset.columns), *shares))
    return table(header, rows)


def parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "published-BENCHMARK")
    parser.add_argument("--list", action="store_true", help="show all presets, and nothing else")
    parser.add_argument("--benchmark", choices=PRESETS)
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and ask no server")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--model", help="name or directory of the served model, for its tokenizer (default: what the server has)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="the questions as published, instead of the hub's")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N questions only; of each task and length of RULER")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help="context lengths of RULER")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the evaluator")
    parser.add_argument("--work", type=Path, default=ROOT / ".out" / "published", help="directory for what evaluators write")
    parser.add_argument("--judge-url", help="LongGenBench: of the judge, an OpenAI API; without one only completion is scored")
    parser.add_argument("--judge-model", help="LongGenBench: its name there (default: Qwen/Qwen3-32B)")
    parser.add_argument("--judge-examples", type=Path, metavar="FILE", help="LongGenBench: a text to go before every question to the judge")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="LongGenBench: texts.jsonl of a run before, to go on or to be judged")
    return parser


def dry_run(preset: Preset, evaluator: Evaluator, options: argparse.Namespace, other_limit: bool) -> int:
    model = options.model or preset.models[0]
    directory = options.work / preset.name
    for run in runs_of(preset, options, model, "freekv", other_limit, directory).values():
        written = options.data or Path("DATA") if isinstance(evaluator, Own) else directory / "records.jsonl"
        print(f"evaluator: {shlex.join(evaluator.command(preset, replace(run, records=written)))}")
    return 0


@ended_by_sigterm()
def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.list:
        print(listing())
        return 0
    try:
        if options.benchmark is None:
            raise records.RecordError(f"--benchmark: expected one of {', '.join(PRESETS)}, got none; see --list")
        preset, other_limit = preset_of(options)
        for title, dense in (("server", False), ("server to compare with", True)):
            print(f"{title}: {preset.server_command(options.model or preset.models[0], dense)}", flush=True)
        if options.dry_run:
            return dry_run(preset, EVALUATORS[preset.evaluator], options, other_limit)
        endpoint = Endpoint(options.url)
        info = endpoint.info()
        runs, facts = make_ready(preset, options, info, other_limit)
    except (records.RecordError, EndpointFailed, EvaluatorFailed) as error:
        remedy = "; start the server above, or name another with --url" if isinstance(error, EndpointFailed) else ""
        print(f"error: {error}{remedy}", file=sys.stderr, flush=True)
        return NOTHING_RUN
    for warning in facts["warnings"]:
        say(f"WARNING {warning}")
    report = Report(f"published-{preset.name}", options.out)
    words = sys.argv[1:] if argv is None else argv
    report.note(command=shlex.join(["python3", "-m", "benchmarks.accuracy.published.run", *words]))
    failed = measure_all(preset, runs, endpoint, report, facts)
    return report.finish(summary(preset, report.results)) and (failed or 1)


if __name__ == "__main__":
    sys.exit(main())
