# SPDX-License-Identifier: Apache-2.0
"""Batches: the tensors of one forward pass that all layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from sglang_freekv.kernels.ragged import all_to_device, ragged, to_device


@dataclass(frozen=True)
class DecodeBatch:
    """One new token for each of B requests.

    Args:
        rows: ``[B]`` row of each request, 0 for padding.
        seq_lens: ``[B]`` tokens of context, the new one included.
        page_table: ``[B, P]`` logical page -> host page. It is a snapshot, because the scheduler may rewrite its table during the pass.
        frames: ``[B, P]`` int32 logical page -> frame, -1 for an absent page. Frames change hands between passes only.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    frames: torch.Tensor


@dataclass(frozen=True)
class ExtendBatch(DecodeBatch):
    """T new tokens of B requests, each behind a prefix of whole pages.

    The contexts of a staged extend share one staging buffer, end to end. An extend in place reads and writes frames of the device cache.

    Args:
        query_lens, key_lens: new tokens and all tokens of each request.
        context_starts: ``[B]`` first token row of each request in the staging buffer, None in place.
        given: ``[B, P]`` frame that each staged page is copied to, -1 for none. None in place, and if no page has one.
        new_rows: ``[T]`` token row of each new token, in the staging buffer or the device cache.
        full_pages, full_starts: ``[M]`` host pages that this batch fills, and their first token rows.
        last_tokens: ``[B]`` index of each request's last token among the new tokens.
    """

    query_lens: list[int]
    key_lens: list[int]
    context_starts: torch.Tensor | None
    given: torch.Tensor | None
    new_rows: torch.Tensor
    full_pages: torch.Tensor
    full_starts: torch.Tensor
    last_tokens: torch.Tensor

    @property
    def in_place(self) -> bool:
        return self.context_starts is None

    @classmethod
    def build(
        cls,
        rows: torch.Tensor,
        page_table: torch.Tensor,
        frames: torch.Tensor,
        prefix_lens: list[int],
        query_lens: list[int],
        page_size: int,
        *,
        in_place: bool = False,
        given: torch.Tensor | None = None,
    ) -> ExtendBatch:
        """Lay out the contexts of a batch.

        Args:
            rows: ``[B]`` row of each request.
            page_table: ``[B, P]`` logical page -> host page.
            frames: ``[B, P]`` logical page -> frame. In place every page of the contexts has one.
            prefix_lens, query_lens: tokens of each request's prefix, and its new tokens.
            page_size: S.
            in_place: whether the contexts lie in frames.
            given: ``[B, P]`` frames that pages of staged contexts are copied to.

        Raises:
            RuntimeError: a prefix is not a whole number of pages. The host pool holds full pages only.
        """
        if uneven := [length for length in prefix_lens if length % page_size]:
            raise RuntimeError(f"extend after a prefix of {uneven[0]} tokens, expected a multiple of the page size {page_size}")
        prefix, query = torch.tensor(prefix_lens), torch.tensor(query_lens)
        key, first, width = prefix + query, prefix // page_size, page_table.shape[1]
        starts = _starts(key)
        full_owner, full_page = ragged(key // page_size - first)
        full_page += first[full_owner]
        token_owner, token = ragged(query)
        token += prefix[token_owner]
        full, written = full_owner * width + full_page, token_owner * width + token // page_size  # places in a table when it is flat
        on_host = [key, query.cumsum(0) - 1, full, written, token % page_size]
        if not in_place:
            on_host += starts, starts[token_owner] + token, starts[full_owner] + full_page * page_size
        seq_lens, last_tokens, full, written, offsets, *staged = all_to_device(rows.device, *on_host)
        if in_place:
            new_rows, full_starts = offsets.add(frames.take(written), alpha=page_size), frames.take(full).long() * page_size
        else:
            starts, new_rows, full_starts = staged
        return cls(
            rows=rows,
            seq_lens=seq_lens,
            page_table=page_table,
            frames=frames,
            query_lens=query_lens,
            key_lens=key.tolist(),
            context_starts=None if in_place else starts,
            given=None if in_place or given is None else given[:, : -(-int(key.max()) // page_size)],
            new_rows=new_rows,
            full_pages=page_table.take(full),
            full_starts=full_starts,
            last_tokens=last_tokens,
        )


def _starts(key_lens: torch.Tensor) -> torch.Tensor:
    """``[B]`` first token rows of contexts that lie end to end in a staging buffer."""
    return key_lens.cumsum(0) - key_lens


class StagedPages(NamedTuple):
    """Pages that are streamed to a staging buffer or to frames.

    Args:
        host_pages, starts: ``[N]`` host pages, then -1, and the first token row of each.
    """

    host_pages: torch.Tensor
    starts: torch.Tensor


class Prefixes(Protocol):
    """The prefix pages of an extend batch that are streamed from the host pool."""

    def __len__(self) -> int:
        """How many there may be."""

    def look_up(self) -> StagedPages:
        """Read the tables that name the pages. Call it on a stream that is ordered behind the writers of those tables."""


@dataclass(frozen=True)
class StagedPrefixes:
    """All prefix pages of a staged extend: their entries in the scheduler's table, and their places in the staging buffer.

    Args:
        req_to_token: ``[R, context]`` KV index of each token of each row, written by the scheduler.
        rows: ``[B]`` rows of the requests in that table.
        owners, pages: ``[N]`` request and logical page of each prefix page, on the host.
        starts: ``[N]`` their first token rows in the staging buffer, on the host.
        page_size: S.
    """

    req_to_token: torch.Tensor
    rows: torch.Tensor
    owners: torch.Tensor
    pages: torch.Tensor
    starts: torch.Tensor
    page_size: int

    @classmethod
    def build(
        cls, req_to_token: torch.Tensor, rows: torch.Tensor, prefix_lens: list[int], query_lens: list[int], page_size: int
    ) -> StagedPrefixes:
        """Lay out the prefixes in the contexts of ``ExtendBatch.build``, whose arguments these are."""
        prefix, query = torch.tensor(prefix_lens), torch.tensor(query_lens)
        owners, pages = ragged(prefix // page_size)
        return cls(req_to_token, rows, owners, pages, _starts(prefix + query)[owners] + pages * page_size, page_size)

    def __len__(self) -> int:
        return len(self.pages)

    def look_up(self) -> StagedPages:
        """As ``Prefixes.look_up``; the scheduler writes the table."""
        device = self.req_to_token.device
        owners, pages, starts = all_to_device(device, self.owners, self.pages, self.starts)
        return StagedPages(self.req_to_token[self.rows[owners], pages * self.page_size] // self.page_size, starts)


@dataclass(frozen=True)
class AbsentPrefixes:
    """The prefix pages of an extend in place that were absent before it, and the frames that it gave them.

    Args:
        page_table: ``[B, P]`` logical page -> host page.
        given: ``[B, P]`` the frame that this batch gave each logical page, -1 for a page that had one or is another request's here, too.
        pages: ``[N]`` place of each prefix page in a table when it is flat, on the host.
        page_size: S.
    """

    page_table: torch.Tensor
    given: torch.Tensor
    pages: torch.Tensor
    page_size: int

    @classmethod
    def build(cls, page_table: torch.Tensor, given: torch.Tensor, prefix_lens: list[int], page_size: int) -> AbsentPrefixes:
        """Of a batch whose other arguments are those of ``ExtendBatch.build``."""
        owners, pages = ragged(torch.tensor(prefix_lens) // page_size)
        return cls(page_table, given, owners * page_table.shape[1] + pages, page_size)

    def __len__(self) -> int:
        return len(self.pages)

    def look_up(self) -> StagedPages:
        """As ``Prefixes.look_up``; the pass itself writes the tables. The absent pages come first, because only the device knows them."""
        pages = to_device(self.pages, self.page_table.device)
        given = self.given.take(pages)
        host_pages, order = self.page_table.take(pages).where(given >= 0, -1).sort(descending=True)
        return StagedPages(host_pages, given[order].long() * self.page_size)
