"""The canary of the engine: silent while host memory holds what was written, and loud on every way back from it when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine import CONFIGS, HEADS, LAYERS, Engine
from sglang_freekv.memory_pool.canary import MOST_FAULTS, Fault, FaultReader
from sglang_freekv.memory_pool.transfer import InlineStream
from test_retrieval import DeferredStream

FULL = CONFIGS["canary"]
PROMPT, STEPS = 120, 12
LAYER, HEAD = 1, 1


def served(config=FULL, stream=InlineStream) -> Engine:
    """An engine that has prefilled one prompt; its page size is 4."""
    engine = Engine(config, prompts=[PROMPT], steps=2 * STEPS, stream=stream)
    engine.extend(engine.requests, [PROMPT])
    return engine


def faults(engine: Engine) -> list[Fault]:
    engine.retrieval.complete_all_transfers()
    return FaultReader().read(engine.retrieval.canary.faults)


def damage(engine: Engine, page: int) -> int:
    """One bit of one unit of the request's logical page; returns the host page."""
    host_page = int(engine.requests[0].pages[page])
    unit = engine.retrieval.host.layers[LAYER][host_page, HEAD]
    unit[1, 2].view(torch.int32)[3] ^= 1 << 9
    return host_page


@pytest.mark.parametrize("stream", [InlineStream, DeferredStream])
@pytest.mark.parametrize("kind", ["sample", "full"])
def test_it_is_silent_while_memory_keeps_what_was_written(kind, stream):
    engine = Engine(replace(FULL, canary=kind), prompts=[50, 64, 99], steps=STEPS, stream=stream)
    engine.extend(engine.requests, [32, 48, 4])
    engine.extend(engine.requests, [50, 64, 99])
    for _ in range(STEPS):
        engine.decode(engine.requests)
    assert faults(engine) == []
    engine.retrieval.store.staging.sweep(torch.cat([request.pages[: request.tokens // 4] for request in engine.requests]))
    assert faults(engine) == []


@pytest.mark.parametrize("stream", [InlineStream, DeferredStream])
@pytest.mark.parametrize("tau", [-2, 2], ids=["recall ahead", "corrections"])
def test_a_page_that_changed_is_told_when_it_is_recalled(tau, stream):
    """Of all pages that may be selected, in one layer and kv head; whatever is recalled of it must be told, and nothing else."""
    engine = served(replace(FULL, tau=tau), stream)
    engine.retrieval.complete_all_transfers()
    damaged = {damage(engine, page) for page in range(PROMPT // 4)}
    before = int(engine.retrieval.row_counts(torch.tensor([engine.requests[0].row]))[0, 1])
    for _ in range(STEPS):
        engine.decode(engine.requests)
    told = faults(engine)
    assert told and {(fault.layer, fault.head) for fault in told} == {(LAYER, HEAD)} and {fault.host_page for fault in told} <= damaged
    assert all(fault.found != fault.expected for fault in told)
    assert len(told) <= int(engine.retrieval.row_counts(torch.tensor([engine.requests[0].row]))[0, 1]) - before


@pytest.mark.parametrize("stream", [InlineStream, DeferredStream])
def test_a_page_that_changed_is_told_when_it_is_staged(stream):
    engine = Engine(FULL, prompts=[PROMPT], steps=STEPS, stream=stream)
    engine.extend(engine.requests, [64])
    engine.retrieval.complete_all_transfers()
    host_page = damage(engine, 7)
    engine.extend(engine.requests, [PROMPT])
    assert [(fault.layer, fault.host_page, fault.head) for fault in faults(engine)] == [(LAYER, host_page, HEAD)]


def test_the_count_of_what_was_staged_begins_again():
    """It is an int32 on the device; a busy server comes to its end in two weeks."""
    engine = served()
    engine.retrieval.store.canary.staged = (1 << 31) - 2
    for _ in range(3):
        engine.retrieval.store.staging.sweep(engine.requests[0].pages[:7])
    assert faults(engine) == [] and engine.retrieval.store.canary.staged < 1 << 31


def test_a_sweep_finds_a_page_that_nobody_reads():
    engine = served()
    host_page = damage(engine, 7)
    engine.retrieval.store.staging.sweep(engine.requests[0].pages[:7])
    assert faults(engine) == []
    engine.retrieval.store.staging.sweep(engine.requests[0].pages[: PROMPT // 4])
    assert [(fault.layer, fault.host_page, fault.head) for fault in faults(engine)] == [(LAYER, host_page, HEAD)]


def test_a_page_that_nobody_wrote_is_no_page():
    engine = served()
    engine.retrieval.store.staging.sweep(engine.free_pages[:1])
    assert len(faults(engine)) == LAYERS * HEADS


def test_a_sample_finds_some_of_it():
    found = {}
    for kind in ("sample", "full"):
        engine = served(replace(FULL, canary=kind, tau=2))
        for page in range(PROMPT // 4):
            damage(engine, page)
        for _ in range(2 * STEPS):
            engine.decode(engine.requests)
        found[kind] = len(faults(engine))
    assert 0 < found["sample"] < found["full"] / 4


def test_a_sample_of_prefixes_reaches_every_unit_in_time():
    engine = Engine(replace(FULL, canary="sample"), prompts=[PROMPT], steps=1, stream=InlineStream)
    request, reader, units = engine.requests[0], FaultReader(), set()
    engine.extend([request], [112])
    for page in range(28):
        for layer in range(LAYERS):
            engine.retrieval.host.layers[layer][request.pages[page]] += 1
    for _ in range(150):  # the same prefix, hit again and again
        request.tokens = 112
        engine.extend([request], [PROMPT])
        units |= {fault.unit for fault in reader.read(engine.retrieval.canary.faults)}
    assert units == {(layer, int(page), head) for layer in range(LAYERS) for page in request.pages[:28] for head in range(HEADS)}


def test_each_fault_is_read_once_and_too_many_are_an_end():
    reader, ring = FaultReader(), torch.zeros(1 + MOST_FAULTS, 5, dtype=torch.int32)

    def add(count: int) -> list[int]:
        for _ in range(count):
            ring[1 + int(ring[0, 0]) % MOST_FAULTS] = torch.tensor([0, int(ring[0, 0]) + 1, 0, 0, 0])
            ring[0, 0] += 1
        return [fault.host_page for fault in reader.read(ring)]

    assert add(2) == [1, 2] and add(0) == [] and add(MOST_FAULTS) == list(range(3, MOST_FAULTS + 3)) and add(1) == [MOST_FAULTS + 3]
    with pytest.raises(RuntimeError, match=f"canary: {MOST_FAULTS + 1} units changed .* not to be trusted"):
        add(MOST_FAULTS + 1)
