"""What passes do to the frames of running requests, counted for tests that have to see each of it."""

from __future__ import annotations

from collections import Counter

from engine import Engine, Request


class Watch:
    """``with watch:`` a pass of ``engine``, of which ``saw`` counts what happened to rows and frames."""

    def __init__(self, engine: Engine, saw: Counter) -> None:
        self.engine, self.saw, self.lending, self.frames = engine, saw, engine.residency.lending, engine.residency.frames
        self.running: dict[int, Request] = {}  # of each row, in the last pass

    def __enter__(self) -> None:
        self.running = dict(self.engine.owners)
        self.whole, self.partial = set(self.lending.pages), set(self.lending.partial)
        self.held = {row: self._held(row) for row in self.partial}
        self.counts, self.in_place, self.extended = self.frames.counts, self.engine.in_place, self.engine.residency.extended

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            return
        owners, counts = self.engine.owners, self.frames.counts
        same = {row for row, owner in owners.items() if self.running.get(row) is owner}
        self.saw["rows made partial"] += len(self.whole & self.lending.partial & same)
        self.saw["rows of partial requests taken by whole ones"] += len(self.partial & self.lending.pages.keys() - same)
        self.saw["pages given up"] += counts.given_up - self.counts.given_up
        self.saw["pages of partial rows given up"] += sum(len(self.held[row] - self._held(row)) for row in self.partial & same)
        extends = self.engine.residency.extended > self.extended
        kind = "in place" if self.engine.in_place > self.in_place else "staged" if extends else "refilled"
        self.saw[f"{kind} pages brought"] += counts.brought - self.counts.brought

    def _held(self, row: int) -> set[int]:
        """The full pages of a row that have frames."""
        request = self.running.get(row)
        full = [] if request is None else request.pages[: request.tokens // self.frames.page_size]
        return {page for page in full if self.frames.tables.frame_of[page] >= 0}
