"""The residency simulator against traces whose answers are known by hand."""

import numpy as np
import pytest

from benchmarks.partial_rows import RULES, replay
from benchmarks.residency import POLICIES, Simulation, schedule
from benchmarks.residency_traces import TRACES, Request

# One row, four frames. The third request needs room: page 0 is asked for again, page 2 is not.
TINY = [Request(0, (0, 1), ()), Request(1, (2, 3), ()), Request(2, (4, 5), ()), Request(3, (0, 1), ())]


@pytest.mark.parametrize("policy, hits", [("last use", 0), ("belady", 2)])
def test_hits_of_a_trace_worked_out_by_hand(policy, hits):
    out = Simulation(TINY, rows=1, frames=4, policy=policy).run()
    assert (out["hit pages"], out["hits resident"], out["streamed"]) == (2, hits, 2 - hits)


def test_of_pages_used_last_in_one_pass_the_deeper_goes_first():
    simulation = Simulation([Request(0, (0, 1, 2), ())], rows=1, frames=3, policy="last use, deeper first")
    assert simulation.victims(np.arange(3), 0).tolist() == [2, 1, 0]


def test_running_rows_keep_their_pages_and_new_ones_find_no_frame():
    out = Simulation([Request(0, (0, 1), (2, 3))], rows=1, frames=3, policy="last use").run()
    assert (out["no frame"], out["given up"]) == (1, 0)


def test_requests_start_in_order_as_rows_become_free():
    requests = [Request(0, (0,), (1, 2)), Request(0, (3,), ()), Request(0, (4,), ())]
    assert schedule(requests, rows=1) == [0, 3, 4]
    assert schedule(requests, rows=2) == [0, 0, 1]


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("frames", [64, 96])
def test_no_policy_finds_more_than_the_optimum(trace, frames):
    requests = TRACES[trace](np.random.default_rng(1), 16, 60)
    hits = {p: Simulation(requests, 4, frames, p).run()["hits resident"] for p in POLICIES}
    assert hits["belady"] == max(hits.values())


# Requests of 10 and 6 pages beside each other. In the second tick each has filled one more, and with one in hand each they want 20 frames.
PAIR = [Request(0, tuple(range(10)), (20,)), Request(0, tuple(range(10, 16)), (21,))]


@pytest.mark.parametrize(
    "rule, absent, partial",
    [
        ("largest", (1 - 5 / 11), 1),  # 18 frames less 8 of the other, 3 for slots, one of the last token and one in hand
        ("smallest", (1 - 1 / 7), 1),
        ("all", 2 * (1 - 8 / 18), 2),
    ],
)
def test_who_gives_way_by_hand(rule, absent, partial):
    out = replay(PAIR, rows=2, frames=18, slots=3, rule=rule, seed=0)
    assert (out["ticks"], out["partial ticks"], out["gave way"], out["most partial"]) == (4, partial, partial, partial)
    assert out["absent ticks"] == pytest.approx(absent)


def test_pages_come_back_where_frames_become_free_and_only_there():
    requests = [Request(0, tuple(range(10)), tuple(range(20, 24))), Request(0, tuple(range(10, 16)), ())]
    out = replay(requests, rows=2, frames=17, slots=3, rule="largest", seed=0)
    assert out["gave way"] == 1 and 0 < out["absent ticks"] < out["absent, none back"]


def test_rows_whose_slots_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected at least 10"):
        replay(PAIR, rows=2, frames=9, slots=3, rule=RULES[0], seed=0)
