# SPDX-License-Identifier: Apache-2.0
"""Specification of the kernels that copy pages; letters and layouts as in ``reference``."""

from __future__ import annotations

import time

import torch

from sglang_freekv.kernels.candidates import Tables
from sglang_freekv.kernels.frame_tables import ABSENT, FrameTables
from sglang_freekv.kernels.kv import Scales
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reference_stamps import BEGIN, write_stamp
from sglang_freekv.kernels.staged_layers import StagedLayers


def offload_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    host_pages: torch.Tensor,
    host_pool: torch.Tensor,
    *,
    scales: Scales | None = None,
    host_scales: torch.Tensor | None = None,
) -> None:
    """Copy full pages from token rows (NHD) to the host pool (HND).

    Args:
        keys, values: ``[T, H, D]`` token rows to read.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page to write, -1 to skip.
        host_pool: ``[n_page, H, 2, S, D]`` written in place.
        scales: ``[T, H]`` of codes, copied along with them.
        host_scales: ``[n_page, H, 2, S]`` written in place; contiguous, as units are read.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    page_size = host_pool.shape[3]
    for kinds, pool in _moved((keys, values), host_pool, scales, host_scales):
        units = torch.stack([gather_pages(rows, starts[chosen], page_size) for rows in kinds], dim=2)
        pool[host_pages[chosen].to(pool.device)] = units.to(pool.device)


def recall_pages(
    host_pool: torch.Tensor,
    misses: Misses,
    keys: torch.Tensor,
    values: torch.Tensor,
    programs: int = 8,
    closely: bool = False,
    stamp: torch.Tensor | None = None,
    *,
    scales: Scales | None = None,
    host_scales: torch.Tensor | None = None,
) -> None:
    """Copy missing units from the host pool (HND) to their slots (NHD), and leave the list empty.

    Args:
        host_pool: ``[n_page, H, 2, S, D]``.
        misses: the units to copy, and the frames that receive them.
        keys, values: ``[F, S, H, D]`` written in place.
        programs: on a GPU, the number of programs that copy; the rest of the device is left to the computation.
        closely: on a GPU, start while the kernel before still runs, because attention waits for this recall.
        stamp: ``[4]`` of ``reference_stamps``: receives the begin and, if there was anything to copy, the end.
        scales: ``[F, S, H]`` of codes, written in place.
        host_scales: ``[n_page, H, 2, S]``.
    """
    any_missing = bool(misses.length[0])
    if stamp is not None:
        stamp[BEGIN] = time.perf_counter_ns()
    host_pages, heads, frames = (column.long() for column in misses.columns())
    for kinds, pool in _moved((keys, values), host_pool, scales, host_scales):
        units = pool[host_pages.to(pool.device), heads.to(pool.device)].to(keys.device)
        for kind, cache in enumerate(kinds):
            cache[frames, :, heads] = units[:, kind]
    misses.clear()
    if stamp is not None and any_missing:
        write_stamp(stamp)


def fill_pages(
    source_keys: torch.Tensor,
    source_values: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: Tables,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    source_scales: Scales | None = None,
    scales: Scales | None = None,
) -> None:
    """Copy the pages in the slots of ``rows`` from token rows on the device. A page that has no token yet is left out.

    Args:
        source_keys, source_values: ``[T, H, D]`` token rows to read. A partial last page is copied with the rows behind it, which attention
            masks.
        starts: ``[B]`` first token row of each request.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of each request among the token rows.
        tables: pages in slots, and the frames of slots. A slot without a frame is left out.
        keys, values: ``[F, S, H, D]`` written in place.
        source_scales: ``[T, H]`` of codes, copied along with them.
        scales: ``[F, S, H]`` written in place.
    """
    size, pages = keys.shape[1], tables.slot_pages[rows].long()
    pages = pages.where(tables.row_frames[rows][:, None] >= 0, -1)
    b, h, c = ((pages >= 0) & (pages * size < seq_lens[:, None, None]) & (rows > 0)[:, None, None]).nonzero(as_tuple=True)
    tokens = (starts[b] + pages[b, h, c] * size)[:, None] + torch.arange(size, device=pages.device)
    tokens.clamp_(max=source_keys.shape[0] - 1)
    frames = tables.row_frames[rows[b], c].long()
    for source, target in zip((source_keys, source_values, *(source_scales or ())), (keys, values, *(scales or ())), strict=True):
        target[frames, :, h] = source[tokens, h[:, None]]


def fill_frames(
    source_keys: torch.Tensor,
    source_values: torch.Tensor,
    starts: torch.Tensor,
    given: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    source_scales: Scales | None = None,
    scales: Scales | None = None,
) -> None:
    """Copy pages from token rows on the device into the frames that they were given.

    Args:
        source_keys, source_values, starts: as for :func:`fill_pages`.
        given: ``[B, P]`` frame of each logical page, -1 for a page to leave out.
        keys, values: ``[F, S, H, D]`` written in place.
        source_scales, scales: as for :func:`fill_pages`.
    """
    size = keys.shape[1]
    b, p = (given >= 0).nonzero(as_tuple=True)
    tokens = ((starts[b] + p * size)[:, None] + torch.arange(size, device=given.device)).clamp(max=source_keys.shape[0] - 1)
    frames = given[b, p].long()
    for source, target in zip((source_keys, source_values, *(source_scales or ())), (keys, values, *(scales or ())), strict=True):
        target[frames] = source[tokens]


def stage_pages(
    host_pool: torch.Tensor,
    host_pages: torch.Tensor,
    starts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scales: Scales | None = None,
    host_scales: torch.Tensor | None = None,
) -> None:
    """Copy whole pages of all kv heads from the host pool (HND) to token rows (NHD): the prefix of an extend.

    Args:
        host_pool: ``[n_page, H, 2, S, D]``.
        host_pages: ``[N]`` pages to read, then -1.
        starts: ``[N]`` first token row of each page.
        keys, values: ``[T, H, D]`` written in place.
        scales: ``[T, H]`` of codes, written in place.
        host_scales: ``[n_page, H, 2, S]``.
    """
    host_pages, starts = (x[host_pages >= 0] for x in (host_pages, starts))
    rows = starts[:, None] + torch.arange(host_pool.shape[3], device=starts.device)
    for kinds, pool in _moved((keys, values), host_pool, scales, host_scales):
        units = pool[host_pages.to(pool.device)].to(keys.device).transpose(1, 3)  # [N, S, 2, H], and D behind it but for scales
        kinds[0][rows], kinds[1][rows] = units.unbind(2)


def stage_layers(layers: StagedLayers, host_pages: torch.Tensor, starts: torch.Tensor, *, first: int, last: int) -> None:
    """:func:`stage_pages` in each of the layers from ``first`` to before ``last``.

    Args:
        layers: all layers.
        host_pages, starts: as in :func:`stage_pages`, the same in every layer.
    """
    for layer in range(first, last):
        given = layers.host[layer], host_pages, starts, layers.keys[layer], layers.values[layer]
        if layers.scales is None or layers.host_scales is None:
            stage_pages(*given)
        else:
            stage_pages(*given, scales=layers.scales[layer], host_scales=layers.host_scales[layer])


def snapshot_pages(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    *,
    tables: FrameTables | None = None,
    frames: torch.Tensor | None = None,
) -> None:
    """Read the host pages of every request from the KV indices of its pages. A page that the next token may begin is included.

    Args:
        req_to_token: ``[R, T]`` SGLang's KV index of each position; T is the longest context.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context.
        page_table: ``[B, P]`` written: logical page -> host page, 0 beyond the context.
        page_size: S.
        tables: with ``frames``. Counts the absent pages of the contexts.
        frames: ``[B, P]`` int32 written: logical page -> frame, -1 for none; the frame in hand for a page that the next token begins.
    """
    first = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    begun = (first <= seq_lens[:, None]) & (first < req_to_token.shape[1])
    tokens = req_to_token[rows[:, None], first.clamp(max=req_to_token.shape[1] - 1)]
    page_table.copy_((tokens // page_size).where(begun, 0))
    if tables is None or frames is None:
        return
    real = (rows > 0)[:, None]
    within, coming = begun & (first < seq_lens[:, None]) & real, begun & (first == seq_lens[:, None]) & real
    held = tables.frame_of[page_table].where(within, -1)
    frames.copy_(tables.in_hand[rows][:, None].where(coming, held))
    absent = (within & (held < 0)).sum(1)
    tables.row_absent.index_add_(0, rows, absent.to(torch.int32))
    tables.counts[ABSENT] += absent.sum()


def _moved(
    kinds: tuple[torch.Tensor, torch.Tensor], host_pool: torch.Tensor, scales: Scales | None, host_scales: torch.Tensor | None
) -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """What a mover copies: keys and values on the device with their host pool, and so with their scales if there are any."""
    assert (scales is None) == (host_scales is None), "scales are on the device and in host memory, or in neither"
    return [(kinds, host_pool)] if scales is None or host_scales is None else [(kinds, host_pool), (scales, host_scales)]


def gather_pages(rows: torch.Tensor, starts: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[N, H, S, D]`` pages that begin at ``starts [N, H]`` of token rows ``[T, H, D]``; of scales ``[T, H]`` the same without D."""
    token = starts[:, :, None] + torch.arange(page_size, device=starts.device)
    heads = torch.arange(rows.shape[1], device=starts.device)[None, :, None]
    return rows[token, heads]
