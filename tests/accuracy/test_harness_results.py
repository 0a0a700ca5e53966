"""The harness around the engine: what is asked, what is computed again, how sure a result is, and what is written."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.accuracy import fitting, grid, over_step, page, plots, run, summarise
from benchmarks.accuracy.intervals import bootstrap
from benchmarks.accuracy.method import Budget
from benchmarks.accuracy.methods.full import Full
from benchmarks.accuracy.methods.razor import RazorAttention
from benchmarks.accuracy.methods.streaming_llm import StreamingLLM
from benchmarks.accuracy.model import OfflineModel
from benchmarks.accuracy.real_tables import COMPARED, compared
from benchmarks.accuracy.rows import Row, Rows
from benchmarks.accuracy.systems import IN_8_BITS, OWN, TWELVE, System
from benchmarks.needle import weights
from benchmarks.report import ROOT

PROMPTS = 40


@dataclass(frozen=True)
class Broken:
    prompt_queries = None

    def begin(self, prompt, budget):
        raise RuntimeError("does not work")


def row(method="full", scores=(1.0,), budget=None, task="code-word", trace=None, **others) -> Row:
    scores = tuple(float(score) for score in np.resize(scores, PROMPTS))
    return replace(Row("offline", task, 1024, budget, method, "same", scores, (3,) * PROMPTS, trace or {}), **others)


def test_a_bootstrap_interval_is_the_binomials():
    scores = np.repeat([0.0, 1.0], 200)
    mean, low, high = bootstrap([scores])
    assert (mean, low, high) == pytest.approx((0.5, 0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.004)
    assert bootstrap([scores]) == (mean, low, high) != bootstrap([scores], seed=1)
    of_four = bootstrap([scores] * 4)  # tasks are drawn apart, so the mean of four is twice as sure
    assert (of_four.high - of_four.low) / (high - low) == pytest.approx(0.5, abs=0.03)
    assert bootstrap([[0.25] * 7, [0.75] * 3]) == (0.5, 0.5, 0.5)
    assert bootstrap([scores], level=0.99).low < low
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([[]])


def test_a_difference_is_that_of_pairs():
    half = [0.0, 1.0]
    rows = Rows([row(scores=half), row("paired", half, 256), row("apart", half[::-1], 256)])
    paired, apart = (rows.comparison(label, 1024, 256, ["code-word"]).interval() for label in ("paired", "apart"))
    assert paired == (0, 0, 0) and apart.mean == 0 and apart.high > 0.2


def test_the_gate_trips_on_what_is_too_good_only():
    dense = row(scores=[0.0, 1.0])
    fair = [row("equal", [0.0, 1.0], 256), row("worse", [0.0, 0.0], 256), row("luck", [1.0] + [0.0, 1.0] * 50, 256)]
    assert not Rows([dense, *fair]).faults
    found = Rows([dense, *fair, row("too-good", [0.7, 1.0], 512)]).faults
    assert [(each.label, each.budget) for each in found] == [("too-good", 512)]


def test_among_many_comparisons_some_are_good_by_chance_and_no_fault():
    random = np.random.default_rng(0)
    scores = np.resize([0, 1], PROMPTS)
    lucky = [row(f"method-{number}", scores ^ (random.random(PROMPTS) < 0.2), 256) for number in range(200)]
    rows = Rows([row(scores=scores), *lucky])
    assert 0 < len(rows.suspects) < 20 and not rows.faults


def test_a_method_is_too_good_over_all_tasks_that_is_so_on_none():
    names = [f"task-{number}" for number in range(8)]
    better = [1.0] * 3 + [0.0] * (PROMPTS - 3)
    rows = Rows([row(scores=[0.0], task=task) for task in names] + [row("subtle", better, 256, task) for task in names])
    assert [each.task for each in rows.faults] == ["all tasks"]


def test_other_prompts_are_not_compared():
    rows = Rows([row(scores=[0.0]), row("other", [1.0], 256, digest="other")])
    assert not rows.comparisons
    assert "- other, code-word, 1024 tokens, budget 256" in summarise.markdown(rows, [], [], [])


def test_prompts_are_the_same_whatever_else_is_asked_for():
    cell = grid.Cell.ask("code-word", 320, prompts=4, seed=0)
    assert cell.prompts[:2] == grid.Cell.ask("code-word", 320, prompts=2, seed=0).prompts
    assert cell.digest == grid.Cell.ask("code-word", 320, prompts=4, seed=0).digest != grid.Cell.ask("code-word", 320, 4, seed=1).digest
    assert len({prompt.token_ids for prompt in cell.prompts}) == 4
    assert cell.batches(3) == [[0, 1, 2], [3]]
    longer = replace(cell.prompts[1], token_ids=(*cell.prompts[1].token_ids, 5))
    assert replace(cell, prompts=(cell.prompts[0], longer, *cell.prompts[2:])).batches(2) == [[0, 2], [3], [1]]


@pytest.mark.parametrize("total, sink, window", [(512, 128, 128), (200, 32, 64), (1000, 224, 224)])
def test_a_quarter_of_the_budget_is_sink_and_one_is_window(total, sink, window):
    assert grid.budget_of(total, page=32) == Budget(total, sink, window, 32)


@pytest.fixture(scope="module")
def needle() -> OfflineModel:
    return OfflineModel(weights.MODEL)


def test_razor_has_its_papers_share_of_retrieval_heads(needle):
    fitter = fitting.Fitting(needle, dense_layers=1, period=40)
    retrieval = fitter.fit(RazorAttention).retrieval
    kv_heads = needle.config.num_key_value_heads
    assert len(retrieval) == needle.layers and retrieval[0] == (True,) * kv_heads
    heads = (needle.layers - 1) * kv_heads
    assert sum(map(sum, retrieval[1:])) == round(0.14 * heads) + round(0.01 * heads) == 2
    assert fitter.fit(Full()) == fitter.fit(Full) == Full()


def test_as_many_queries_are_kept_as_the_methods_read():
    few, more, all_of_them = (SimpleNamespace(prompt_queries=count) for count in (1, 64, None))
    assert run.queries_read([few, more]) == 64 and run.queries_read([few, all_of_them]) is None


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """``harness(*options, methods=...)``: exit status, results, and how often something was decoded."""
    decoded = []
    decode = OfflineModel.decode
    monkeypatch.setattr(OfflineModel, "decode", lambda self, *a, **k: decoded.append(a) or decode(self, *a, **k))
    methods = {"full": Full, "streaming": StreamingLLM()}
    always = ["--tasks", "magic-number", "--lengths", "360", "--budgets", "160", "--prompts", "3", "--batch", "2", "--out", str(tmp_path)]

    def start(*options, **more):
        decoded.clear()
        monkeypatch.setattr(sys, "argv", ["run.py", *always, *options])
        status = run.main(methods | more)
        return status, json.loads((tmp_path / "accuracy-offline.json").read_text()), len(decoded)

    return start


def test_what_is_there_is_not_computed_again(harness, tmp_path, capsys):
    status, written, decoded = harness(broken=Broken())
    keys = ["magic-number/360/160/streaming", "magic-number/360/all/full"]
    assert (status, sorted(written["results"]), decoded) == (1, keys, 2 * 2 + 1)  # two batches; what failed in one is left out of the next
    assert "does not work" in written["runs"][0]["failures"]["magic-number/360/160/broken"]
    assert "magic-number/360/160/broken" in (tmp_path / "accuracy.md").read_text()
    full, sparse = (written["results"][key] for key in reversed(keys))
    assert len(full["scores"]) == len(full["generated"]) == 3 and full["digest"] == sparse["digest"]
    assert full["trace"]["query_similarity"]["by_step"][0] and sparse["trace"]["mean"]["attended"] == 160

    assert harness()[0::2] == (0, 0)
    assert harness("--only", "*/streaming", "--force")[2] == 2
    assert harness(streaming=StreamingLLM(reindexed=False))[2] == 2
    assert harness("--seed", "1", "--methods", "full")[2] == 2
    status, written, decoded = harness("--budgets", "192")
    assert decoded == 4 and "magic-number/360/192/streaming" in written["results"]  # and full, again of seed 0


def test_results_of_two_models_do_not_share_a_file(harness, monkeypatch):
    harness("--methods", "full")
    monkeypatch.setattr(grid, "model_digest", lambda model: "another")
    with pytest.raises(ValueError, match="another --name"):
        harness("--methods", "full")


def small_results(half="offline") -> list[dict]:
    """As they are on disk: two tasks, three methods, two budgets."""
    random, results = np.random.default_rng(0), []
    for task in ("code-word", "long-copy"):
        for method, budgets in (("full", [None]), ("freekv", [256, 512]), ("freekv-tau-0.80", [256, 512])):
            for budget in budgets:
                means = {"attended": 200.0, "fetched": 10.0, "corrected": 0.25, "similarity": 0.9}
                trace = {"mean": means, "by_layer": {"corrected": [None, 0.2, 0.3]}} if budget else {}
                if method == "full":
                    trace["query_similarity"] = {"by_step": [[0.9, 0.8, None]] * 3, "by_head": [[0.9, 0.7]] * 3}
                scores = [1.0] * 10 if method == "full" else random.integers(2, size=10).tolist()
                shape = budget and {"total": budget, "sink": budget // 4, "window": budget // 4, "page": 32}
                asked = {"half": half, "task": task, "length": 1024, "budget": shape, "method": method, "digest": "d", "model": "m"}
                results.append(asked | {"scores": scores, "generated": [4] * 10, "trace": trace, "run": 0})
    return results


def write_results(directory: Path, results: list[dict]) -> None:
    keyed = {f"{number}/{result['method']}": result for number, result in enumerate(results)}
    half = results[0]["half"]
    (directory / f"accuracy-{half}.json").write_text(json.dumps({"runs": [{"device": "cpu"}], "results": keyed}))


def summarised(directory: Path, monkeypatch) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["summarise.py", "--out", str(directory)])
    return summarise.main(), (directory / "accuracy.md").read_text()


def test_tables_and_pictures_come_of_the_json_alone(tmp_path, monkeypatch):
    results = small_results()
    write_results(tmp_path, results)
    write_results(tmp_path, small_results("server"))
    status, text = summarised(tmp_path, monkeypatch)
    assert status == 0
    lines = text.splitlines()
    freekv = [result["scores"] for result in results if result["method"] == "freekv" and result["budget"]["total"] == 256]
    for cell in (f"{np.mean(freekv):.2f}", f"{np.mean(freekv) - 1:+.2f}"):
        assert any(line.startswith(f"| freekv | {cell} [") for line in lines)
    assert "| freekv (server) | 200 | 10 | 0.25 | 0.9 | 4.0 |" in lines
    assert "| full | code-word | 1024 | - | 1.00 | 1.00 | +0.00 [+0.00, +0.00] |" in lines
    drawn = {path.stem.removeprefix("accuracy-"): ElementTree.parse(path).getroot() for path in tmp_path.glob("*.svg")}
    assert set(drawn) == {"corrected", "budget-1024", "tau-1024", "similarity-1024"}
    assert all(f"](accuracy-{name}.svg)" in text for name in drawn)
    words = {name: [each.text for each in root.findall(".//{*}text")] for name, root in drawn.items()}
    systems = {f"{method}{half}" for method in ("full", "freekv", "freekv-tau-0.80") for half in ("", " (server)")}
    assert systems | {"budget 256", "budget 512"} <= set(words["budget-1024"])
    assert {f"budget {budget}{half}" for budget in (256, 512) for half in ("", " (server)")} <= set(words["tau-1024"])
    assert words["corrected"].count("0.20") == words["corrected"].count("0.30") == 4
    assert {"code-word", "long-copy", "layer", "kv head", "decode steps"} <= set(words["similarity-1024"])
    first, second = plots.similarities(Rows.read(tmp_path / "accuracy-offline.json"), 1024)
    assert (first.name, second.name) == ("code-word", "long-copy") and first.by_head.tolist() == [[0.9, 0.7]] * 3
    np.testing.assert_array_equal(first.by_step, [[0.9, 0.8, np.nan]] * 3)
    again = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    summarised(tmp_path, monkeypatch)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")} == again


def test_a_method_that_is_too_good_fails_the_summary(tmp_path, monkeypatch, capsys):
    results = small_results()
    for result in results:
        result["scores"] = [float(result["method"] == "freekv" and result["budget"]["total"] == 512)] * 10
    write_results(tmp_path, results)
    status, text = summarised(tmp_path, monkeypatch)
    assert status == 1 and "- freekv, all tasks, 1024 tokens, budget 512: +1.000 [+1.000, +1.000]" in text
    assert "| freekv | +0.00 [+0.00, +0.00] | +1.00 [+1.00, +1.00] |" in text
    assert "FAULT" in capsys.readouterr().out


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.stem)
def test_a_page_has_the_tables_of_the_results(path):
    text = path.read_text()
    assert page.filled(text, page.PAGES[path]) == text, "run python -m benchmarks.accuracy.page and commit docs"


def test_tuning_tells_what_8_bits_cost():
    told, found = (ROOT / "docs" / "tuning.md").read_text(), page.real(page.INT8_FILE)
    [line] = [line for line in told.splitlines() if line.startswith("- What it costs in accuracy: ")]
    kl = [float(np.mean(found[f"{length}/512/{method}"]["kl"])) for length in (2048, 4096) for method in (f"{IN_8_BITS}-int8", IN_8_BITS)]
    assert re.findall(r"[ (](\.\d{4})\b", line) == [f"{each:.4f}"[1:] for each in kl]


def test_tuning_tells_what_int8_costs_over_tasks():
    told, means = (ROOT / "docs" / "tuning.md").read_text(), []
    [line] = [line for line in told.splitlines() if line.startswith("- Over twelve tasks ")]
    for name in re.findall(r"results/(kv-dtype-[\w-]+).json", line):
        found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]
        for method in (f"{IN_8_BITS}-int8", IN_8_BITS):
            scores = [result["scores"] for key, result in found.items() if key.endswith(f"/16384/2048/{method}")]
            assert len(scores) == 12
            means.append(np.mean([np.mean(each) for each in scores]))
    assert len(means) == 4 and re.findall(r" (\.\d{4})\b", line) == [f"{each:.4f}"[1:] for each in means]


def test_a_page_without_one_of_its_tables_is_refused():
    text = page.PAGE.read_text()
    with pytest.raises(ValueError, match="tables tau: expected each of TABLES once"):
        page.filled(text.replace("<!-- table: tau -->", ""))


def test_the_picture_over_step_time_is_that_of_the_results(tmp_path):
    over_step.draw(tmp_path / "made.svg")
    assert (tmp_path / "made.svg").read_text() == over_step.PATH.read_text(), (
        "run python -m benchmarks.accuracy.page and commit the picture"
    )
    assert f"](../benchmarks/results/{over_step.PATH.name})" in page.PAGE.read_text()


def test_a_step_is_told_over_that_of_preset_fast_on_its_own_card(tmp_path, monkeypatch):
    """The engine's times are ten times those of the presets' file, and no point mixes them."""

    def write(name: str, medians: dict[str, float]) -> None:
        results = {key: {"seconds": {"median": median}} for key, median in medians.items()}
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": results}))

    steps = {f"long-both/b8/{method}/32768": 20.0 for _, method in over_step.TIMED.values()}
    write(over_step.ENGINE, steps | {"long-both/b8/freekv/32768": 10.0})
    write(over_step.PRESETS, {over_step.FAST: 1.0, over_step.ACCURATE: 1.5})
    rows = Rows([row(scores=[0.0, 1.0], task=task, length=over_step.LENGTH, half="server") for task in TWELVE])
    monkeypatch.setattr(Rows, "read", classmethod(lambda cls, *paths: rows))
    monkeypatch.setattr(over_step, "TIMED", {"full attention": ("full (server)", "full"), "FreeKV": ("full (server)", "freekv")})
    monkeypatch.setattr(over_step, "ACCURATE_ROW", "full (server)")
    found = over_step.points(tmp_path)
    assert {label: point.step for label, point in found.items()} == {"full attention": 2.0, "FreeKV": 1.0, over_step.OURS_ACCURATE: 1.5}
    assert all(point.accuracy.mean == 0.5 for point in found.values())
    monkeypatch.setattr(over_step, "ACCURATE_ROW", "freekv-accurate (server)")
    with pytest.raises(ValueError, match=r"freekv-accurate \(server\): expected results of 12 tasks"):
        over_step.points(tmp_path)


def test_a_real_result_stands_beside_its_reference_text_by_text():
    def result(kl: list[float], method: str, **trace: float) -> dict:
        return {"length": 1, "method": method, "kl": kl, "nll": kl, "trace": {"mean": trace}}

    dense = result([0.0, 0.0], "full", mass=1.0)
    results = {"1/all/full": dense, "1/2/a": result([0.25, 0.75], "a", mass=0.5, fetched=3.6), "1/2/b": result([0.0, 0.5], "b")}
    kl, beside, ratio, *shares = compared(results, "1/2/a", "1/2/b")
    assert kl == "0.5000 [0.2500, 0.7500]" and beside == "0.2500 [0.2500, 0.2500]" and ratio.startswith("1.6487 [")
    assert shares == ["0.500", "-", "4", "-"] and len(compared(results, "1/2/a")) == len(COMPARED) == 6


def test_results_of_other_prompts_do_not_share_a_table(tmp_path, monkeypatch):
    def write(name: str, **cells: dict) -> None:
        made = {"model": "m", "length": 1, "budget": None, "task": "t", "digest": "d", "scores": [0.5, 1.0]}
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": {key: made | {"method": key} | cell for key, cell in cells.items()}}))

    write("one", full={}), write("two", full={"scores": [0.0]}, freekv={}), write("other", freekv={"digest": "e"})
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert page.results("one+two") == {("full", 1, None, "t"): 0.75, ("freekv", 1, None, "t"): 0.75}
    with pytest.raises(ValueError, match="other: model and prompts"):
        page.results("one+other")


def test_a_cell_of_the_page_is_a_mean_of_all_its_tasks_or_none(monkeypatch):
    scores = {("freekv", length, 512, task): score for length, task, score in [(1, "a", 0.5), (1, "b", 1.0), (2, "a", 0.25)]}
    monkeypatch.setattr(page, "results", lambda name: scores)
    system = System("FreeKV", OWN, "freekv", 512)
    *_, row = page.systems("file", [system], [1, 2], {"both": ("a", "b"), "first": ("a",), "none": ("c",)}).splitlines()
    assert row == "| FreeKV | 512 | 128, 128 | 32 | 0.750 / - | 0.500 / 0.250 | - |"
