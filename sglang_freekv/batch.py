# SPDX-License-Identifier: Apache-2.0
"""What one forward pass asks of the retrieval engine, computed once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeBatch:
    """One new token for each of B requests.

    Args:
        rows: ``[B]`` device-cache row of each request.
        seq_lens: ``[B]`` tokens of context, the new one included.
        page_table: ``[B, P]`` logical page -> host page, a snapshot: the scheduler may rewrite its table while this runs.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True)
class ExtendBatch(DecodeBatch):
    """New tokens after a prefix of whole pages, for each of B requests; the context of the batch is one ragged buffer.

    Args:
        query_lens, key_lens: new tokens and all tokens of each request.
        context_starts: ``[B]`` first token row of each request in the context buffer.
        new_rows: ``[T]`` context row of each new token.
        full_pages, full_starts: ``[M]`` host pages that this batch fills, and their first context row.
        last_tokens: ``[B]`` index of each request's last new token among the new tokens.
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
        cls, rows: torch.Tensor, page_table: torch.Tensor, prefix_lens: list[int], query_lens: list[int], page_size: int
    ) -> ExtendBatch:
        """Lay the batch out.

        Raises:
            RuntimeError: a prefix that is not whole pages; only full pages have a place in the host pool.
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
            query_lens=query_lens,
            key_lens=key.tolist(),
            context_starts=_to_device(starts, device),
            new_rows=_to_device((starts + prefix)[token_owner] + token_index, device),
            full_pages=page_table[_to_device(full_owner, device), _to_device(full_index, device)],
            full_starts=_to_device(starts[full_owner] + full_index * page_size, device),
            last_tokens=_to_device(query.cumsum(0) - 1, device),
        )


@dataclass(frozen=True)
class Prefixes:
    """Where the prefixes of an extend batch come from and go to.

    Args:
        pages, starts: ``[N]`` host pages, and the rows of the context buffer that they go to.
    """

    pages: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def build(
        cls,
        host_pages: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        prefix_lens: list[int],
        query_lens: list[int],
        page_size: int,
        device: torch.device,
    ) -> Prefixes:
        """Lay the prefixes out, in the contexts of ``ExtendBatch.build``; ``host_pages`` of logical pages: request and page number,
        both ``[N]`` on the device."""
        counts = torch.tensor(prefix_lens) // page_size
        key = torch.tensor(prefix_lens) + torch.tensor(query_lens)
        owner, index = _ragged(counts)
        return cls(
            pages=host_pages(_to_device(owner, device), _to_device(index, device)),
            starts=_to_device((key.cumsum(0) - key)[owner] + index * page_size, device),
        )


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without waiting for the device, which may be at work on the batch before."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _ragged(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of ``counts[i]`` items of request i: the request, and the item's index within it."""
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
