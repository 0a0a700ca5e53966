"""The retrieval engine against what the papers say written as loops, on random tensors: any lengths, any order of transfers."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations, cycle, product
from types import SimpleNamespace

import pytest
import torch

from covering import covering
from edges import without_waiting_for_the_last_step
from engine import CONFIGS, HEADS, LAYERS, Engine, Request, attend, choose, expected_step, others_answers
from sglang_freekv import kernels
from sglang_freekv.config import FreeKVConfig
from sglang_freekv.decode_step import plans_ahead_first
from sglang_freekv.digests import Boxes
from sglang_freekv.kernels import CORRECTED, RECALLED, reference_plan
from sglang_freekv.kernels.candidates import Tables
from sglang_freekv.memory_pool.reclaim import reclaim
from sglang_freekv.memory_pool.transfer import InlineStream
from sglang_freekv.retrieval import Retrieval

torch.set_num_threads(1)


class DeferredStream:
    """Runs work as late as its handles allow, where ``InlineStream`` runs it as early as possible."""

    def __init__(self) -> None:
        self.queue = []

    def submit(self, work, behind=None):
        self.queue.append(work)
        return _Deferred(self, work)

    def mark(self):
        return _Deferred(self, None)


class _Deferred:
    def __init__(self, stream: DeferredStream, work) -> None:
        self.stream, self.work = stream, work

    def wait(self) -> None:
        while any(work is self.work for work in self.stream.queue):
            self.stream.queue.pop(0)()


_KINDS = cycle((InlineStream, DeferredStream, InlineStream))  # an engine makes three: of selection, appends and transfers


def late_appends():
    """Of an engine's streams that of appends does its work as late as it may: behind a correction and the attention to what it brings."""
    return next(_KINDS)()


STREAMS = {"at once": InlineStream, "late": DeferredStream, "appends late": late_appends}
MEMORY = {  # prompts, and frames beyond the slots
    "ahead before attention": ([5, 64, 99], 0),
    "ahead behind attention": ([64, 99], 0),
    "some resident, ahead before attention": ([5, 64, 99], 20),
    "all resident, ahead behind attention": ([64, 99], 400),
}


@pytest.mark.parametrize("config, memory, stream", covering(CONFIGS, MEMORY, STREAMS))
def test_decode_follows_the_paper(config, memory, stream):
    prompts, resident = memory
    assert plans_ahead_first(len(prompts)) == (len(prompts) == 3)
    engine = Engine(config, prompts=prompts, steps=17, stream=stream, resident=resident)
    engine.extend(engine.requests, [request.prompt for request in engine.requests])
    assert engine.in_place or resident < 400
    corrected = [0] * len(engine.requests)
    for _ in range(17):
        outputs = engine.decode(engine.requests)
        for layer, output in enumerate(outputs):
            for index, request in enumerate(engine.requests):
                expected, flagged = expected_step(config, request, layer)
                corrected[index] += flagged
                torch.testing.assert_close(output[index].view_as(expected), expected, atol=1e-5, rtol=1e-5)
    for index, request in enumerate(engine.requests):
        assert engine.retrieval.row_counts(torch.tensor([request.row]))[0, CORRECTED] == corrected[index]
    assert resident < 400 or not engine.retrieval.counts[:, RECALLED].any()
    tau = math.inf if config.tau is None else config.tau
    assert any(corrected) == (tau > -1)
    if tau > 1:
        assert corrected == [17 * LAYERS * HEADS] * len(corrected)


def _marked_by_slots(tables: Tables, rows: torch.Tensor, num_pages: int) -> torch.Tensor:
    in_slots = tables.slot_pages[rows]
    marks = torch.zeros((*in_slots.shape[:2], num_pages + 1), dtype=torch.bool)
    return marks.scatter_(2, in_slots.where(in_slots >= 0, num_pages).long(), True)[..., :num_pages]


def attended_with(resident: int, config: str, prompts: list[int], steps: int) -> torch.Tensor:
    """The pages that each kv head attends to, step by step."""
    engine = Engine(CONFIGS[config], prompts=prompts, steps=steps, stream=InlineStream, resident=resident)
    engine.extend(engine.requests, [request.prompt for request in engine.requests])
    rows, pages = torch.tensor([request.row for request in engine.requests]), []
    for _ in range(steps):
        engine.decode(engine.requests)
        engine.retrieval.complete_all_transfers()
        pages.append(torch.stack([layer.tables.pages(rows).sort().values for layer in engine.retrieval.cache.layers]))
    return torch.stack(pages)


@pytest.mark.parametrize("by", ["last selection", "slots"])
def test_memory_has_no_say_in_hysteresis(by, monkeypatch):
    """Whatever is resident, the same pages are selected. The negative control favours what is in slots, which is not always selected."""
    if by == "slots":
        monkeypatch.setattr(Tables, "marked", _marked_by_slots)
    seen = [attended_with(resident, "hysteresis-slack-max-pooling", [64, 99], steps=17) for resident in (0, 20, 400)]
    assert [torch.equal(seen[0], other) for other in seen[1:]] == [by == "last selection"] * 2


def test_hysteresis_saves_recalls():
    recalled = []
    for name in ("tight", "hysteresis"):
        engine = Engine(CONFIGS[name], prompts=[5, 64, 99], steps=17, stream=InlineStream)
        engine.run(steps=17)
        recalled.append(int(engine.retrieval.counts[:, RECALLED].sum()))
    assert 0 < recalled[1] < recalled[0]


def _remembering_every_query(monkeypatch) -> None:
    compare = kernels.needs_correction

    def comparing(queries, rows, previous, *args, **options):
        corrected = compare(queries, rows, previous, *args, **options)
        previous[rows] = queries
        return corrected

    monkeypatch.setattr(kernels, "needs_correction", comparing)


def _planning_without_scores(monkeypatch) -> None:
    candidates = Retrieval.candidates
    monkeypatch.setattr(Retrieval, "candidates", lambda *args: candidates(*args)._replace(on_turn=False))


def _scoring_nobody_at_a_page_boundary(monkeypatch) -> None:
    monkeypatch.setattr(reference_plan, "due", lambda seq_lens, *sizes: torch.zeros_like(seq_lens, dtype=torch.bool))


BREAKS = [None, _remembering_every_query, _planning_without_scores, _scoring_nobody_at_a_page_boundary]


@pytest.mark.parametrize("prompts", [[5, 64, 99], [64, 99]], ids=["ahead before attention", "ahead behind attention"])
@pytest.mark.parametrize("breaks", BREAKS)
def test_what_a_selection_on_turn_needs(breaks, prompts, monkeypatch):
    """The negative controls of following the paper's rule on turn."""
    if breaks is not None:
        breaks(monkeypatch)
    engine = Engine(CONFIGS["on-turn"], prompts, steps=17, stream=InlineStream)
    engine.extend(engine.requests, prompts)
    found, expected = [], []
    for _ in range(17):
        found += [output.view(len(prompts), -1) for output in engine.decode(engine.requests)]
        for layer in range(LAYERS):
            expected.append(torch.stack([expected_step(engine.config, request, layer)[0].flatten() for request in engine.requests]))
    assert torch.allclose(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5) == (breaks is None)


def test_memory_has_no_say_in_what_is_selected_on_turn():
    seen = [attended_with(resident, "on-turn-two-bit-slack", [99, 150], steps=33) for resident in (0, 20, 400)]
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_selecting_on_turn_scores_and_recalls_less(monkeypatch):
    """Kv heads that are not corrected score where the next token begins a page, all of a row together."""
    masks, score = [], Boxes.score

    def watch(self, queries, digests, batch, scale, selects=None):
        masks.append((batch.seq_lens.clone(), selects))
        return score(self, queries, digests, batch, scale, selects)

    monkeypatch.setattr(Boxes, "score", watch)
    recalled = {}
    for name in ("tight", "on-turn", "on-turn-never-corrected"):
        masks.clear()
        engine = Engine(CONFIGS[name], prompts=[64, 99], steps=17, stream=InlineStream)
        engine.run(steps=17)
        steps = masks[-17 * LAYERS :]
        recalled[name] = int(engine.retrieval.counts[:, RECALLED].sum())
        for seq_lens, selects in steps:
            assert (selects is None) == (name == "tight")
            assert selects is None or selects[seq_lens % 4 == 0].all()
            assert name != "on-turn-never-corrected" or not selects[seq_lens % 4 != 0].any()
    assert recalled["on-turn-never-corrected"] < recalled["on-turn"] < recalled["tight"]


@pytest.mark.parametrize("stream", [InlineStream, DeferredStream])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["quest", "arkvale", "arkvale-slack"])
def test_a_method_that_corrects_always_recalls_once(name, seed, stream):
    """What its own query wants is recalled before attention. Where the next token begins a page, what is selected for that by the same
    scores is there: of the pages that compete only the one that leaves the window is new, and it is resident."""
    config = CONFIGS[name]
    engine = Engine(config, prompts=[5, 64, 99], steps=33, stream=stream, seed=seed)
    engine.extend(engine.requests, [request.prompt for request in engine.requests])
    engine.retrieval.complete_all_transfers()
    for layer, head in product(range(LAYERS), range(HEADS)):
        cache = engine.retrieval.cache.layers[layer]
        for request in engine.requests:
            listed = cache.attended[request.row, head].long()
            n, pages = request.prompt, -(-(request.prompt + 1) // config.page_size)
            fixed = {page for page in range(pages) if page < config.pages.sink or page >= pages - config.pages.window}
            seeded = cache.slot_pages[request.row, head, listed[listed >= 0]].tolist()
            assert set(seeded) == fixed | choose(config, request, layer, head, n - 1, n + 1)
    for _ in range(33):
        outputs = engine.decode(engine.requests)
        for layer, output in enumerate(outputs):
            for index, request in enumerate(engine.requests):
                expected, _ = expected_step(config, request, layer)
                torch.testing.assert_close(output[index].view_as(expected), expected, atol=1e-5, rtol=1e-5)
        engine.retrieval.complete_all_transfers()
        assert not any(misses.recalled[0] for misses in engine.retrieval.misses_ahead)
    assert engine.retrieval.counts[:, RECALLED].sum() > 0


def test_methods_attend_to_different_pages():
    quest = CONFIGS["quest"]
    configs = [quest, dataclasses.replace(quest, method="arkvale", digest=None, pooling=None), CONFIGS["always-corrected"]]
    outputs = [Engine(config, [99], 4, InlineStream).run(4) for config in configs]
    assert not any(torch.allclose(one, other) for one, other in combinations(outputs, 2))


@pytest.mark.parametrize("budget, dense_below", [(108, 0), (112, 0), (400, 0), (40, 108), (40, 400)])
def test_a_budget_or_a_limit_that_covers_the_context_is_dense(budget, dense_below):
    """Below the limit all pages have frames, of which there are more than the slots of a row."""
    sizes = {"budget_tokens": budget, "dense_below_tokens": dense_below, "sink_tokens": 8, "window_tokens": 8, "page_size": 4}
    config = FreeKVConfig(**sizes, tau=0.9, dense_layers=())
    engine = Engine(config, prompts=[3, 87], steps=20, stream=InlineStream, resident=400 if dense_below else 0)
    outputs = engine.run(steps=20)
    for step, layer in [(0, 0), (1, 2), (8, 1), (19, 2)]:
        for index, request in enumerate(engine.requests):
            n = request.prompt + step + 1
            dense = torch.cat([attend(request, layer, head, n - 1, list(range(n))) for head in range(HEADS)])
            torch.testing.assert_close(outputs[step, layer, index].view_as(dense), dense, atol=1e-5, rtol=1e-5)
    assert engine.retrieval.counts[:, RECALLED].sum() == 0


@pytest.mark.parametrize("cache, recalls", [(40, True), (64, True), (120, False)])
def test_slack_saves_recalls_and_a_request_that_fits_needs_none(cache, recalls):
    recalled = {}
    for tokens in (40, cache):
        config = dataclasses.replace(CONFIGS["tight"], device_cache_tokens=tokens)
        engine = Engine(config, prompts=[5, 64, 99], steps=17, stream=InlineStream)
        engine.run(steps=17)
        recalled[tokens] = int(engine.retrieval.counts[:, RECALLED].sum())
    assert (recalled[cache] > 0) == recalls and (cache == 40 or recalled[cache] < recalled[40])


@pytest.mark.parametrize("name", ["budget_tokens", "dense_below_tokens"])
def test_a_budget_or_a_limit_one_page_short_is_not_dense(name):
    short, long = (
        Engine(
            FreeKVConfig(**{"budget_tokens": 40, name: tokens}, sink_tokens=8, window_tokens=8, page_size=4, dense_layers=()),
            *([87], 20, InlineStream),
            resident=400,
        ).run(steps=20)
        for tokens in (104, 108)
    )
    assert torch.equal(short[:17], long[:17])
    assert not torch.allclose(short[17], long[17])


def test_a_context_that_does_not_fit_its_slots_attends_to_the_budget():
    """Its pages are absent, and more than the slots of a row. A limit that covers it, or none, makes no difference."""
    within, without = (
        Engine(dataclasses.replace(CONFIGS["tight"], dense_below_tokens=tokens), [64, 99], 8, DeferredStream).run(steps=8)
        for tokens in (400, 0)
    )
    assert torch.equal(within, without)


@pytest.mark.parametrize("chunks", [[48, 100], [4, 8, 12, 100], [96, 100]])
def test_chunks_and_prefix_hits_leave_no_trace(chunks):
    config = CONFIGS["tight"]
    whole, parts = (Engine(config, prompts=[100], steps=16, stream=DeferredStream) for _ in range(2))
    whole.extend(whole.requests, [100])
    for end in chunks:
        parts.extend(parts.requests, [end])
    for _ in range(16):
        for expected, actual in zip(whole.decode(whole.requests), parts.decode(parts.requests)):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_a_prefix_is_shared_by_pages_and_a_row_is_handed_on():
    config = CONFIGS["tight"]
    engine = Engine(config, prompts=[100], steps=16, stream=DeferredStream)
    engine.run(steps=16)
    first = engine.requests[0]
    second = Request(100, 116, first.row, torch.cat((first.pages[:20], engine.free_pages[:10])), engine.generator, tokens=80)
    second.q, second.k, second.v = first.q, first.k, first.v  # the same text, found in the tree; the same row, just freed
    fresh = Engine(config, prompts=[100], steps=16, stream=InlineStream)
    engine.extend([second], [100])
    fresh.extend(fresh.requests, [100])
    for _ in range(16):
        for expected, actual in zip(fresh.decode(fresh.requests), engine.decode([second])):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_recall_after_offload_is_bit_exact():
    engine = Engine(CONFIGS["tight"], prompts=[100], steps=24, stream=DeferredStream)
    engine.run(steps=24)
    request, retrieval = engine.requests[0], engine.retrieval
    for layer in range(LAYERS):
        retrieval.complete_transfers(layer)
        cache = retrieval.cache.layers[layer]
        slot_pages = cache.slot_pages[request.row]
        for head in range(HEADS):
            for slot, page in enumerate(slot_pages[head].tolist()):
                if 0 <= page < request.tokens // 4:
                    here = slice(page * 4, page * 4 + 4)
                    unit = retrieval.host.layers[layer][request.pages[page], head]
                    resident = cache.keys[cache.row_frames[request.row, slot].long(), :, head]
                    assert torch.equal(unit[0], request.k[layer, here, head]) and torch.equal(unit[1], request.v[layer, here, head])
                    assert torch.equal(resident, request.k[layer, here, head])


@pytest.mark.parametrize("fills_page", [True, False])
@pytest.mark.parametrize("then", ["extend", "step without a graph"])
def test_prefixes_come_beside_the_last_pass_only_if_that_is_a_graph_that_fills_no_page(fills_page, then):
    engine = Engine(CONFIGS["tight"], prompts=[100], steps=16, stream=InlineStream)
    retrieval, behind = engine.retrieval, []
    begin = retrieval.store.staging.begin
    retrieval.store.staging.begin = lambda tokens, prefixes, points: (behind.append(points), begin(tokens, prefixes, points))

    def extend(upto: int) -> bool:
        engine.planner.note_tables(torch.tensor([engine.requests[0].row]))
        engine.extend(engine.requests, [upto])
        return behind[-1] is not None

    assert not extend(48), "nothing came before"
    assert not extend(64), "an extend came before, which uses the same buffers"
    engine.prepare_replay(fills_page)
    if then == "extend":
        assert extend(80) == (not fills_page)
        assert not extend(100), "the graph is the last pass but one"
    else:
        engine.decode(engine.requests)
        engine.requests[0].tokens = 64
        assert not extend(100)


@pytest.mark.parametrize("resident", [0, 400], ids=["none resident", "all resident"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_request_that_overflows_changes_no_other(config, resident):
    engines = [Engine(config, [64, 99, 48], 12, InlineStream, resident=resident) for _ in range(2)]
    expected, found = (others_answers(engine, 12, overflows) for engine, overflows in zip(engines, (False, True)))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


def test_the_digest_check_tells_corruption_from_nan():
    engine = Engine(CONFIGS["tight"], prompts=[100], steps=8, stream=InlineStream)
    engine.run(steps=8)
    store, policy = engine.retrieval.store, engine.retrieval.policy
    pages = engine.requests[0].pages[:25]
    store.host.layers[1][pages[3], 0, 0, 2] = store.digests.layers[1][pages[3], 0] = torch.nan  # a model that overflowed
    store.check_integrity(pages, policy)
    store.host.layers[1][pages[7], 1, 0, 2, 5] += 100
    with pytest.raises(RuntimeError, match="retrieval layer 1: 1 of 25 pages"):
        store.check_integrity(pages, policy)


@pytest.mark.parametrize("damage", ["a page twice", "different numbers", "empty slot", "page attended to twice", "padding page"])
def test_broken_invariants_are_found(damage):
    engine = Engine(CONFIGS["tight"], prompts=[100], steps=8, stream=InlineStream)
    engine.run(steps=8)
    store, row = engine.retrieval.store, engine.requests[0].row
    store.check_integrity(engine.requests[0].pages[:25], engine.retrieval.policy)
    cache = store.cache.layers[0]
    if damage == "padding page":
        store.host.layers[2][0, 0, 1, 2, 3] = 1
    elif damage == "a page twice":
        cache.slot_pages[row, 1, 4] = cache.slot_pages[row, 1, 5]
    elif damage == "empty slot":
        cache.slot_pages[row, 1, 4] = -1
    elif damage == "page attended to twice":
        cache.attended[row, 1, 4] = cache.attended[row, 1, 5]
    else:
        cache.attended[row, 1, 9] = -1
    with pytest.raises(RuntimeError, match=damage):
        store.check_integrity(engine.requests[0].pages[:25], engine.retrieval.policy)


def _without_waiting_for_staging(retrieval: Retrieval) -> None:
    staging, stream = retrieval.store.staging, retrieval.store.staging._stream

    def stream_unordered(layer: int, behind=None):
        stream(layer, behind)
        return type("Ignored", (), {"wait": lambda self: None})()

    staging._stream = stream_unordered


def test_only_absent_pages_of_a_prefix_are_streamed():
    """And a step may begin when they have arrived: the negative control does without that wait."""
    outputs = []
    for broken in (False, True):
        config = CONFIGS["tight" if broken else "canary"]  # a canary's queue would wait for what is streamed
        engine = Engine(config, prompts=[100], steps=16, stream=DeferredStream, resident=400)
        in_place, stream = engine.retrieval.store.in_place, engine.retrieval.store.in_place._stream
        if broken:
            in_place._stream = lambda layer, behind=None, stream=stream: (stream(layer, behind), SimpleNamespace(wait=lambda: None))[1]
        engine.extend(engine.requests, [48])
        engine.retrieval.complete_all_transfers()
        frames = engine.residency.frames
        reclaim(frames.tables, frames.now + 1, frames.num_frames, 0)  # all pages give up their frames
        for layer in engine.retrieval.cache.layers:
            layer.keys.zero_()
        parts, streamed = [], []
        for upto in (80, 100):
            parts += engine.extend(engine.requests, [upto])
            engine.retrieval.complete_all_transfers()
            streamed.append(int((in_place.staged.host_pages >= 0).sum()))
        assert streamed == [12, 0] and engine.in_place == 3
        outputs.append(torch.cat([*parts, *(part for _ in range(16) for part in engine.decode(engine.requests))]))
        assert broken or not engine.retrieval.canary.faults.any()
    assert not torch.equal(*outputs)
    whole = Engine(config, prompts=[100], steps=16, stream=InlineStream)
    expected = whole.extend(whole.requests, [100])
    expected = [*(part[48:80] for part in expected), *(part[80:] for part in expected)]
    expected += [part for _ in range(16) for part in whole.decode(whole.requests)]
    torch.testing.assert_close(outputs[0], torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prompts", [[57], [100], [99, 64, 30]], ids=["few pages", "a size that is recorded", "padded to one"])
@pytest.mark.parametrize("config", ["tight", "two-bit", "louiskv"])
def test_a_short_extend_in_place_closes_all_layers_together(config, prompts):
    """As layer by layer, and before the first step: the negative control does without that wait."""
    outputs, tables, kept = [], [], []
    for how in ("together", "layer by layer", "nobody waits"):
        engine = Engine(CONFIGS[config], prompts=prompts, steps=6, stream=DeferredStream, resident=400)
        if how == "layer by layer":
            engine.retrieval.closing = None
        engine.extend(engine.requests, prompts)
        assert engine.in_place == 1
        if how == "nobody waits":
            engine.retrieval.in_flight[-1].clear()
        else:
            engine.retrieval.complete_all_transfers()
            tables.append(torch.stack([layer.tables.pages(torch.arange(9)) for layer in engine.retrieval.cache.layers]))
            kept.append(torch.stack([*engine.retrieval.digests.layers]).view(torch.uint8))
            kept.append(torch.stack([*engine.retrieval.host.layers]).view(torch.uint8))
        outputs.append(torch.stack([torch.stack(engine.decode(engine.requests)) for _ in range(6)]))
    assert torch.equal(*kept[::2]) and torch.equal(*kept[1::2]) and kept[1].any()
    assert torch.equal(*tables) and torch.equal(*outputs[:2]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("remove_edge", [without_waiting_for_the_last_step, _without_waiting_for_staging])
def test_a_removed_edge_is_caught(remove_edge):
    """The negative control of the deferred stream: without one of the waits the outputs must differ."""
    config = CONFIGS["tight"]
    outputs = []
    for broken in (False, True):
        engine = Engine(config, prompts=[100], steps=16, stream=DeferredStream)
        if broken:
            remove_edge(engine.retrieval)
        engine.extend(engine.requests, [48])
        second_chunk = torch.stack(engine.extend(engine.requests, [100]))
        outputs.append((second_chunk, torch.stack([torch.stack(engine.decode(engine.requests)) for _ in range(16)])))
    assert not all(torch.equal(good, bad) for good, bad in zip(*outputs))
