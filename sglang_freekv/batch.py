# SPDX-License-Identifier: Apache-2.0
"""Batches: the tensors of one forward pass that all layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


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
    """T new tokens of B requests, each behind a prefix of whole pages. All contexts of the batch share one staging buffer, end to end.

    Args:
        query_lens, key_lens: new tokens and all tokens of each request.
        context_starts: ``[B]`` first token row of each request in the staging buffer.
        new_rows: ``[T]`` token row of each new token in the staging buffer.
        full_pages, full_starts: ``[M]`` host pages that this batch fills, and their first token rows in the staging buffer.
        last_tokens: ``[B]`` index of each request's last token among the new tokens.
    """

    query_lens: list[int]
    key_lens: list[int]
    context_starts: torch.Tensor
    new_rows: torch.Tensor
    full_pages: torch.Tensor
    full_starts: torch.Tensor
    last_tokens: torch.Tensor

    @classmethod
    def build(
        cls,
        rows: torch.Tensor,
        page_table: torch.Tensor,
        frames: torch.Tensor,
        prefix_lens: list[int],
        query_lens: list[int],
        page_size: int,
    ) -> ExtendBatch:
        """Lay out the contexts of a batch.

        Args:
            rows: ``[B]`` row of each request.
            page_table: ``[B, P]`` logical page -> host page.
            frames: ``[B, P]`` logical page -> frame.
            prefix_lens, query_lens: tokens of each request's prefix, and its new tokens.
            page_size: S.

        Raises:
            RuntimeError: a prefix is not a whole number of pages. The host pool holds full pages only.
        """
        if ragged := [length for length in prefix_lens if length % page_size]:
            raise RuntimeError(f"extend after a prefix of {ragged[0]} tokens, expected a multiple of the page size {page_size}")
        device = rows.device
        prefix, query = torch.tensor(prefix_lens), torch.tensor(query_lens)
        key = prefix + query
        starts = key.cumsum(0) - key
        full_owner, full_index = _ragged(key // page_size - prefix // page_size)
        full_index += (prefix // page_size)[full_owner]
        token_owner, token_index = _ragged(query)
        return cls(
            rows=rows,
            seq_lens=_to_device(key, device),
            page_table=page_table,
            frames=frames,
            query_lens=query_lens,
            key_lens=key.tolist(),
            context_starts=_to_device(starts, device),
            new_rows=_to_device((starts + prefix)[token_owner] + token_index, device),
            full_pages=page_table[_to_device(full_owner, device), _to_device(full_index, device)],
            full_starts=_to_device(starts[full_owner] + full_index * page_size, device),
            last_tokens=_to_device(query.cumsum(0) - 1, device),
        )


class StagedPages(NamedTuple):
    """Pages that are streamed to a staging buffer.

    Args:
        host_pages, starts: ``[N]`` host pages, and their first token rows in the staging buffer.
    """

    host_pages: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True)
class Prefixes:
    """The prefix pages of an extend batch: their entries in the scheduler's table, and their places in the staging buffer.

    Args:
        req_to_token: ``[R, context]`` KV index of each token of each row.
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
    ) -> Prefixes:
        """Lay out the prefixes in the contexts of ``ExtendBatch.build``, whose arguments these are."""
        prefix, query = torch.tensor(prefix_lens), torch.tensor(query_lens)
        key = prefix + query
        owners, pages = _ragged(prefix // page_size)
        return cls(req_to_token, rows, owners, pages, (key.cumsum(0) - key)[owners] + pages * page_size, page_size)

    def look_up(self) -> StagedPages:
        """Read the host pages from the scheduler's table. Call it on a stream that is ordered behind the scheduler's writes."""
        device = self.req_to_token.device
        owners, pages = _to_device(self.owners, device), _to_device(self.pages, device)
        host_pages = self.req_to_token[self.rows[owners], pages * self.page_size] // self.page_size
        return StagedPages(host_pages, _to_device(self.starts, device))


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``. The host does not wait for the device, which may still compute the batch before."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _ragged(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``counts[i]`` items for each request i: ``[N]`` request of each item, and ``[N]`` index of the item within its request."""
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
