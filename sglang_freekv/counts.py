# SPDX-License-Identifier: Apache-2.0
"""Counts of retrieval, for a request and for the engine, over the retrieval layers and the kv heads of one rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from sglang_freekv.config import FreeKVConfig


@dataclass
class RetrievalCounts:
    """Counts of decode steps. A unit is one (page, kv head) of one layer.

    Args:
        decode_steps: tokens decoded.
        correction_decisions: kv heads of a layer whose query a step compared with an earlier one.
        corrections: corrected kv heads of a layer: they selected and recalled before they attended.
        selected_units: units that were selected.
        recalled_units: selected units that were missing on the device, and were copied from the host pool.
    """

    decode_steps: int = 0
    correction_decisions: int = 0
    corrections: int = 0
    selected_units: int = 0
    recalled_units: int = 0

    def add(self, other: RetrievalCounts) -> None:
        for field in fields(RetrievalCounts):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class RequestCounts:
    """The counts of one request. SGLang expects a list here, with one item per output token.

    SGLang slices that list for every message that it streams. A slice of a ``RequestCounts`` is the running total.

    Args:
        config: page size, budget, and up to which length a context is attended to in full, and with how many absent pages.
        heads: kv heads that every decode step may correct, over all retrieval layers.
    """

    def __init__(self, config: FreeKVConfig, heads: int) -> None:
        self.config, self.heads = config, heads
        self.counts = RetrievalCounts()
        self.context_pages = self.absent_pages = 0
        self._seen: tuple[int, ...] = (0, 0, 0)

    def update(self, row_counts: tuple[int, int, int, int], seq_len: int, decoded: bool) -> RetrievalCounts:
        """Add one forward pass.

        Args:
            row_counts: units on the device, recalled units and corrected kv heads of the request's row, since its last extend; and the
                absent pages of its context in this pass.
            seq_len: tokens of the request, the one that this pass made included. It has no KV yet.
            decoded: whether the pass was a decode step. An extend resets the row's counts.

        Returns:
            The counts of this pass alone.
        """
        *units, self.absent_pages = row_counts
        seen: tuple[int, ...] = self._seen if decoded else (0, 0, 0)
        hits, recalled, corrected = (now - before for now, before in zip(units, seen))
        added = RetrievalCounts(int(decoded), decoded * self.heads, corrected, hits + recalled, recalled)
        self._seen = tuple(units)
        self.context_pages = -(-(seq_len - 1) // self.config.page_size)
        self.counts.add(added)
        return added

    def __getitem__(self, tokens: slice) -> list[dict[str, int]]:
        if not isinstance(tokens, slice):
            raise TypeError(f"expected a slice of tokens, found {tokens!r}")
        in_full = self.context_pages <= self.config.attended_pages and self.absent_pages <= self.config.cache_pages
        attended = self.context_pages if in_full else self.config.pages.total
        resident = self.context_pages - self.absent_pages
        pages = {"context_pages": self.context_pages, "attended_pages": attended, "resident_pages": resident}
        return [pages | self.counts.as_dict()]
