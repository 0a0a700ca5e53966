"""The load of agents: what is drawn, what a crew of threads sends, and what counts; the server is a script, and none is started."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks import servers
from benchmarks.clock import Clock
from benchmarks.paper import agents, plots
from benchmarks.paper.agents import Plan, figures_of
from benchmarks.paper.conversations import Conversation, Crew, Talk, Window
from benchmarks.paper.ladder import Ladder, Limits, point_of
from benchmarks.paper.sections import SECTIONS
from benchmarks.report import Report
from benchmarks.servers import Stream
from benchmarks.setups import Setup
from benchmarks.timing import Ceilings
from sglang_freekv.launch.server import ServerFailed

LLAMA = Setup("llama-3.1-8b", max_running=64)
TALK = Talk(tools=5, task=7, turns=3, answer=2, observation=8, think_s=0.01)
WHOLE = Talk(tools=2048, task=14336, turns=12, answer=192, observation=2048, think_s=2.0)
LIMITS = Limits(2.0, 0.05)
PLAN = Plan(TALK, 0.3, 0.01)
MADE = 200_000  # tokens from here on are of answers, and of no prompt


def conversation(agent: int = 0, number: int = 0, made_up: int = 0, talk: Talk = TALK) -> Conversation:
    return Conversation(LLAMA, talk, agent, number, made_up)


class Scripted:
    """Answers each turn with tokens of its own after ``seconds``; the turn that ``fails`` names, counted from 0, is an error."""

    setup, system = LLAMA, "stock"

    def __init__(self, seconds: float = 0.01, fails: int | None = None, answer: int = TALK.answer) -> None:
        self.seconds, self.fails, self.answer = seconds, fails, answer
        self.sent: list[list[int]] = []
        self.answers: list[list[int]] = []
        self.flushed, self.done, self._lock = 0, 0, threading.Lock()

    def stream(self, history: list[int], tokens: int, deadline_s: float, interval: int) -> Stream:
        started = time.perf_counter()
        with self._lock:
            number = len(self.sent)
            self.sent.append(history)
            self.answers.append([MADE + number] * self.answer)
        if number == self.fails:
            raise ServerFailed("the server answered with an error")
        time.sleep(self.seconds)
        now = time.perf_counter()
        self.done += 1
        meta = {"prompt_tokens": len(history), "cached_tokens": TALK.tools, "cached_tokens_details": None}
        return Stream(started, [(now, 1), (now + 0.01, tokens)], meta, self.answers[number])

    def flush(self) -> None:
        self.flushed += 1

    def state(self) -> dict | None:
        return None

    def logged(self) -> str:
        return ""

    def most_queued(self, begins: int) -> int:
        return 0

    def retractions(self, begins: int) -> int:
        return 0

    def fault(self) -> str | None:
        return None

    def by_conversation(self) -> dict[tuple[int, ...], list[int]]:
        """Numbers of the turns sent, by the task that the conversation begins with."""
        found: dict[tuple[int, ...], list[int]] = {}
        for number, history in enumerate(self.sent):
            found.setdefault(tuple(history[TALK.tools : TALK.tools + TALK.task]), []).append(number)
        return found


def test_what_is_drawn_depends_on_agent_conversation_and_turn_alone():
    first, again = conversation(3, 1), conversation(3, 1)
    pauses = [[each.extend([1, 2]) for _ in range(3)] for each in (first, again)]
    assert first.history == again.history and pauses[0] == pauses[1] and len(set(pauses[0])) == 3
    tails = [each.history[TALK.tools :] for each in (conversation(3, 1), conversation(3, 2), conversation(4, 1), conversation(1, 3))]
    assert len(set(map(tuple, tails))) == 4, "two conversations have one task"
    assert len({tuple(conversation(agent).history[: TALK.tools]) for agent in range(4)}) == 1


def test_the_answer_changes_nothing_that_is_drawn():
    talks = [conversation(), conversation()]
    pauses = [each.extend(answer) for each, answer in zip(talks, ([1, 2], [3, 4]))]
    prompt = TALK.tools + TALK.task
    assert pauses[0] == pauses[1] and talks[0].history[prompt + 2 :] == talks[1].history[prompt + 2 :]


def test_a_history_grows_by_the_answer_and_what_the_tool_returned():
    talk = conversation()
    for turn in range(TALK.turns):
        before = talk.history
        assert not talk.is_over and talk.turn == turn
        talk.extend([7, 8])
        assert talk.history[: len(before) + 2] == [*before, 7, 8]
        assert 4 <= len(talk.history) - len(before) - 2 <= 12
    assert talk.is_over


def test_lengths_and_pauses_are_spread_as_they_are_told():
    lengths, pauses = [], []
    for agent in range(20):
        talk = conversation(agent, talk=WHOLE)
        for _ in range(WHOLE.turns):
            before = len(talk.history)
            pauses.append(talk.extend([]))
            lengths.append(len(talk.history) - before)
    assert 1024 <= min(lengths) < 1200 and 2900 < max(lengths) <= 3072 and abs(sum(lengths) / len(lengths) - 2048) < 120
    assert abs(sum(pauses) / len(pauses) - 2.0) < 0.4 and min(pauses) < 0.1 and max(pauses) > 6


def test_no_conversation_is_longer_than_is_told():
    assert WHOLE.longest == 16384 + 12 * 192 + 11 * 3072 and WHOLE.usual == 16384 + 11 * 2240 // 2
    longest = max(len(conversation(agent, made_up=TALK.turns - 1).history) + TALK.answer for agent in range(40))
    assert longest <= TALK.longest
    assert WHOLE.divided(16) == replace(WHOLE, tools=128, task=896, answer=12, observation=128)


def test_turns_that_are_made_up_lead_to_where_an_agent_starts():
    fresh, later, latest = (conversation(2, made_up=turns) for turns in range(3))
    assert (fresh.turn, later.turn, latest.turn) == (0, 1, 2)
    assert later.history[: len(fresh.history)] == fresh.history and latest.history[: len(later.history)] == later.history


@pytest.mark.parametrize("count, expected", [(3, [0, 1, 2]), (2, [0, 1]), (6, [0, 0, 1, 1, 2, 2]), (1, [0])])
def test_starts_are_spread_over_a_conversation(count, expected):
    starts = [Crew(Scripted(), TALK, count, 60).starts for _ in range(2)]
    assert sorted(starts[0]) == expected and starts[0] == starts[1]


def test_agents_go_on_with_real_answers_and_begin_anew():
    server = Scripted()
    crew = Crew(server, TALK, 3, 60)
    crew.work(seconds=0.5, apart_s=0.01)
    found = server.by_conversation()
    assert all(conversation(agent, made_up=start).history in server.sent for agent, start in enumerate(crew.starts))
    assert len(found) > 3 and len(crew.streams) == len(server.sent) == server.done, "a turn was not awaited"
    for numbers in found.values():
        for last, number in zip(numbers, numbers[1:]):
            told = server.sent[last] + server.answers[last]
            assert server.sent[number][: len(told)] == told and 4 <= len(server.sent[number]) - len(told) <= 12
    turns = sorted(len(numbers) for numbers in found.values())
    assert turns[-1] == TALK.turns and turns[0] >= 1, "no conversation ended after its turns"


def test_two_servers_are_sent_the_same_conversations():
    prompts = []
    for seconds in (0.01, 0.03):
        server = Scripted(seconds)
        Crew(server, TALK, 2, 60).work(seconds=0.2, apart_s=0)
        prompts.append({task: server.sent[numbers[0]] for task, numbers in server.by_conversation().items()})
    both = prompts[0].keys() & prompts[1].keys()
    assert len(both) >= 2 and all(prompts[0][task] == prompts[1][task] for task in both)


def test_the_window_begins_when_each_agent_has_had_an_answer():
    server = Scripted(seconds=0.1)
    crew = Crew(server, TALK, 4, 60)
    window = crew.work(seconds=0.3, apart_s=0.1)
    arrivals = {stream.output_ids[0] - MADE: stream.arrivals[0][0] for stream in crew.streams}
    firsts = sorted(arrivals[numbers[0]] for numbers in server.by_conversation().values())
    assert firsts[3] <= window.begin < firsts[3] + 1 and window.end - window.begin == pytest.approx(0.3)
    assert 0.39 <= window.ramp_s < 10 and window.begin - window.ramp_s <= min(stream.started for stream in crew.streams)
    inside = [stream for stream in crew.streams if window.holds(stream)]
    assert 0 < len(inside) < len(crew.streams)
    assert max(stream.started for stream in crew.streams) < window.end + 2, "an agent went on behind the window"


def test_a_turn_that_was_sent_before_the_end_is_awaited():
    server = Scripted(seconds=0.4)
    crew = Crew(server, replace(TALK, think_s=0.0), 1, 60)
    window = crew.work(seconds=0.2, apart_s=0)
    assert [window.holds(stream) for stream in crew.streams[:2]] == [False, True] and crew.streams[1].arrivals[0][0] > window.end


@pytest.mark.parametrize("fails", [0, 5])
def test_a_turn_that_fails_ends_all(fails):
    server, started = Scripted(fails=fails), time.monotonic()
    with pytest.raises(ServerFailed, match="answered with an error"):
        Crew(server, TALK, 3, 60).work(seconds=30, apart_s=0.01)
    assert time.monotonic() - started < 10


def test_an_answer_that_is_cut_short_is_an_error():
    with pytest.raises(RuntimeError, match="has 1 token ids, expected 2"):
        Crew(Scripted(answer=1), TALK, 1, 60).work(seconds=30, apart_s=0)


def test_turns_share_what_is_left_of_the_time():
    deadlines, server = [], Scripted(seconds=0.3)
    stream = server.stream
    server.stream = lambda history, tokens, deadline_s, interval: (
        deadlines.append(deadline_s) or stream(history, tokens, deadline_s, interval)
    )
    Crew(server, replace(TALK, think_s=0.0), 1, 50).work(seconds=0.4, apart_s=0)
    assert 40 < deadlines[0] <= 50 and deadlines[1] < deadlines[0] - 0.25


def turn(started: float, first: float, gap: float, tokens: int = 11, **meta) -> Stream:
    arrivals = [(started + first + index * gap, 1 + index) for index in range(tokens)]
    return Stream(started, arrivals, {"prompt_tokens": 1000, "cached_tokens": 900} | meta)


def test_figures_by_hand():
    window, host = Window(10.0, 14.0, 3.0), {"cached_tokens_details": {"device": 400, "host": 100}}
    streams = [
        turn(9.0, 1.5, 0.1),  # sent before: ten of its tokens arrive from 10.5 on, and one more
        turn(10.0, 1.0, 0.04, cached_tokens=500, **host),
        turn(12.0, 2.5, 0.04),  # late, and its tokens come behind the window
        turn(13.9, 1.0, 0.06),  # slow
        turn(14.0, 0.1, 0.01),
    ]
    found = figures_of(streams, window)
    assert (found["turns"], found["rate"], found["ramp_s"]) == (3, 0.75, 3.0)
    assert found["ttfts"] == [1.0, 2.5, 1.0] and found["tpots"] == [0.04, 0.04, 0.06]
    assert point_of(found, LIMITS) == (pytest.approx(0.25), pytest.approx(1 / 3))
    assert found["output_throughput"] == (11 + 11) / 4 and found["hit_rate"] == pytest.approx(2300 / 3000)
    assert found["host_hit_rate"] == pytest.approx(100 / 3000) and found["median_context"] == found["max_context"] == 1000
    assert found["median_ttft_ms"] == pytest.approx(1000) and found["p99_ttft_ms"] == pytest.approx(2470)


def test_tokens_of_a_turn_are_those_that_arrive_within_the_window():
    crossing = turn(9.0, 0.5, 0.2)  # from 9.5 to 11.5
    assert Window(10.0, 11.0, 0.0).tokens(crossing) == 5 and Window(0.0, 9.5, 0.0).tokens(crossing) == 0


def test_a_window_in_which_nothing_is_sent_has_a_goodput_of_nothing():
    found = figures_of([turn(1.0, 30.0, 0.1)], Window(10.0, 20.0, 0.0))
    assert point_of(found, LIMITS) == (0.0, 0.0) and found["hit_rate"] is None and found["median_ttft_ms"] is None
    results = {"stock-fa3/8": found | {"agents": 8, "retractions": 0, "run": 0}}
    assert "stock-fa3 0" in agents.goodputs(results, LIMITS)


def holding(pages: int) -> dict:
    return {"totals": {"selected_units": 4}, "host_pages_used": pages, "rows_used": 0}


def test_a_level_begins_with_an_empty_tree_and_tells_the_servers_counts(monkeypatch):
    monkeypatch.setattr(agents, "SETTLE_S", 0)
    server, states = Scripted(), [holding(9), holding(0) | {"totals": {"selected_units": 10}}]
    server.state = lambda: states.pop(0)
    server.logged, server.retractions, server.most_queued = lambda: "four", lambda begins: begins, lambda begins: begins + 3
    found = agents.measure(server, PLAN, 2, 60)
    assert found["totals"] == {"selected_units": 6} and found["at_rest"] == {"host_pages_used": 0, "rows_used": 0}
    assert (found["agents"], found["talk"], found["retractions"], server.flushed) == (2, asdict(TALK), 4, 2)
    assert found["most_queued"] == 7
    assert found["turns"] == len(found["ttfts"]) > 0


@pytest.mark.parametrize("pages, fault, told", [(3, None, "held at rest: {'host_pages_used': 3"), (0, "a traceback", "logged an error")])
def test_what_is_held_or_went_wrong_fails_the_level(pages, fault, told, monkeypatch):
    monkeypatch.setattr(agents, "SETTLE_S", 0)
    server = Scripted()
    server.state, server.fault = lambda: holding(pages), lambda: fault
    with pytest.raises(RuntimeError, match=told):
        agents.measure(server, PLAN, 1, 60)


def level_of(count: int, good: int, run: int = 0, talk: Talk = TALK) -> dict:
    """Ten turns in five seconds, of which so many were within limits."""
    figures = dict.fromkeys((*agents.COLUMNS, "median_context", "max_context"), 1.0)
    measured = {"agents": count, "rate": 2.0, "ttfts": [1.0] * good + [3.0] * (10 - good), "tpots": [0.01] * 10, "seconds": 5.0}
    return figures | measured | {"talk": asdict(talk), "retractions": 0, "limits": LIMITS._asdict(), "run": run}


def ladder(left=lambda key: True) -> Ladder:
    return Ladder(PLAN, LIMITS, (4, 8, 16, 32), left)


@contextmanager
def no_server(*arguments, **options):
    raise AssertionError("a server was started")
    yield


@pytest.mark.parametrize("system", ["freekv", "stock-hicache"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_server_climbs_until_it_is_saturated_or_fails(system, fails, tmp_path, monkeypatch):
    loads, started = [], []

    @contextmanager
    def running(setup, base, directory, deadline_s, more):
        started.append((base, more))
        yield SimpleNamespace(facts=dict, set_load=loads.append)

    def measure(server, plan, count, deadline_s):
        assert deadline_s >= plan.least_s(count)
        if fails and count == 8:
            raise RuntimeError("a turn failed")
        return level_of(count, {4: 9, 8: 10, 16: 4}[count])

    for name, stand_in in (("running", running), ("measure", measure)):
        monkeypatch.setattr(agents, name, stand_in)
    monkeypatch.setattr(agents.ttft, "warm_up", lambda *arguments: None)
    report, known = Report("agents", tmp_path), agents.systems_of(LLAMA)
    agents.run([known[system]], ladder(), report, Clock(5, 60))
    assert list(report.results) == [f"{system}/{count}" for count in ((4,) if fails else (4, 8, 16))]
    assert report.finish() == int(fails) and point_of(report.results[f"{system}/4"], LIMITS).goodput == 1.8
    assert started == [(known[system].base, known[system].more)]
    expected = [None, known["freekv"].setup.named_load("accurate-by-layer", TALK.usual)] if system == "freekv" else [None]
    assert loads == expected and report.results[f"{system}/4"].get("load") == ("accurate-by-layer" if system == "freekv" else None)


def test_levels_that_are_there_start_no_server(tmp_path):
    report, systems = Report("agents", tmp_path), agents.systems_of(LLAMA)
    for name in systems:
        report.add(f"{name}/4", level_of(4, 9))
        report.add(f"{name}/8", level_of(8, 4))
    with mock.patch.object(agents, "running", no_server):
        agents.run(list(systems.values()), ladder(), report, Clock(5, 60))
        assert not report.failures
        del report.results["stock-hicache/8"]
        agents.run(list(systems.values()), ladder(), report, Clock(5, 60))
    assert [failure.split(":")[0] for failure in report.failures] == ["server stock-hicache"]


def test_systems_and_their_flags(tmp_path):
    systems = agents.systems_of(replace(LLAMA, host_memory=75))
    flags = {name: system.setup.flags(system.base, tmp_path) | system.more for name, system in systems.items()}
    assert tuple(flags) == agents.SYSTEMS
    assert [flags[name].get("--attention-backend") for name in agents.SYSTEMS] == ["fa3", "flashinfer", "fa3", None]
    hicache = flags["stock-hicache"]
    assert hicache["--enable-hierarchical-cache"] is True and hicache["--hicache-size"] == 80, "75 GiB are 80.5 GB"
    assert not [name for name in flags if name != "stock-hicache" and any("hi" in flag and "cache" in flag for flag in flags[name])]
    ours = flags["freekv"]
    assert ours["--kv-retrieval"] == "freekv" and ours["--freekv-host-memory"] == 75
    assert not {"--freekv-preset", "--page-size", "--freekv-budget", "--freekv-resident-memory", "--freekv-tau"} & set(ours)
    assert set(agents.systems_of(Setup("needle", "cpu"))) == {"stock-flashinfer", "freekv"}


def test_hicache_finds_the_host_memory_that_it_asks_for(tmp_path, monkeypatch):
    """SGLang refuses a pool that leaves less than 10 GiB."""
    monkeypatch.setattr(servers, "grow_host_memory", (grown := []).append)
    ready = SimpleNamespace(wait_until_ready=lambda tell: 0.0, fault=lambda: None, stop=lambda: None)
    monkeypatch.setattr(servers, "BenchServer", lambda *arguments: ready)
    for system in agents.systems_of(LLAMA).values():
        with servers.running(system.setup, system.base, tmp_path, 60, system.more):
            pass
    assert grown == [75 + 11, 75]


def test_the_table_of_levels():
    results = {
        "freekv/16": level_of(16, 9),
        "freekv/8": level_of(8, 6),
        "stock-fa3/8": level_of(8, 3),
        "stock-hicache/8": level_of(8, 5),
    }
    _, *rows, last = (shown := agents.goodputs(results, LIMITS)).splitlines()
    found = [(row.split()[0], row.split()[1], row.split()[2]) for row in rows]
    assert found == [("stock-fa3", "8", "0.6"), ("stock-hicache", "8", "1"), ("freekv", "8", "1.2"), ("freekv", "16", "1.8")]
    assert last.endswith("stock-fa3 0.6, stock-hicache 1, freekv 1.8; freekv / the best of the others 1.8") and shown.count("\n") == 5
    assert agents.goodputs({}, LIMITS).endswith("turns per second: none")


def called(monkeypatch, directory, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["agents", "--out", str(directory), *words])
    return agents.main()


def test_tables_come_from_the_json_alone(tmp_path, monkeypatch, capsys):
    written = {"runs": [{}], "results": {"stock-hicache/8": level_of(8, 5)}}
    (tmp_path / "paper-agents-llama-3.1-8b.json").write_text(json.dumps(written))
    with mock.patch.object(agents, "running", no_server):
        assert called(monkeypatch, tmp_path, "--tables") == 0
    assert "stock-hicache 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "talk, device, told", [(replace(WHOLE, turns=3), None, "expected results of Talk"), (WHOLE, "another", "of another")]
)
def test_other_conversations_and_another_card_write_a_file_of_their_own(talk, device, told, tmp_path, monkeypatch):
    report = Report("paper-agents-llama-3.1-8b", tmp_path)
    report.runs[-1]["device"] = device or report.runs[-1]["device"]
    report.add("stock-fa3/8", level_of(8, 5, talk=talk))
    monkeypatch.setattr(Ceilings, "measure_apart", lambda device: Ceilings(1.0, 1.0, 1.0))
    monkeypatch.setattr(agents, "run", ran := mock.Mock())
    with pytest.raises(SystemExit, match=f"{told}.*give --suffix"):
        called(monkeypatch, tmp_path)
    assert not ran.called and called(monkeypatch, tmp_path, "--suffix", "other") == 0 and ran.called


def test_what_is_asked_for_is_what_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(Ceilings, "measure_apart", lambda device: Ceilings(1.0, 1.0, 1.0))
    monkeypatch.setattr(agents, "run", ran := mock.Mock())
    called(monkeypatch, tmp_path, "--systems", "freekv", "--agents", "9", "3", "--only", "freekv/3", "--seconds", "70")
    ([system], asked, *_), _ = ran.call_args
    assert system.name == "freekv" and system.setup.context_length >= WHOLE.longest + 8 and system.setup.host_memory == 75
    assert (asked.rates, asked.asked) == ((3, 9), Plan(WHOLE, 70.0, 1.0))
    assert asked.next({}, "freekv") == 3 and asked.next({"freekv/3": level_of(3, 10)}, "freekv") is None
    called(monkeypatch, tmp_path, "--device", "cpu")
    (systems, asked, *_), _ = ran.call_args
    assert [system.name for system in systems] == ["stock-flashinfer", "freekv"] and asked.asked.talk.task == 896


@pytest.mark.parametrize(
    "words, told",
    [
        (("--device", "cpu", "--systems", "stock-hicache"), "HiCache and FA3 need a GPU"),
        (("--agents", "0"), "expected at least 1"),
        (("--part-seconds", "60"), "expected at least 154 for 64 agents"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, told, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as refused:
        called(monkeypatch, tmp_path, *words)
    assert told in f"{refused.value}{capsys.readouterr().err}"


def test_the_section_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "curves", drawn := mock.Mock())
    results = {"stock-fa3/4": level_of(4, 10), "stock-fa3/8": level_of(8, 3), "freekv/4": level_of(4, 10) | {"load": agents.DEFAULT_LOAD}}
    path = tmp_path / "paper-agents-llama-3.1-8b.json"
    path.write_text(json.dumps({"runs": [{"command": "x", "device": "a card"}], "results": results}))
    section = SECTIONS["agents"](path, tmp_path)
    text = section.markdown
    assert text.startswith("## Conversations of agents, on a card: Llama-3.1-8B")
    assert "| stock SGLang with FlashAttention 3 | 8 | 0.6 | 0.3 |" in text and "| FreeKV | 4 | 2 | 1 |" in text
    assert "best may be higher: FreeKV at 4." in text and "replays the load `accurate-by-layer`" in text
    lines = drawn.call_args.args[4]
    assert lines["stock SGLang", "FlashAttention 3"] == [(4, 2.0), (8, 0.6)] and section.facts["agents"] == {
        "stock-fa3": 2.0,
        "freekv": 2.0,
    }
    assert max(len(sentence.split()) for sentence in text.split("\n\n")[1].split(". ")) <= 25
