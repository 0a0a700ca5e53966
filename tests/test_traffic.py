"""The engine under any traffic: admissions, chunks, prefix hits, steps, ends, retractions and evictions in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine import CONFIGS, Request
from sglang_freekv.batch import ExtendBatch
from sglang_freekv.extend_plan import ExtendPlan
from sglang_freekv.kernels.frame_tables import DEPTH_BITS
from sglang_freekv.memory_pool.transfer import InlineStream
from sglang_freekv.residency import REFILLED
from test_retrieval import DeferredStream
from traffic import Traffic, just_promised

LEAST_RULES = 150  # of each configuration and stream
SHORTAGE = {
    "prefix pages", "extends in place", "staged extends", "rows made partial", "rows of partial requests taken by whole ones",
    "pages given up", "pages of partial rows given up", "staged pages brought", "in place pages brought", "replaced pages",
    "refilled pages brought",
}  # fmt: skip
AT_ONCE = ("tight", "one-token-pages", "slack", "copy-engine", "canary")  # configurations whose transfers are tried early as well as late
TRAFFIC = settings(max_examples=4, stateful_step_count=40)


def traffic(name: str, **attributes) -> type[Traffic]:
    """A machine of its own name, so that it gets examples of its own."""
    return type(name, (Traffic,), {"ran": Counter(), "saw": Counter(), **attributes})


@pytest.mark.parametrize("name, stream", [*product(CONFIGS, [DeferredStream]), *product(AT_ONCE, [InlineStream])])
def test_any_traffic_is_served_as_the_paper_says(name, stream, record_property):
    machine = traffic(f"{name} {stream.__name__}", config=CONFIGS[name], stream=stream)
    run_state_machine_as_test(machine, settings=TRAFFIC)
    record_property("ran", {**machine.ran, **machine.saw})
    print(f"{machine.ran.total()} rules: {dict(machine.ran)}; {dict(machine.saw)}")
    assert machine.ran.total() >= LEAST_RULES and machine.saw["prefix pages"] and machine.saw["decoded tokens"]
    assert machine.saw["recalled units"] or machine.config.device_cache_tokens, "slack may do without recall, nothing else"


@pytest.mark.parametrize("name, stream", [("tight", DeferredStream), ("in-full-below", InlineStream)])
def test_any_traffic_is_served_while_all_is_resident(name, stream, record_property):
    machine = traffic(f"{name} resident {stream.__name__}", config=CONFIGS[name], stream=stream, resident=60)
    run_state_machine_as_test(machine, settings=TRAFFIC)
    record_property("ran", {**machine.ran, **machine.saw})
    assert machine.ran.total() >= LEAST_RULES and machine.saw["decoded tokens"]
    assert machine.saw["extends in place"] and not machine.saw["pages given up"]


def test_any_traffic_is_served_with_the_frames_that_are_promised(record_property):
    """All configurations in one test, because what is rare happens in some of them."""
    seen = Counter()
    late = ("tight", "in-full-below", "no-sink", "one-token-pages", "canary", "louiskv", "on-turn", "on-turn-in-full-below", "int8")
    for name, stream in (*product(late, [DeferredStream]), *product(late[::2], [InlineStream])):
        machine = traffic(f"{name} promised {stream.__name__}", config=CONFIGS[name], stream=stream, resident=just_promised(CONFIGS[name]))
        run_state_machine_as_test(machine, settings=TRAFFIC)
        print(f"{name}: {machine.ran.total()} rules: {dict(machine.ran)}; {dict(machine.saw)}")
        assert machine.ran.total() >= LEAST_RULES and machine.saw["decoded tokens"]
        seen += machine.saw
    record_property("seen", dict(seen))
    assert not SHORTAGE - seen.keys()


def _never_waiting(machine: Traffic) -> None:
    machine.retrieval.complete_transfers = lambda layer: None


def _extending_while_a_step_is_in_flight(machine: Traffic) -> None:
    machine.retrieval.complete_all_transfers = lambda: None


def _seeding_a_row_only_once(machine: Traffic) -> None:
    seed, close, seeded = machine.retrieval._seed, machine.retrieval.closing.run, set()

    def seed_new_rows(layer: int, queries, batch: ExtendBatch, *context) -> None:
        if seeded.isdisjoint(new := {(layer, row) for row in batch.rows.tolist()}):
            seed(layer, queries, batch, *context)
        seeded.update(new)

    def close_for_new_rows(batch: ExtendBatch) -> None:
        if seeded.isdisjoint(new := {(0, row) for row in batch.rows.tolist()}):
            close(batch)
        seeded.update(new)

    machine.retrieval._seed, machine.retrieval.closing.run = seed_new_rows, close_for_new_rows


def _recalling_with_an_old_page_table(machine: Traffic) -> None:
    tensors, tables = machine.engine._tensors, {}

    def first_tables(requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, table = tensors(requests)
        for row, entries in zip(rows.tolist(), table):
            first = tables.setdefault(row, entries.clone())
            entries[: len(first)] = first[: len(entries)]
        return rows, table

    machine.engine._tensors = first_tables


@pytest.mark.parametrize("sabotage", [
    _never_waiting, _extending_while_a_step_is_in_flight, _seeding_a_row_only_once, _recalling_with_an_old_page_table,
])  # fmt: skip
def test_a_broken_engine_is_found(sabotage):
    """The negative control of the machine."""
    machine = traffic(sabotage.__name__, stream=DeferredStream, sabotage=sabotage)
    with pytest.raises((AssertionError, RuntimeError)):
        run_state_machine_as_test(machine, settings=settings(TRAFFIC, max_examples=40, phases=[Phase.generate]))


def _reading_the_frames_of_the_pass_before(machine: Traffic) -> None:
    frames = machine.retrieval.store.frames
    begin, snapshot, before = frames._begin, frames.snapshot, []

    def note(*arguments) -> None:
        before[:] = [frames.tables.frame_of.clone()]
        begin(*arguments)

    def stale(*where: torch.Tensor) -> None:
        snapshot(*where)
        now = frames.tables.frame_of.clone()
        frames.tables.frame_of.copy_(before[0])
        snapshot(*where)
        frames.tables.frame_of.copy_(now)

    frames._begin, frames.snapshot = note, stale


def _keeping_a_frame_that_the_plan_does_not_know(machine: Traffic) -> None:
    frames, tables, size = machine.retrieval.store.frames, machine.retrieval.store.frames.tables, machine.size
    begin_decode, frames._keep = frames.begin_decode, lambda number: frames.num_frames  # partial rows have nothing in hand

    def begin(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, **need) -> None:
        begins = (rows > 0) & (seq_lens % size == 1 % size) & (tables.in_hand[rows] < 0)
        pages = req_to_token[rows[begins], seq_lens[begins] - 1] // size
        held = tables.frame_of[pages]
        tables.frame_of[pages] = -1
        begin_decode(req_to_token, rows, seq_lens, **need)
        tables.frame_of[pages] = held

    frames.begin_decode = begin


def _staging_beside_frames_of_an_earlier_owner(machine: Traffic) -> None:
    frames = machine.retrieval.store.frames
    begin = frames.begin_extend_by_staging
    frames.begin_extend_by_staging = lambda table, rows, seq_lens, _, given, **need: begin(
        table, rows, seq_lens, seq_lens + 64, given, **need
    )


def _giving_up_pages_of_whole_rows(machine: Traffic) -> None:
    frames, last_use = machine.retrieval.store.frames, machine.retrieval.store.frames.tables.last_use
    reclaim = frames.reclaim

    def without_pins(must: int, may: int) -> None:
        pinned = last_use >> DEPTH_BITS & 1
        last_use.sub_(pinned << DEPTH_BITS)
        reclaim(must, may)
        last_use.add_(pinned << DEPTH_BITS)

    frames.reclaim = without_pins


def _refilling_nothing(machine: Traffic) -> None:
    machine.retrieval.refill = lambda *pages: None


def _refilling_in_the_step_behind_an_extend_only(machine: Traffic) -> None:
    residency, begin = machine.engine.residency, machine.engine.residency.begin_decode

    def without_later_refills(*where):
        extended = residency.extended if residency.frames.now == residency.extended else -REFILLED
        with mock.patch.object(residency, "extended", extended):
            return begin(*where)

    residency.begin_decode = without_later_refills


def _keeping_staged_pages_in_the_frames_of_others(machine: Traffic) -> None:
    planner, plan = machine.engine.planner, machine.engine.planner.plan

    def with_wrong_frames(*arguments, **options) -> ExtendPlan:
        made = plan(*arguments, **options)
        given = made.batch.given
        return made if given is None else made._replace(batch=replace(made.batch, given=given.roll(1, dims=1)))

    planner.plan = with_wrong_frames


def _leaving_the_slots_of_the_last_owner(machine: Traffic) -> None:
    machine.retrieval.cache.empty_rows = lambda rows: None


@pytest.mark.parametrize("sabotage", [
    _reading_the_frames_of_the_pass_before, _keeping_a_frame_that_the_plan_does_not_know, _staging_beside_frames_of_an_earlier_owner,
    _giving_up_pages_of_whole_rows, _refilling_nothing, _refilling_in_the_step_behind_an_extend_only,
    _keeping_staged_pages_in_the_frames_of_others, _leaving_the_slots_of_the_last_owner,
])  # fmt: skip
def test_a_broken_residency_is_found(sabotage):
    machine = traffic(sabotage.__name__, resident=just_promised(CONFIGS["tight"]), sabotage=sabotage)
    with pytest.raises((AssertionError, RuntimeError)):
        run_state_machine_as_test(machine, settings=settings(TRAFFIC, max_examples=40, phases=[Phase.generate]))
