"""Histories in which slots and frames change hands, and the edges that order them: for tests on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch

from engine import CONFIGS, DIM, LAYERS, Engine, Request, expected_step
from sglang_freekv import kernels
from traffic import causal

CONFIG = CONFIGS["tight"]
SHORT, LONG = 40, 152  # prompts: K - 1 pages, so always whole; more than all frames, so partial


class Late:
    """The work that starts late, once ``arm`` was called: the first of that name, or one of a later layer."""

    def __init__(self, name: str, skipped: int = 0) -> None:
        self.name, self.left, self.armed = name, skipped + 1, False

    def arm(self) -> None:
        self.armed = True

    def is_due(self, work: Callable[[], None]) -> bool:
        self.left -= self.armed and self.name in names(work)
        due, self.armed = self.armed and self.left == 0, self.armed and self.left > 0
        return due


def names(work: Callable[[], None]) -> str:
    function = getattr(work, "__wrapped__", work)  # of one that a stream starts late
    function = getattr(function, "func", function)  # of a partial
    return f"{function.__qualname__} {function.__name__}"


class Hands(Engine):
    """An engine whose requests come and go. What it computes is held against the paper's loops when all is over, as ``is_right``.

    Args:
        lendable: frames but for those of the padding row.
        late: what a history arms.
    """

    def __init__(self, stream, lendable: int, late: Late, device: str = "cpu") -> None:
        super().__init__(CONFIG, [], 0, stream, device=device, resident=lendable - 8 * CONFIG.cache_pages)
        self.late, self.stream, self.running, self.told = late, stream, [], []

    def used_rows(self) -> set[int]:
        return {request.row for request in self.running}

    def held_pages(self) -> int:
        return len({page for request in self.running for page in request.pages.tolist()})

    def come(self, prompt: int, row: int, like: Request | None = None, alike: int = 0, pages: int = 0) -> Request:
        """A request whose first ``alike`` tokens are those of another, of which it has the first ``pages``."""
        request = self.admit(prompt, prompt + 8, row)
        if like is not None:
            for ours, theirs in zip((request.q, request.k, request.v), (like.q, like.k, like.v)):
                ours[:, :alike] = theirs[:, :alike]
            self.take_pages(request, like, pages)
        request.tokens = pages * CONFIG.page_size
        self.running.append(request)
        return request

    def take_pages(self, request: Request, other: Request, count: int) -> None:
        request.pages = torch.cat((other.pages[:count], request.pages[count:]))

    def prefill(self, request: Request) -> None:
        start = request.tokens
        outputs = self.extend([request], [request.prompt])
        self.told += [(causal(request, layer, start, request.prompt), output) for layer, output in enumerate(outputs)]

    def step(self, request: Request) -> None:
        outputs = self.decode([request])
        self.told += [(expected_step(self.config, request, layer)[0], output) for layer, output in enumerate(outputs)]

    def is_right(self) -> bool:
        for layer in range(LAYERS):
            self.retrieval.complete_transfers(layer)
        return all(
            torch.allclose(output.cpu().reshape(-1, DIM), expected.reshape(-1, DIM), atol=2e-5, rtol=2e-5) for expected, output in self.told
        )


def slots_become_frames(engine: Hands) -> None:
    """A partial request ends while a recall ahead for its slots is in flight. They are the frames of a whole one."""
    first = engine.come(LONG, row=1)
    engine.prefill(first)
    engine.step(first)
    engine.late.arm()
    engine.step(first)
    engine.running.remove(first)
    second = engine.come(SHORT, row=2)
    engine.prefill(second)
    engine.step(second)


def pages_are_given_up_and_come_back(engine: Hands) -> None:
    """A request ends, and its pages lose their frames to the next one. A third one has them as its prefix."""
    first = engine.come(SHORT, row=1)
    engine.late.arm()
    engine.prefill(first)
    engine.running.remove(first)
    second = engine.come(SHORT, row=2)
    engine.prefill(second)
    engine.running.remove(second)
    third = engine.come(SHORT, row=3, like=first, alike=SHORT - 4, pages=SHORT // 4 - 1)
    engine.prefill(third)
    engine.step(third)


def pages_are_given_up_layer_by_layer(engine: Hands) -> None:
    """The same history, with host copies that each layer begins."""
    engine.retrieval.closing = None
    pages_are_given_up_and_come_back(engine)


def a_table_gets_absent_pages(engine: Hands) -> None:
    """A whole request computes the text of a partial one. SGLang gives it the pages of that one, which were staged and have no frames.

    It is refilled in frames of an earlier one: its own have the same text.
    """
    earlier = engine.come(SHORT, row=3)
    engine.prefill(earlier)
    engine.running.remove(earlier)
    whole = engine.come(SHORT, row=1)
    engine.prefill(whole)
    partial = engine.come(LONG, row=2, like=whole, alike=SHORT)
    engine.late.arm()
    engine.prefill(partial)
    engine.take_pages(whole, partial, SHORT // 4)
    engine.step(whole)
    engine.step(whole)


def a_step_follows_an_extend_in_place(engine: Hands) -> None:
    """A whole request is seeded in all layers together, behind the last one, by digests that are made there."""
    request = engine.come(SHORT, row=1)
    engine.late.arm()
    engine.prefill(request)
    engine.step(request)
    engine.step(request)


def staged_pages_are_kept(engine: Hands) -> None:
    """A whole request is staged, and its pages get frames."""
    engine.may_extend_in_place = lambda: False
    request = engine.come(SHORT, row=1)
    engine.late.arm()
    engine.prefill(request)
    engine.step(request)


def without_waiting_for(name: str) -> Callable[[Hands], None]:
    """A pass begins though works of that name, of passes before, are in flight."""

    def remove(engine: Hands) -> None:
        in_flight = engine.retrieval.in_flight

        def wait_for_others() -> None:
            for handle in (handle for handles in in_flight for handle in handles if name not in names(handle.work)):
                handle.wait()

        engine.retrieval.complete_all_transfers = wait_for_others

    return remove


def seeding_beside_the_step(engine: Hands) -> None:
    """A step begins while its rows are seeded, on a stream that it is not behind. A captured step is behind no stream but main."""
    without_waiting_for(CLOSE)(engine)
    selection, beside = engine.retrieval.streams.selection, engine.stream()
    submit = selection.submit
    selection.submit = lambda work, behind=None: (beside.submit if CLOSE in names(work) else submit)(work, behind)


def without_waiting_for_absent_pages(engine: Hands) -> None:
    """An extend in place attends before the pages of its prefix are there."""
    in_place, stream, kept = engine.retrieval.store.in_place, engine.retrieval.store.in_place._stream, []

    def unawaited(*arguments):
        kept.append(stream(*arguments))
        return mock.Mock()

    in_place._stream = unawaited


def refilling_beside_the_step(engine: Hands) -> None:
    """A step reads frames that are refilled on another stream."""
    in_place, refill, kept = engine.retrieval.store.in_place, engine.retrieval.store.in_place.refill, []
    in_place.refill = lambda *pages: kept.append(engine.retrieval.streams.transfers.submit(lambda: refill(*pages)))


def keeping_pages_beside_the_extend(engine: Hands) -> None:
    """A step reads frames to which staged pages are copied on another stream, one that nothing else waits for."""
    extend, fill, beside, kept = engine.retrieval.extend, kernels.fill_frames, engine.stream(), []

    def fill_beside(*arguments, **into) -> None:
        kept.append(beside.submit(lambda: fill(*arguments, **into)))

    def extend_with(*arguments) -> torch.Tensor:
        with mock.patch.object(kernels, "fill_frames", fill_beside):
            return extend(*arguments)

    engine.retrieval.extend = extend_with


class Handover(NamedTuple):
    """A history, the lendable frames that it needs, the name of the work that an edge orders and the layers ahead of it that may be in
    time, and what removes the edge."""

    history: Callable[[Hands], None]
    lendable: int
    late: str
    skipped: int
    remove_edge: Callable[[Hands], None]

    def make(self, stream, device: str = "cpu") -> Hands:
        """``stream`` makes a stream of a ``Late``."""
        late = Late(self.late, self.skipped)
        return Hands(lambda: stream(late), self.lendable, late, device)


OFFLOAD, RECALL, CLOSE = "Retrieval.extend.<locals>.<lambda>", "recall_ahead", "Closing.run"
ALL_COPIES = "Closing.offload"
FEW, MORE, LAST = 14, 36, LAYERS - 1  # frames: one request fits; a whole one, the pages of another, and slots
HANDOVERS = {
    "recall ahead to slots": Handover(slots_become_frames, FEW, RECALL, LAST, without_waiting_for(RECALL)),
    "offload from frames": Handover(pages_are_given_up_and_come_back, FEW, ALL_COPIES, 0, without_waiting_for(ALL_COPIES)),
    "offload from frames, layer by layer": Handover(pages_are_given_up_layer_by_layer, FEW, OFFLOAD, LAST, without_waiting_for(OFFLOAD)),
    "absent pages in place": Handover(
        pages_are_given_up_and_come_back, FEW, "PrefixStream._stream.<locals>.<lambda>", 0, without_waiting_for_absent_pages
    ),
    "offload of pages that refill": Handover(a_table_gets_absent_pages, MORE, OFFLOAD, LAST, without_waiting_for(OFFLOAD)),
    "refill": Handover(a_table_gets_absent_pages, MORE, refilling_beside_the_step.__name__, 0, refilling_beside_the_step),
    "seeding in place": Handover(a_step_follows_an_extend_in_place, FEW, CLOSE, 0, seeding_beside_the_step),
    "staged pages to frames": Handover(
        staged_pages_are_kept, FEW, keeping_pages_beside_the_extend.__name__, 0, keeping_pages_beside_the_extend
    ),
}
