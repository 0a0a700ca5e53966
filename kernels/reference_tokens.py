# SPDX-License-Identifier: Apache-2.0
"""Specification of the kernels that write new tokens, as numbers or as codes; letters and layouts as in ``reference``."""

from __future__ import annotations

import torch

from sglang_freekv.kernels.candidates import Tables
from sglang_freekv.kernels.kv import FLOAT_CODES, Scales
from sglang_freekv.kernels.reference_codes import code_floats, code_vectors


def write_tokens(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    queries: torch.Tensor,
    token_rows: torch.Tensor,
    last_tokens: torch.Tensor,
    rows: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    previous_queries: torch.Tensor,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Write the new tokens of an extend, and keep the queries with which the first decode step compares its own.

    Args:
        new_keys, new_values: ``[T, H, D]``, one request after the other.
        queries: ``[T, Hq, D]`` of these tokens.
        token_rows: ``[T]`` where each token goes.
        last_tokens: ``[B]`` number of each request's last token.
        rows: ``[B]`` row of each request.
        keys, values: ``[N, H, D]`` token rows, written in place. Floats of 8 bits are saturated, as by ``code_floats``.
        previous_queries: ``[R, Hq, D]`` written in place at ``rows``.
        scales: ``[N, H]`` of token rows of int8 codes, written in place. New keys arrive rotated then, and queries not.

    Returns:
        ``[B, Hq, D]`` queries of the last tokens.
    """
    _write_vectors(keys, values, scales, (token_rows,), new_keys, new_values)
    last_queries = queries[last_tokens]
    previous_queries[rows] = last_queries
    return last_queries


def append_tokens(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    frames: torch.Tensor,
    tables: Tables,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: Scales | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new token of every request into its current page, which is resident or in a slot of each kv head, else it is lost.

    Args:
        new_keys, new_values: ``[B, H, D]`` of the new tokens.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context, the new one included.
        page_table: ``[B, P]`` logical page -> host page.
        frames: ``[B, P]`` frame of each logical page, -1 for an absent one.
        tables: pages in slots, and the frames of slots.
        keys, values: ``[F, S, H, D]`` written in place. Floats of 8 bits are saturated, as by ``code_floats``.
        scales: ``[F, S, H]`` of frames of int8 codes, written in place. New keys arrive rotated then.

    Returns:
        ``(starts, filled)``. ``starts [B, H]`` is the first token row of the current page in the flattened cache. ``filled [B]`` is the
        host page of the page that this token fills, or -1.
    """
    size, page, offset = keys.shape[1], (seq_lens - 1) // keys.shape[1], (seq_lens - 1) % keys.shape[1]
    position = (tables.slot_pages[rows] == page[:, None, None]).to(torch.int32).argmax(-1)
    resident = frames.gather(1, page[:, None].long())
    into = resident.where(resident >= 0, tables.row_frames[rows].gather(1, position))
    has_frame = (rows > 0) & (into[:, 0] >= 0)  # in all kv heads or in none
    into = into.where(has_frame[:, None], 0).long()
    real = has_frame.nonzero().squeeze(1)
    heads = torch.arange(new_keys.shape[1], device=rows.device)
    _write_vectors(keys, values, scales, (into[real], offset[real, None], heads), new_keys[real], new_values[real])
    filled = page_table.gather(1, page[:, None].long()).squeeze(1)
    return into * size, filled.where((offset == size - 1) & has_frame, -1)


def _write_vectors(
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: Scales | None,
    places: tuple[torch.Tensor, ...],
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """Write numbers to ``places`` of keys and values, as codes if these are of 8 bits."""
    if keys.dtype in FLOAT_CODES:
        keys[places], values[places] = (code_floats(numbers, keys.dtype) for numbers in (new_keys, new_values))
    elif scales is None:
        keys[places], values[places] = new_keys, new_values
    else:
        keys[places], scales.keys[places] = code_vectors(new_keys)
        values[places], scales.values[places] = code_vectors(new_values)
