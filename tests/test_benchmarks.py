"""The benchmarks on a CPU: the replay hits the load it is asked for, its kernels are their twins, and every script runs."""

from __future__ import annotations

import fnmatch
import importlib
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import bench_kernels, frame_trials, replay, replay_kernels, replay_load, report, start
from benchmarks.paper.methods.engine import Asking
from benchmarks.replay import Controls, Replay, replayed
from benchmarks.replay_load import Load
from benchmarks.report import Report
from benchmarks.setups import Setup
from benchmarks.stamp import code_of
from benchmarks.timing import Ceilings
from benchmarks.trial import Trial
from engine import Engine
from sglang_freekv import policy, retrieval
from sglang_freekv.config import FreeKVConfig, PageBudget
from sglang_freekv.digests import Boxes
from sglang_freekv.kernels import CORRECTED, HITS, RECALLED, FrameTables, Misses, on_gpu, reference
from sglang_freekv.kernels.candidates import Tables, Turn
from sglang_freekv.memory_pool.transfer import InlineStream
from sglang_freekv.methods import METHODS

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TIGHT = FreeKVConfig(budget_tokens=40, sink_tokens=4, window_tokens=4, page_size=1, tau=0.6, dense_layers=())


@pytest.fixture
def controls(monkeypatch):
    """What the replay, which ``freekv`` now is, follows."""
    controls = Controls("cpu")
    monkeypatch.setitem(policy.POLICIES, "freekv", lambda config: replayed(config, controls))
    return controls


@pytest.mark.parametrize("corrected, any_of_eight", [(0.13, 0.372), (0.59, 0.885)])
def test_heads_turn_as_often_and_as_jointly_as_measured(corrected, any_of_eight):
    rows, steps, thetas = torch.arange(1, 65), torch.zeros(65, 8, dtype=torch.int32), replay_load.thetas_of(corrected)
    flags = torch.stack([replay_load.drawn_flags(rows, steps, thetas, layer=7) for _ in range(300)]).float()
    assert abs(flags.mean() - corrected) < 0.01
    assert abs(flags.amax(-1).mean() - any_of_eight) < 0.01
    assert (flags.mean((0, 1)) - corrected).abs().max() < 0.015, "some heads turn more often than others"
    assert torch.equal(steps[1:], torch.full((64, 8), 300, dtype=torch.int32))


@pytest.mark.parametrize("missed", [0.1, 0.21])
def test_as_many_selected_pages_are_new_as_was_asked_for(missed):
    speed = replay_load.speed_of(Load(0.13, missed, candidates=1000, selected=32))
    assert abs(1 - replay_load.share_kept(speed, 1000, 32, lag=1) - missed) < 0.015
    assert replay_load.share_kept(speed, 1000, 32, lag=16) > 0.15, "nothing comes back"


def test_the_table_is_interpolated():
    speeds = [replay_load.speed_of(Load(0, missed, 31 * 32, 32)) for missed in (0, 0.05, 0.1, 0.15, 0.21, 0.6)]
    assert speeds[0] == 0 and speeds == sorted(speeds) and (speeds[1], speeds[4]) == (replay_load.SPEEDS[31][0], replay_load.SPEEDS[31][2])
    assert replay_load.SPEEDS[62][2] < replay_load.speed_of(Load(0, 0.21, 45 * 32, 32)) < replay_load.SPEEDS[31][2]


def test_an_engine_does_what_the_load_says(controls):
    controls.set(Load(0.59, 0.21, candidates=320, selected=32))
    engine = Engine(TIGHT, prompts=[330], steps=40, stream=InlineStream)
    engine.run(steps=40)
    counts = engine.retrieval.counts.sum(0)
    assert abs(counts[RECALLED] / (counts[RECALLED] + counts[HITS]) - 0.21) < 0.03
    assert abs(counts[CORRECTED] / (40 * 3 * 2) - 0.59) < 0.12
    for layer in range(len(engine.retrieval.cache.layers)):
        engine.retrieval.cache.check_layer(layer)


def test_an_engine_whose_host_asks_follows_the_load_too(controls):
    controls.set(Load(0.59, 0.21, candidates=320, selected=32))
    engine = Engine(TIGHT, prompts=[330], steps=40, stream=InlineStream)
    engine.retrieval.policy = Asking(**vars(engine.retrieval.policy))
    engine.run(steps=40)
    assert abs(engine.retrieval.counts.sum(0)[CORRECTED] / (40 * 3 * 2) - 0.59) < 0.12


def test_layers_are_corrected_as_often_as_each_was_measured(controls):
    shares = (0.9, 0.1, 0.5)
    controls.set(Load(shares, 0.0, candidates=150, selected=32))
    engine = Engine(TIGHT, prompts=[160, 160], steps=60, stream=InlineStream)
    told, decide = [[], [], []], Replay.corrected

    def listen(policy, layer, queries, rows, previous, *others, **options):
        flags = decide(policy, layer, queries, rows, previous, *others, **options)
        assert previous is engine.retrieval.cache.layers[layer].previous_queries
        told[layer].append(flags)
        return flags

    with mock.patch.object(Replay, "corrected", listen):
        engine.run(steps=60)
    found = [torch.stack(flags).float().mean() for flags in told]
    assert all(abs(got - wanted) < 0.15 for got, wanted in zip(found, shares)), found


def test_without_a_load_it_is_freekv(controls):
    replayed = Engine(TIGHT, prompts=[100, 60], steps=12, stream=InlineStream)
    with mock.patch.dict(policy.POLICIES, freekv=policy.policy_of):
        plain = Engine(TIGHT, prompts=[100, 60], steps=12, stream=InlineStream)
    assert isinstance(replayed.retrieval.policy, Replay) and not isinstance(plain.retrieval.policy, Replay)
    assert torch.equal(replayed.run(12), plain.run(12))
    assert torch.equal(replayed.retrieval.counts, plain.retrieval.counts)


def test_copies_off_counts_and_copies_nothing(monkeypatch):
    monkeypatch.setitem(policy.POLICIES, "freekv", None)
    monkeypatch.setattr(retrieval.Retrieval, "__init__", retrieval.Retrieval.__init__)  # put back afterwards
    replay.install(None, copies=False)
    engine = Engine(TIGHT, prompts=[100], steps=12, stream=InlineStream)
    assert isinstance(engine.retrieval.policy, Replay)
    with mock.patch("sglang_freekv.kernels.recall_pages", side_effect=AssertionError("something was copied")):
        engine.run(12)
    assert engine.retrieval.counts[:, RECALLED].sum() > 0
    assert all(misses.length.tolist()[:2] == [0, 0] for misses in [engine.retrieval.misses_now, *engine.retrieval.misses_ahead])


def test_a_load_is_not_lessened_by_hysteresis(monkeypatch):
    """The share that is missed was measured with it."""
    monkeypatch.setitem(policy.POLICIES, "freekv", None)
    monkeypatch.setattr(retrieval.Retrieval, "__init__", retrieval.Retrieval.__init__)  # put back afterwards
    replay.install(None, copies=True)
    engine = Engine(replace(TIGHT, hysteresis=1.0), prompts=[330], steps=40, stream=InlineStream)
    engine.retrieval.policy.controls.set(Load(0.59, 0.21, candidates=320, selected=32))
    engine.run(steps=40)
    counts = engine.retrieval.counts.sum(0)
    assert abs(counts[RECALLED] / (counts[RECALLED] + counts[HITS]) - 0.21) < 0.03
    assert replay.without_hysteresis(TIGHT) == TIGHT and 0 < engine.retrieval.config.hysteresis < 1e-5, "the plan takes as long"


def test_a_control_file_takes_effect(tmp_path):
    path = tmp_path / "control.json"
    controls = Controls("cpu", path)
    for version, load in enumerate([Load((0.13, 0.5), 0.21, 1000, 32), None], 1):
        replay.write_whole(path, json.dumps({"version": version, "load": load}))
        deadline = time.monotonic() + 300
        while not (applied := path.with_suffix(".applied")).exists() or applied.read_text() != str(version):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert controls.knobs.tolist() == ([1, replay_load.speed_of(load)] if load else [0, 0])


def _turn(rows, seq_lens, budget: PageBudget, S: int, R: int, H: int, P: int, device: str) -> Turn:
    """One request's next token begins a page, and another's first kv head has lost a page."""
    attended = torch.full((R, H, budget.total), -1, dtype=torch.int32, device=device)
    attended[3, 0, 1], attended[5, 0] = -2 - 7, 0
    tables = Tables(torch.zeros(R, H, 9, dtype=torch.int32, device=device), attended, torch.ones(R, 9, dtype=torch.int32, device=device))
    lens = seq_lens.to(device) + torch.tensor([0, 0, 3, 0], device=device)  # 160 is a multiple of 4
    frames = torch.full((len(rows), P), -1, dtype=torch.int32, device=device)
    return Turn(lens, frames, budget, S, tables, torch.empty(len(rows), H, dtype=torch.bool, device=device))


@pytest.mark.parametrize("on_turn", [False, True], ids=["every step", "on turn"])
@pytest.mark.parametrize("load", [None, Load(0.4, 0.21, 1000, 32)], ids=["off", "on"])
@pytest.mark.parametrize("layer", [0, 1, 33])
def test_the_kernels_are_their_twins(load, layer, on_turn):
    torch.manual_seed(0)
    H, G, D, S, R, P, budget = 2, 3, 16, 4, 6, 75, PageBudget(2, 12, 3)
    controls = Controls(DEVICE)
    controls.set(load)
    rows, seq_lens = torch.tensor([3, 0, 1, 5], device=DEVICE), torch.tensor([230, 0, 157, 299], device=DEVICE)
    queries, previous = torch.randn(4, H * G, D, device=DEVICE), torch.randn(R, H * G, D, device=DEVICE)
    steps, counts = torch.randint(9, (R, H), dtype=torch.int32, device=DEVICE), torch.zeros(R, 3, dtype=torch.int64, device=DEVICE)
    expected = [each.clone().cpu() for each in (previous, counts, steps)]
    ours, theirs = (_turn(rows, seq_lens, budget, S, R, H, P, device) if on_turn else None for device in (DEVICE, "cpu"))
    given = queries, rows, previous, 0.1, counts, H, controls.knobs, controls.thetas[0], steps, layer
    corrected = replay_kernels.needs_correction(*given, turn=ours)

    twins = Controls("cpu")
    twins.set(load)
    twins.layers[expected[0].data_ptr()] = layer
    twins.steps[layer, :R, :H] = expected[2]
    twin = Replay(METHODS["freekv"], Boxes(budget, S, "min-max"), "softmax-mean", 0.1, twins)
    assert torch.equal(corrected.cpu(), twin.corrected(layer, queries.cpu(), rows.cpu(), *expected[:2], H, turn=theirs))
    assert torch.equal(previous.cpu(), expected[0]) and torch.equal(counts.cpu(), expected[1])
    selects = ours and ours.selects
    assert not on_turn or (torch.equal(selects.cpu(), theirs.selects) and len(selects.unique()) == 2)
    real = rows[rows > 0].cpu()
    assert torch.equal(steps.cpu()[real], twins.steps[layer, :R, :H][real])

    digests, table = torch.randn(90, H, 2, D, device=DEVICE), torch.randint(1, 90, (4, P), dtype=torch.int32, device=DEVICE)
    where = (rows, seq_lens, table, budget, S)
    logits = replay_kernels.score_pages(queries, digests, *where, 0.3, controls.knobs, layer, selects)
    expected = reference.score_pages(queries, digests, *where, scale=0.3).cpu()
    if load is not None:
        expected = replay_load.page_scores(rows.cpu(), seq_lens.cpu(), H, P, twins.knobs[1], layer).repeat_interleave(G, 1)
    pages, end = torch.arange(P), ((seq_lens + S) // S - budget.window).cpu()
    written = ((pages >= budget.sink) & (pages < end[:, None]) & (rows.cpu() > 0)[:, None])[:, None].expand(-1, H * G, -1)
    if on_turn:
        written = written & selects.cpu().repeat_interleave(G, 1)[..., None]
    torch.testing.assert_close(logits.cpu()[written], expected[written], atol=1e-5, rtol=1e-5)
    kept = torch.randn_like(logits)
    overwritten = kept.clone()
    replay_kernels.overwrite_scores(overwritten, rows, seq_lens, budget, S, H, controls.knobs, layer, selects)
    expected = kept.cpu() if load is None else torch.where(written, expected, kept.cpu())
    torch.testing.assert_close(overwritten.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_draining_is_recall_to_the_list():
    misses = Misses.allocate(4, "cpu")
    misses.extend(*(torch.tensor([1, 2]) for _ in range(3)))
    replay.drain(None, misses, None, None)
    assert misses.length.tolist() == [0, 0, 2, 1]


@pytest.mark.parametrize(
    "script, options, keys",
    [
        (
            "bench_kernels",
            ["--only", "*/plan*", "*/offload*", "*two_bit*"],
            {"ceilings", "tiny/plan_pages", "tiny/digest_two_bit-chunk"},
        ),
        (
            "bench_kernels",
            ["--only", "*/rotate*", "*-int8", "*/decode_tokens", "*/unrotated*"],
            {f"tiny/{name}" for name in ("rotate-decode", "append_tokens-int8", "decode_tokens", "unrotated_keys-chunk")},
        ),
        ("bench_kernels", ["--only", "*-rows/*"], {"ceilings", *(f"tiny-rows/{name}" for name in frame_trials.KERNELS)}),
        (
            "bench_recall",
            ["--host-gib", "0.02", "--units", "16", "--only", "16KiB*/*-8", "8KiB/copy-engine"],
            {"ceilings", "16KiB/zero-copy-8", "16KiB-nhd/zero-copy-8", "8KiB/copy-engine"},
        ),
    ],
)
def test_kernel_benchmarks_run_on_a_cpu(script, options, keys, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--device", "cpu", "--out", str(tmp_path), *options])
    assert importlib.import_module(f"benchmarks.{script}").main() == 0, capsys.readouterr().out
    written = json.loads((tmp_path / f"{script}.json").read_text())
    assert set(written["results"]) >= keys and written["runs"][-1]["torch"] == torch.__version__


class Watched:
    """The Triton kernels of frames, which may do nothing; and the tables that each found."""

    def __init__(self) -> None:
        self.works, self.found = True, []

    def __getattr__(self, name: str):
        def kernel(*arguments) -> None:
            tables = next(each for each in arguments if isinstance(each, FrameTables))
            self.found.append([table.clone() for table in tables])
            if self.works:
                getattr(on_gpu, name)(*arguments)

        return kernel


@pytest.mark.parametrize("name", frame_trials.KERNELS)
def test_a_kernel_that_begins_a_pass_finds_the_same_tables_each_time(name, monkeypatch):
    monkeypatch.setattr(frame_trials, "kernels", kernels := Watched())
    frames = frame_trials.Frames(bench_kernels.TINY_ROWS, DEVICE)
    trial = frame_trials.KERNELS[name](frames)
    for _ in range(2):
        trial.before()
        trial.launches[0]()
    first, second, third = kernels.found
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, third))
    if name != "hold_pages":  # of resident pages it leaves all as it is
        kernels.works = False
        with pytest.raises(AssertionError, match="not the reference's"):
            frame_trials.KERNELS[name](frames)


def test_what_comes_before_each_launch_is_taken_off(monkeypatch):
    clock = [0.0]

    def take(seconds: float) -> None:
        clock[0] += seconds

    def time_all(launches, device) -> dict:
        clock[0] = 0.0
        for launch in launches:
            launch()
        return dict.fromkeys(("median", "min", "max"), clock[0] / len(launches)) | {"repeats": 1}

    monkeypatch.setattr(bench_kernels, "time_graph", time_all)
    trial = Trial([lambda: take(2.0), lambda: take(4.0)], num_bytes=6, before=lambda: take(5.0))
    measured = bench_kernels.measure(trial, "cpu", Ceilings(device=4.0, to_device=1.0, to_host=1.0))
    assert measured["us"]["median"] == pytest.approx(3e6) and measured["of_ceiling"] == pytest.approx(0.5)


NAMED_CACHES = """
import json, os, pathlib, sys
caches = [pathlib.Path(os.environ[name]) for name in sys.argv[1].split(",")]
print(json.dumps([[str(cache) for cache in caches], [any(cache.iterdir()) for cache in caches]]))
[(cache / "kernel").touch() for cache in caches]
"""


def test_a_first_start_finds_no_kernels_of_the_other_system(monkeypatch, tmp_path, capsys):
    def wait(server, most_s: float) -> dict:
        assert server.process.wait() == 0, server.tail()
        return {"ready_s": 1.0, "phases_s": {}, "told_s": {}, "caches": json.loads(server.log.read_text())}

    monkeypatch.setattr(start.Server, "program", (sys.executable, "-c", NAMED_CACHES, ",".join(start.CACHES), "-m"))
    monkeypatch.setattr(start.StartedServer, "start", wait)
    for name in start.CACHES:
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["start", "--dry-run", "--out", str(tmp_path)])
    assert start.main() == 0, capsys.readouterr().out
    found = {name: each["caches"] for name, each in json.loads((tmp_path / "start-needle.json").read_text())["results"].items()}
    assert {name: set(filled) for name, (_, filled) in found.items()} == {name: {"first" not in name} for name in start.STARTS}
    assert not set(found["stock-first"][0]) & set(found["freekv-first"][0]) and found["freekv-again"][0] == found["freekv-first"][0]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "freekv-again"])
    assert start.main() == 1 and "expected freekv-first before it in the same run" in capsys.readouterr().out


def test_a_report_is_continued_and_survives_a_failure(tmp_path):
    first = Report("demo", tmp_path)
    first.add("kept", {"value": 1})
    with first.part("broken"):
        raise ValueError("no such thing")
    first.add("kept too", {"value": 2})
    assert first.finish() == 1
    second = Report("demo", tmp_path)
    second.add("new", {"value": 3})
    written = json.loads(second.path.read_text())
    found = {key: (each["value"], each["run"]) for key, each in written["results"].items()}
    assert found == {"kept": (1, 0), "kept too": (2, 0), "new": (3, 1)}
    assert "no such thing" in written["runs"][0]["failures"]["broken"]
    assert len(second.path.read_text().splitlines()) == 2 + 2 + 2 + 3, "a line for each run and each result"


def test_what_is_measured_again_is_kept_and_told(tmp_path, capsys):
    for value in (1, 2, 3):
        report = Report("demo", tmp_path)
        report.add("again", {"value": 0})  # within a run the last one counts
        report.add("again", {"value": value})
        told = capsys.readouterr().out
        assert ("again: the result of run" in told) == (value > 1) and f"run {value - 2}, " in told or value == 1
    written = json.loads(report.path.read_text())
    assert written["results"]["again"] == {"value": 3, "run": 2}
    assert written["superseded"] == {"again": [{"value": 1, "run": 0}, {"value": 2, "run": 1}]}


def test_a_run_of_several_processes_has_its_command_and_refuses_a_stranger(tmp_path, monkeypatch):
    monkeypatch.setenv(report.JOINT_RUN, "abc python3 -m all")
    first, second = Report("demo", tmp_path), Report("demo", tmp_path)
    first.add("a", {"value": 1})
    with second.part("broken"):
        raise ValueError("no such thing")
    with first.part("broken too"):
        raise ValueError("nor this")
    (run,) = json.loads(first.path.read_text())["runs"]
    assert run["command"] == "python3 -m all" and set(run["failures"]) == {"broken", "broken too"}
    monkeypatch.delenv(report.JOINT_RUN)
    Report("demo", tmp_path).add("b", {"value": 2})
    with pytest.raises(SystemExit, match=r"alone behind those of 0 earlier runs, but another run has written since; measure once it has"):
        second.add("c", {"value": 3})
    assert set(json.loads(first.path.read_text())["results"]) == {"a", "b"}


def test_a_run_that_another_has_overtaken_loses_nothing_of_it(tmp_path):
    late, early = Report("demo", tmp_path), Report("demo", tmp_path)
    early.add("a", {"value": 1})
    with pytest.raises(SystemExit, match="but another run has written since"):
        late.add("b", {"value": 2})
    early.add("c", {"value": 3})
    assert set(json.loads(early.path.read_text())["results"]) == {"a", "c"}


@pytest.mark.parametrize("changed", [{"commit": "another"}, {"device": "another"}, {"torch": "another"}])
@pytest.mark.parametrize("begun", [False, True], ids=["before it begins", "when it writes"])
def test_parts_of_a_run_have_one_code_and_one_kind_of_device(tmp_path, monkeypatch, changed, begun):
    monkeypatch.setenv(report.JOINT_RUN, "abc python3 -m all")
    first, stamp = Report("demo", tmp_path), report.environment()
    monkeypatch.setattr(report, "environment", lambda: stamp | changed)
    second = Report("demo", tmp_path) if begun else None
    first.add("a", {"value": 1})
    with pytest.raises(SystemExit, match="expected one code and one kind of device in a run, found .* and another; begin another run"):
        (second or Report("demo", tmp_path)).add("b", {"value": 2})


def test_the_first_part_of_a_run_that_notes_a_fact_is_heard(tmp_path, monkeypatch):
    monkeypatch.setenv(report.JOINT_RUN, "abc python3 -m all")
    parts = [Report("demo", tmp_path) for _ in range(2)]
    for turn in range(2):
        for number, part in enumerate(parts):
            part.note(ceilings=number, **{f"server {number}": turn})
    (run,) = json.loads(parts[0].path.read_text())["runs"]
    assert (run["ceilings"], run["server 0"], run["server 1"]) == (0, 1, 1)


@pytest.mark.parametrize("joint", ["", "abc", " python3"])
def test_a_run_of_several_processes_has_an_id_and_a_command(tmp_path, monkeypatch, joint):
    monkeypatch.setenv(report.JOINT_RUN, joint)
    with pytest.raises(SystemExit, match=f"^BENCHMARK_RUN={joint}: expected an id that no other run has, a space and a command; "):
        Report("demo", tmp_path)


def test_a_stamp_tells_whether_the_code_is_the_commits(tmp_path, monkeypatch):
    import subprocess

    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # of a hook that runs the tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")  # which may sign commits

    def git(*words: str) -> str:
        who = "-c", "user.name=x", "-c", "user.email=x"
        return subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    def of(commit: str | None, source: str | None, dirty: bool | None) -> dict:
        return {"commit": commit, "commit_from": source, "dirty": dirty}

    def differs(base: str, *files: str, source: str = "git") -> dict:
        return of(None, source, True) | {"base": base, "changed": list(files)}

    assert code_of(tmp_path, None) == of(None, None, None)
    assert code_of(tmp_path, "7e4b136") == of("7e4b136", "COMMIT", None)
    assert code_of(tmp_path, "7e4b136-dirty") == differs("7e4b136", source="COMMIT")
    with pytest.raises(ValueError, match="COMMIT=HEAD: expected 7 to 40 hexadecimal digits"):
        code_of(tmp_path, "HEAD")
    git("init", "-q")
    (tmp_path / "code.py").write_text("a")
    git("add", "."), git("commit", "-qm", "first")
    first = git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "new.json").touch()  # what benchmarks write makes no code another
    (tmp_path / "notes.txt").touch()  # nor does a file that is no code
    assert code_of(tmp_path, None) == code_of(tmp_path, first) == of(first, "git", False)
    (tmp_path / "new.py").touch()
    assert code_of(tmp_path, None) == differs(first, "new.py")
    git("add", "."), git("commit", "-qm", "second")
    second = git("rev-parse", "--short=12", "HEAD")
    assert code_of(tmp_path, first) == differs(first, "new.py", "notes.txt") and code_of(tmp_path, None) == of(second, "git", False)
    assert code_of(tmp_path, "1234567") == differs("1234567", "all: 1234567 is not in the repository")
    (tmp_path / "code.py").write_text("b")
    assert code_of(tmp_path, None) == differs(second, "code.py")


@pytest.mark.parametrize(
    "stamp, said",
    [
        ({"commit": None, "dirty": True, "base": "7e4b136", "changed": ["plan.py"]}, "differs from 7e4b136: plan.py; commit it"),
        ({"commit": None, "dirty": None}, "there is no repository and no COMMIT; set COMMIT="),
    ],
    ids=("differs", "unknown"),
)
def test_results_of_no_commit_do_not_enter_the_repository(stamp, said, tmp_path, monkeypatch):
    ours = tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(report, "RESULTS", ours)
    monkeypatch.setattr(report, "environment", lambda: dict(stamp))
    refused = report.Report("demo", ours)  # from which tables may be made
    for write in (lambda: refused.add("key", {}), lambda: refused.note(key=1), refused.part("key").__enter__):
        with pytest.raises(SystemExit, match=said):
            write()
    assert not refused.path.exists()
    elsewhere = report.Report("demo", tmp_path / "out")
    elsewhere.add("key", {"value": 1})
    (run,) = json.loads(elsewhere.path.read_text())["runs"]
    assert {name: run[name] for name in stamp} == stamp
    monkeypatch.setattr(report, "environment", lambda: stamp | {"commit": "7e4b136", "commit_from": "COMMIT"})
    report.Report("demo", ours).add("key", {})
    assert (ours / "demo.json").exists()


def test_a_failure_is_told_with_what_happened_and_its_end(tmp_path, capsys):
    demo = Report("demo", tmp_path)
    log = "\n".join(f"  | {'x' * 200} {line}" for line in range(40))
    with demo.part("server"):
        raise RuntimeError(f"the server was killed by SIGKILL\n{log}\nthe whole log: FILE")
    capsys.readouterr()
    assert demo.finish() == 1
    told = capsys.readouterr().out
    assert "FAILED server: RuntimeError: the server was killed by SIGKILL\n" in told
    assert "x 39\nthe whole log: FILE\n" in told and len(told) < 4000


def test_results_name_commits_of_the_history_or_of_the_list():
    """A result whose code cannot be had again is told with the reason, in benchmarks/README.md, and no other is."""
    import subprocess

    def known(commit: str) -> bool:
        return subprocess.run(["git", "-C", BENCHMARKS, "merge-base", "--is-ancestor", commit, "HEAD"], capture_output=True).returncode == 0

    shallow = subprocess.run(["git", "-C", BENCHMARKS, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("no whole history to look in")
    stamps: dict[str, set[str]] = {}
    for path in sorted((BENCHMARKS / "results").glob("*.json")):
        written = json.loads(path.read_text())
        used = {result["run"] for result in written["results"].values()} if "runs" in written else ()
        for run in (written["runs"][number] for number in used):
            assert run["commit"], f"{path.name}: expected results of a commit"
            stamps.setdefault(run["commit"] + ("-dirty" if run.get("dirty") else ""), set()).add(path.stem)
    unknown: dict[str, set[str]] = {}
    for stamp, files in stamps.items():
        commit, _, dirty = stamp.partition("-")
        if dirty or not known(commit):
            unknown.setdefault(f"{commit[:7]}{'-dirty' * bool(dirty)}", set()).update(files)
    section = (BENCHMARKS / "README.md").read_text().split("### Commits that are not in the history")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([0-9a-f]{7}(?:-dirty)?) \| (.*?) \| .*[a-z] .*\|$", section, re.MULTILINE)
    listed = {commit: set(re.findall(r"`(.*?)`", files)) for commit, files in rows}
    assert listed.keys() == unknown.keys()
    for commit, files in unknown.items():
        assert {name for pattern in listed[commit] for name in fnmatch.filter(files, pattern)} == files, commit


def test_the_replay_emulates_the_profile_that_is_committed():
    from benchmarks import profiles

    profile = profiles.PROFILES[profiles.EMULATED]
    for tau, share in profiles.CORRECTED.items():
        assert share == round(profile["corrected_kv_heads"][f"{tau:g}"], 2)
    counts = profile["layer_steps_by_corrected_kv_heads_at_0.9"]
    assert sum(heads * share for heads, share in enumerate(counts)) / 8 == pytest.approx(profile["corrected_kv_heads"]["0.9"], abs=0.002)
    measured = tuple((int(tokens), share) for tokens, share in profile["missed_pages_by_context"].items())
    assert profiles.MISSED == round(profile["missed_pages"], 2) and profiles.MISSED_BY_CONTEXT[2:] == measured
    by_layer = profiles.LOADS["tau-0.9-by-layer"]
    assert len(by_layer.corrected) == 29 and by_layer.missed == 0.175 and by_layer.on(29) == by_layer
    wider = by_layer.on(31).corrected
    assert (wider[0], wider[-1]) == (0.974, 0.74) and wider[15] == by_layer.corrected[14] and len(wider) == 31
    assert sum(wider) / 31 == pytest.approx(profiles.PROFILES[profiles.BY_LAYER]["corrected_kv_heads"]["0.9"], abs=0.01)
    assert profiles.LOADS[profiles.USUAL] == profiles.LOADS[profiles.USUAL].on(31) == (0.13, 0.21)
    assert len(Setup().named_load("tau-0.9-by-layer", 32768).corrected) == 31


def test_time_per_token_is_that_of_the_common_window():
    from benchmarks.servers import Stream
    from benchmarks.tpot import is_steady, time_per_token

    early = Stream(0.0, [(time / 100, count) for count, time in enumerate(range(100), 1)])
    late = Stream(0.0, [(0.5 + time * 0.02, count) for count, time in enumerate(range(30), 1)])
    found = time_per_token([early, late])
    assert not is_steady(found) and is_steady(time_per_token([early, early]))
    assert found["fastest_s"] == pytest.approx(0.01) and found["slowest_s"] == pytest.approx(0.02)
    with pytest.raises(ValueError, match="no window"):
        time_per_token([early, Stream(0.0, [(2 + time, count) for count, time in enumerate(range(30), 1)])])


def test_the_committed_step_is_the_one_that_was_drawn(capsys):
    from benchmarks.bench_step import _tell
    from benchmarks.plot_step import LANES, lanes_of, picture

    step = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "step-32k-b8.json"
    kernels = json.loads(step.read_text())["kernels"]
    assert picture(kernels) == step.with_suffix(".svg").read_text()
    assert {lane for lane, *_ in lanes_of(kernels)} == set(LANES)
    _tell(step)
    assert "_score_pages" in capsys.readouterr().out


def test_checkouts_are_compared_by_the_fastest_of_their_rounds(tmp_path, monkeypatch, capsys):
    from benchmarks import compare_steps

    for name in ("old", "new"):
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        if name == "new":  # the benchmarks of older checkouts are no package
            (tmp_path / name / "benchmarks" / "__init__.py").touch()
        (tmp_path / name / "benchmarks" / "bench_step.py").write_text(
            "import json, sys\n"
            f"ran = open({str(tmp_path / name / 'ran')!r}, 'a+')\n"
            "ran.write('x'), ran.seek(0)\n"
            "assert sys.argv[-2:] == ['--corrected', '0.59']\n"
            f"seconds = {{'median': {2e-3 if name == 'old' else 1e-3} * (1 + len(ran.read()))}}\n"
            "out = sys.argv[sys.argv.index('--out') + 1]\n"
            "json.dump({'results': {'32k-b8/freekv': {'seconds': seconds}}}, open(out + '/bench_step.json', 'w'))\n"
        )
    monkeypatch.setattr(sys, "argv", ["compare_steps.py", str(tmp_path / "old"), str(tmp_path / "new"), "--corrected", "0.59"])
    assert compare_steps.main() == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    column = told[-4].index("32k-b8")
    assert [row[column] for row in told[-3:-1]] == ["4", "2"] and told[-1][column + 2] == "0.5"
    monkeypatch.setattr(sys, "argv", ["compare_steps.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="expected a checkout with benchmarks/bench_step.py"):
        compare_steps.main()
    (tmp_path / "new" / "benchmarks" / "bench_step.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["compare_steps.py", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match="measured nothing"):
        compare_steps.main()
