# SPDX-License-Identifier: Apache-2.0
"""What retrieval did: counts of a request and of the engine, over the retrieval layers and the kv heads of one rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass
class RetrievalCounts:
    """Counts of decoding. A unit is one (page, kv head) of one layer.

    Args:
        decode_steps: tokens decoded.
        correction_decisions: kv heads of a layer that a step compared with the step before.
        corrections: those whose query had turned, so that they selected and recalled before attention.
        selected_units: units that a selection chose.
        recalled_units: units among them that were not on the device, and were copied from the host.
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
    """One request's counts, in the place where SGLang keeps a list with one item per output token.

    SGLang slices that list for every message it streams; a slice of this is the running total.

    Args:
        page_size, budget_pages: to tell how many pages the request has and attends to.
        heads: kv heads that a step asks about, over all retrieval layers.
    """

    def __init__(self, page_size: int, budget_pages: int, heads: int) -> None:
        self.page_size, self.budget_pages, self.heads = page_size, budget_pages, heads
        self.counts = RetrievalCounts()
        self.context_pages = 0
        self._seen = (0, 0, 0)

    def update(self, row_counts: tuple[int, int, int], seq_len: int, decoded: bool) -> RetrievalCounts:
        """Account for one forward pass.

        Args:
            row_counts: hits, recalled, corrected of the request's row since its last extend.
            seq_len: tokens of context.
            decoded: the pass was a decode step; an extend starts the row's counts afresh.

        Returns:
            What this pass added.
        """
        seen = self._seen if decoded else (0, 0, 0)
        hits, recalled, corrected = (now - before for now, before in zip(row_counts, seen))
        added = RetrievalCounts(int(decoded), decoded * self.heads, corrected, hits + recalled, recalled)
        self._seen, self.context_pages = row_counts, -(-seq_len // self.page_size)
        self.counts.add(added)
        return added

    def __getitem__(self, tokens: slice) -> list[dict[str, int]]:
        if not isinstance(tokens, slice):
            raise TypeError(f"expected a slice of tokens, found {tokens!r}")
        attended = min(self.context_pages, self.budget_pages)
        return [{"context_pages": self.context_pages, "attended_pages": attended, **self.counts.as_dict()}]
