"""The commands of published benchmarks: taken by the evaluators' own parsers, their servers' flags too; and how results are read."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import shlex
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.accuracy.published import evaluators
from benchmarks.accuracy.published.evaluators import EVALUATORS, EvaluatorFailed, Run
from benchmarks.accuracy.published.presets import PRESETS
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.options import FLAGS, Options, config_from

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "benchmarks" / "accuracy" / "published"

GOLDEN = {
    "ruler": "-P -m lm_eval --model local-completions --model_args model=M,base_url=U/v1/completions,num_concurrent=16,timeout=7200,"
    "tokenizer_backend=huggingface,tokenized_requests=True,max_length=4352 --apply_chat_template --output_path D --tasks ruler "
    "--metadata '{\"max_seq_lengths\": [4096]}'",
    "longbench_v2": "-P -m sglang.test.run_eval --eval-name longbench_v2 --base-url U --model M --dataset-path R --max-tokens 128 "
    "--temperature 0.0 --top-p 1.0 --num-threads 16",
    "longgenbench": "-m benchmarks.accuracy.published.longgenbench --url U --model M --data R --concurrency 16 --max-tokens 16000 --temperature 0.95 "
    "--top-p 0.95 --out D",
} | dict.fromkeys(
    ("math500", "aime24", "gpqa_diamond"),
    "-P -m lm_eval --model local-chat-completions --model_args model=M,base_url=U/v1/chat/completions,num_concurrent=16,timeout=7200 "
    "--apply_chat_template --output_path D --tasks boxed_answer --include_path published/tasks --gen_kwargs "
    'temperature=0.6,top_p=0.95,max_gen_toks=16384 --metadata \'{"records": "R"}\' --log_samples',
)


def command_of(name: str) -> list[str]:
    preset = PRESETS[name]
    run = Run("U", "M", Path("D"), records=Path("R"), length=preset.parts[0], limit=None)
    return EVALUATORS[preset.evaluator].command(preset, run)


@pytest.mark.parametrize("name", PRESETS)
def test_commands(name):
    python, *words = command_of(name)
    assert python == sys.executable
    assert shlex.join(words).replace(f"{PUBLISHED.parent}/", "") == GOLDEN[name]


def run_eval_parser() -> argparse.ArgumentParser:
    """The parser of sglang.test.run_eval, without what the module imports, which takes half a minute."""
    spec = importlib.util.find_spec("sglang")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "test" / "run_eval.py").read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.Assign)]
    made = next(number for number, node in enumerate(guard.body) if "parse_args" in ast.unparse(node))
    names = {"argparse": argparse, "json": json, "Eval": object}
    exec(compile(ast.Module([*wanted, *guard.body[:made]], []), "run_eval", "exec"), names)
    return names["parser"]


def test_sglang_takes_the_command():
    if importlib.util.find_spec("sglang.test.simple_eval_longbench_v2") is None:
        with pytest.raises(EvaluatorFailed, match="missing sglang.test.simple_eval_longbench_v2; pip install sglang==0.5.17"):
            EVALUATORS["sglang_longbench_v2"].version(sys.executable)
        return
    options = run_eval_parser().parse_args(command_of("longbench_v2")[4:])
    assert (options.eval_name, options.base_url, options.model, options.dataset_path) == ("longbench_v2", "U", "M", "R")
    assert (options.max_tokens, options.temperature, options.top_p, options.num_threads, options.api) == (128, 0, 1, 16, "chat")


@pytest.mark.parametrize("name", ["ruler", "aime24"])
def test_lm_eval_takes_the_command(name, monkeypatch):
    harness = pytest.importorskip("lm_eval._cli.harness", reason="lm-eval is not among the tests' requirements")
    monkeypatch.setattr(sys, "argv", ["lm_eval", *command_of(name)[4:]])
    options = harness.HarnessCLI().parse_args()
    assert options.model_args["base_url"].startswith("U/v1/") and options.model_args["num_concurrent"] == 16
    assert options.metadata == ({"max_seq_lengths": [4096]} if name == "ruler" else {"records": "R"})
    assert options.tasks == (["ruler"] if name == "ruler" else ["boxed_answer"])


@pytest.mark.parametrize("name", PRESETS)
def test_servers_take_the_flags(name):
    preset, flags = PRESETS[name], PRESETS[name].server_flags()
    assert {flag[2:].replace("-", "_") for flag in flags} <= {*FLAGS}
    edges = {"sink_tokens": preset.sink, "window_tokens": preset.window}
    config = FreeKVConfig(budget_tokens=preset.budget, **edges, tau=preset.tau, digest="min-max")
    assert config == config_from(Options(**{flag[2:].replace("-", "_"): value for flag, value in flags.items()}), None)
    built = vars(config) | {"dense_layers": list(config.dense_layers)}
    assert preset.differences(built) == [] and len(preset.differences(built | {"page_size": 16, "tau": 0})) == 2
    assert "--kv-retrieval" not in preset.server_command("M", dense=True)


def test_settings_of_the_paper():
    edges = {name: (preset.budget, preset.sink, preset.window, preset.tau) for name, preset in PRESETS.items()}
    assert {edges.pop("longbench_v2"), edges.pop("ruler")} == {(2048, 128, 128, 0.8)}
    assert set(edges.values()) == {(2048, 512, 512, 0.9)}
    for name in ("math500", "aime24", "gpqa_diamond"):
        sampling = PRESETS[name].sampling
        assert (sampling.temperature, sampling.top_p, sampling.samples, sampling.max_tokens) == (0.6, 0.95, 8, 16384)
    task = (PUBLISHED / "tasks" / "boxed_answer.yaml").read_text()
    assert f"repeats: {sampling.samples}\n" in task and "  until: []\n" in task


@pytest.mark.parametrize(
    "modules, missing", [(("json.decoder", "xml.dom.minidom"), ""), (("json.no", "xml.no.minidom", "no.such"), "json.no xml.no")]
)
def test_modules_are_found_without_an_import(monkeypatch, modules, missing):
    evaluator = EVALUATORS["sglang_longbench_v2"]
    monkeypatch.setattr(type(evaluator), "modules", modules)
    if not missing:
        assert evaluator.version(sys.executable) == metadata.version("sglang")
        return
    with pytest.raises(EvaluatorFailed, match=f"missing {missing}.minidom no.such; pip install"):
        evaluator.version(sys.executable)


def test_an_interpreter_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(evaluators, "ANSWER_S", 0.001)
    with pytest.raises(EvaluatorFailed, match="--python .*: expected an answer within 0.001 s, got none; try it by hand"):
        EVALUATORS["sglang_longbench_v2"].version(sys.executable)


def test_requests_that_sglang_counts_as_wrong_are_no_result(tmp_path):
    preset, evaluator = PRESETS["longbench_v2"], EVALUATORS["sglang_longbench_v2"]
    run = Run("U", "M", tmp_path, records=tmp_path / "records.jsonl")
    run.records.write_text('{"difficulty": "easy-long"}\n{"difficulty": "hard-short"}\n')
    written = tmp_path / "longbench_v2_M.json"
    written.write_text('{"difficulty_easy-long": 1.0, "difficulty_hard-short": 0.0, "score": 0.5}')
    log = f"  0%|   | 0/2\nTotal latency: 3.0 s\nWriting results to {written}\n"
    assert evaluator.scores(preset, run, log) == {"overall": 50, "easy": 100, "long": 100, "hard": 0, "short": 0}
    with pytest.raises(EvaluatorFailed, match="1 requests were not answered, and would count as wrong"):
        evaluator.scores(preset, run, "Bad Request Error Error code: 400\n" + log)
    with pytest.raises(EvaluatorFailed, match="expected a line 'Writing results to FILE'"):
        evaluator.scores(preset, run, "")


def test_rulers_scores_are_of_the_length_that_was_asked_for(tmp_path):
    run = replace(Run("U", "M", tmp_path), length=8192)
    results = {"ruler": {"4096,none": -1}, "niah_single_1": {"4096,none": -1, "8192,none": 0.5}}
    results["ruler_vt"] = {"8192,none": 1.0, "8192_stderr,none": 0}
    (tmp_path / "M").mkdir()
    (tmp_path / "M" / "results_1.json").write_text(json.dumps({"results": results}))
    evaluator = EVALUATORS["lm_eval_ruler"]
    assert evaluator.scores(PRESETS["ruler"], run, "") == {"mean": 75, "niah_single_1": 50, "ruler_vt": 100}
    with pytest.raises(EvaluatorFailed, match="expected scores of length 4096"):
        (tmp_path / "M" / "results_2.json").write_text('{"results": {"ruler": {"4096,none": 0.1}}}')
        evaluator.scores(PRESETS["ruler"], replace(run, length=4096), "")
