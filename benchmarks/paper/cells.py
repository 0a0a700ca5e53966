"""A cell of the crossover: prompts that are sent at once to one server, several times, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.paper.capacity import bytes_of
from benchmarks.paper.passes import medians_of, prefix_of
from benchmarks.servers import BenchServer
from benchmarks.tpot import SETTLE_TOKENS, achieved, prompts_of

HIT_PASSES = 8  # over prompts in the tree, for times to the first token, before the passes that all else is measured in


class Cell(NamedTuple):
    """One measurement: distinct prompts sent at once.

    Args:
        context: tokens of a prompt.
        batch: prompts.
        prefix: ``cold`` prompts are computed. ``hit``: they are found in the tree. ``again``: they were sent before, and the server's pools
            say how much of them is found; the largest batch of a context is sent again under this name.
    """

    context: int
    batch: int
    prefix: str

    @property
    def name(self) -> str:
        told = self.prefix == "again" or (self.batch == 1 and self.prefix == "cold")
        return f"{self.context // 1024}k/b{self.batch}{f'-{self.prefix}' if told else ''}"


class Asked(NamedTuple):
    """How each cell is measured.

    Args:
        tokens: new tokens of a request.
        interval: tokens from one message of a stream to the next.
        passes: how often it is measured; its figures are the medians.
    """

    tokens: int
    interval: int
    passes: int


def cells_of(contexts: Sequence[int], batches: Sequence[int], most_tokens: int) -> list[Cell]:
    """For each context the largest batch cold, then smaller ones as hits, and one request cold. One request has any length, and the prompts
    of a larger batch have at most ``most_tokens``."""
    cells = []
    for context in contexts:
        fitting = sorted((batch for batch in set(batches) if batch == 1 or batch * context <= most_tokens), reverse=True)
        if fitting:
            cells.append(Cell(context, fitting[0], "cold"))
            cells += [Cell(context, batch, "hit") for batch in fitting if batch < fitting[0] or batch == 1]
            cells += [Cell(context, 1, "cold")] if fitting[0] > 1 else []
    return cells


def with_second_visits(cells: Sequence[Cell]) -> list[Cell]:
    """``cells``, and behind each cold batch the same prompts again."""
    pairs = ((cell, cell._replace(prefix="again")) for cell in cells)
    return [each for cell, again in pairs for each in ((cell, again) if cell.prefix == "cold" and cell.batch > 1 else (cell,))]


def measure(server: BenchServer, cell: Cell, load: str, facts: dict, asked: Asked, left: Callable[[], float]) -> dict:
    """One cell. A prompt that the server's pool cannot hold is no failure, but a result.

    Args:
        load: of ``LOADS`` or ``BY_PRESET``.
        left: seconds that the next requests may take; it raises when time is up.
    """
    setup, context = server.setup, cell.context // server.setup.scale
    page = setup.page_of(server.system)
    if context + asked.tokens + page >= facts["max_total_num_tokens"]:
        return {"cell": cell._asdict(), "prefix": "no room", "at_once": 0}
    server.set_load(setup.named_load(load, context))
    prompts, firsts = prompts_of(setup, cell.context, cell.batch), []
    if cell.prefix != "cold":
        server.stream_all(prompts, SETTLE_TOKENS, left())  # what is in the tree no longer is computed, and not counted
    if cell.prefix == "hit":
        firsts = [[stream.ttft for stream in server.stream_all(prompts, 2, left())] for _ in range(HIT_PASSES)]
    passes, retractions = [], []
    for _ in range(asked.passes):
        if cell.prefix == "cold":
            server.flush()
        log_begins = len(server.logged())
        passes.append(server.stream_all(prompts, asked.tokens, left(), asked.interval))
        retractions.append(server.retractions(log_begins))
    figures, every = medians_of(passes, firsts), [stream for streams in passes for stream in streams]
    shares = achieved(setup, every)
    return {
        "cell": cell._asdict(),
        "load": load,
        "scale": setup.scale,
        "new_tokens": asked.tokens,
        "prefix": prefix_of(every, page),
        **figures,
        "retractions": max(retractions),
        **{name: shares[name] for name in ("corrected", "missed") if name in shares},
        **bytes_of(setup, server.system, context, figures["window_requests"], shares.get("missed", 0.0)),
    }
