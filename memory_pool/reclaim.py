# SPDX-License-Identifier: Apache-2.0
"""Reclaim: pages give up their frames, the least recently used ones first."""

from __future__ import annotations

import torch

from sglang_freekv.kernels.frame_tables import DEEPEST, DEPTH_BITS, FREE, GIVEN_UP, FrameTables

SPARE = 64  # a reclaim leaves one frame of so many free beyond what was asked for, so that the next pass need not reclaim again
RUNNING, NEVER = 1 << 62, torch.iinfo(torch.int64).max  # keys of pages behind all idle ones


def reclaim(tables: FrameTables, now: int, must: int | torch.Tensor, may: int) -> None:
    """Give up pages until ``must`` frames are free, and until ``may`` and some to spare are free as long as idle pages are left.

    Idle pages are those that no running row has. They go first, the least recently used ones ahead, and the deepest of a pass. A shared
    prefix is used by the pages behind it, so it outlives them. For ``must`` alone, pages of partial rows follow, the shallowest ahead,
    because the window lies deep. Pinned pages stay. The host copies of all others are complete, so giving up copies nothing. The host does
    not wait for the device.

    Args:
        tables: written in place, behind ``mark_pages`` of the pass.
        now: number of the pass.
        must, may: free frames that the pass needs, and those that it can use; ``must`` on the host, or ``[1]`` on the device.
    """
    places = torch.arange(len(tables.page_of), device=tables.page_of.device)
    pages = tables.page_of.clamp(min=0).long()
    used, held = tables.last_use[pages], pages > 0
    idle, partial = (held & (used >> DEPTH_BITS < 2 * now)), held & (used >> DEPTH_BITS == 2 * now)
    running = (RUNNING + DEEPEST - (used & DEEPEST)).masked_fill(~partial, NEVER)
    frames = used.where(idle, running).argsort(stable=True)
    wanted = torch.maximum(torch.zeros_like(tables.free_count) + must, torch.full_like(tables.free_count, may))
    of_idle = torch.minimum((wanted + len(places) // SPARE - tables.free_count) * (tables.free_count < wanted), idle.sum())
    of_partial = torch.minimum((must - tables.free_count - of_idle).clamp(min=0), partial.sum())
    number = of_idle + of_partial
    given_up = places < number
    tables.frame_of.index_fill_(0, pages[frames].where(given_up, 0), -1)  # page 0 has no frame anyway
    tables.page_of[frames] = tables.page_of[frames].masked_fill(given_up, FREE)
    rank = places - tables.free_count
    tables.free.copy_(frames[rank.clamp(min=0)].where((rank >= 0) & (rank < number), tables.free))
    tables.free_count.add_(number)
    tables.counts[GIVEN_UP] += number[0]
