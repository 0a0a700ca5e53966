# SPDX-License-Identifier: Apache-2.0
"""Lending: which running requests are whole, which have slots, and who is admitted, so that frames suffice.

A running request is *whole* if every page of its context has a frame of its own; it needs no slots. It is *partial* if it has slots, and
its pages may lose their frames. All is decided from counts and lengths, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


class Lending:
    """The accounts of the frames that running requests need.

    Whoever is admitted is promised frames: for its longest context if that is short, else for ``most_whole`` pages, and one in hand. A row
    with more pages than that is made partial when frames run short, and then needs no more than it was promised. So all promises together
    bound what all rows need, whatever the requests share.

    Args:
        frames: frames that rows may have.
        slots: C, slots of a partial row. It also needs a frame for the page of its last token, which may not be on the host yet.
        most_whole: K, pages up to which a row is always whole; more than ``slots``.
        resident: whether pages may stay resident. If not, every row is partial from the start, and has nothing in hand.
    """

    def __init__(self, frames: int, slots: int, most_whole: int, *, resident: bool = True) -> None:
        self.frames, self.slots, self.most_whole, self.resident = frames, slots, most_whole, resident
        self.pages: dict[int, int] = {}  # of each whole row
        self.partial: set[int] = set()
        self.promised: dict[int, int] = {}  # to each row

    def promise(self, pages: int) -> int:
        """Frames that a request needs at most whose longest context has so many ``pages``."""
        return min(pages, self.most_whole) + 1 if self.resident else self.slots

    def admits(self, others: Iterable[int], pages: int) -> bool:
        """Whether a request whose longest context has ``pages`` may run beside rows and requests that were promised ``others``."""
        return sum(others) + self.promise(pages) <= self.frames

    def begin(self, row: int, pages: int) -> None:
        """A request whose longest context has ``pages`` takes a row."""
        self.end((row,))
        self.pages[row], self.promised[row] = 0, self.promise(pages)

    def end(self, rows: Iterable[int]) -> None:
        """The requests of ``rows`` ended, or were retracted."""
        for row in rows:
            self.partial.discard(row)
            self.pages.pop(row, None)
            self.promised.pop(row, None)

    def grow(self, batch: Iterable[tuple[int, int]], held: int) -> list[int]:
        """Note the pages of each row of a batch, and make rows partial until frames suffice.

        Args:
            batch: (row, pages of its context) of each request.
            held: distinct pages that requests have, at most.

        Returns:
            The rows that became partial, the longest first.

        Raises:
            RuntimeError: frames do not suffice even so, which no promise allows.
        """
        pages = self.pages
        for row, length in batch:
            if row in pages:
                pages[row] = length
        chosen, load = self._give_way(pages, len(self.partial), held)
        if load > self.frames:
            raise RuntimeError(
                f"frames: {len(pages)} whole and {len(self.partial)} partial requests need {load}, expected at most {self.frames}, which "
                "were promised to them; please report this"
            )
        for row in chosen:
            del pages[row]
        self.partial.update(chosen)
        return chosen

    def keeps_whole(self, batch: Mapping[int, int], held: int, free: Collection[int] = ()) -> bool:
        """Whether all rows of a batch will be whole when it runs.

        Args:
            batch: pages of each row; requests without a row have numbers above those of rows.
            held: as for ``grow``.
            free: rows whose requests have ended since.
        """
        if not self.partial.isdisjoint(batch):
            return False
        pages = {row: length for row, length in self.pages.items() if row not in free} | dict(batch)
        return batch.keys().isdisjoint(self._give_way(pages, len(self.partial.difference(free)), held)[0])

    def _give_way(self, pages: Mapping[int, int], partial: int, held: int) -> tuple[list[int], int]:
        """Which of the whole rows have to become partial beside so many ``partial`` ones, and the frames that all rows then need.

        The longest give way, because they free most.
        """
        hands = partial + len(pages)
        if not self.resident:
            return sorted(pages), self.slots * hands
        total, needs = sum(pages.values()), self.slots + 1
        chosen: list[int] = []
        load = min(held, total) + needs * partial + hands
        if load > self.frames:
            for length, row in sorted(((length, row) for row, length in pages.items() if length > self.most_whole), reverse=True):
                chosen.append(row)
                total, partial = total - length, partial + 1
                load = min(held, total) + needs * partial + hands
                if load <= self.frames:
                    break
        return chosen, load
