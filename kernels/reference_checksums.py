# SPDX-License-Identifier: Apache-2.0
"""Specification of the canary's checksums; letters as in ``reference``."""

from __future__ import annotations

import torch

from sglang_freekv.kernels.reference_movers import gather_pages
from sglang_freekv.kernels.units import Units

SPREAD = 0x9E3779B1 - (1 << 32)  # odd, near 2 ** 32 / golden ratio, as int32: neighbouring words get weights far apart


def checksum_pages(
    keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, checksums: torch.Tensor, page_size: int
) -> None:
    """Write the checksum of every unit that ``reference.offload_pages`` stores with the same arguments.

    A checksum is a sum of a unit's 32-bit words, keys before values, modulo 2 ** 32. Each word is multiplied by an odd number that depends
    on its place. Any change of one word changes the checksum; other changes do with a probability of 1 - 2 ** -32.

    Args:
        keys, values: ``[T, H, D]`` token rows to read; a row of D elements is a whole number of words.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page whose checksums are written, -1 to skip.
        checksums: ``[n_page, H]`` int32, written in place.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    units = torch.stack([gather_pages(rows, starts[chosen], page_size) for rows in (keys, values)], dim=2)
    checksums[host_pages[chosen]] = _checksums(units)


def verify_units(
    keys: torch.Tensor,
    values: torch.Tensor,
    units: Units,
    checksums: torch.Tensor,
    faults: torch.Tensor,
    *,
    every: int,
    layer: int,
    page_size: int,
) -> None:
    """Compare units that came from the host pool with their checksums, and write each fault to a ring.

    Args:
        keys, values: ``[T, H, D]`` token rows that hold the units.
        units: their places in the token rows and in the host pool.
        checksums: ``[n_page, H]`` int32 of :func:`checksum_pages`.
        faults: ``[1 + F, 5]`` int32 ring, updated. Element [0, 0] counts all faults. Fault n is row ``1 + n % F``: layer, host page,
            kv head, checksum found, checksum expected.
        every: one unit in ``every`` is compared. The second number in ``units.length`` chooses the first one.
        layer: number of the layer, written into its faults.
        page_size: S.
    """
    count, call = units.length.tolist()
    examined = slice(_mixed(call) % every, min(count, len(units.host_pages)), every)
    starts, heads, host_pages = (x[examined].long() for x in (units.starts, units.heads, units.host_pages))
    rows = starts[:, None] * units.tokens_per_start + torch.arange(page_size, device=starts.device)
    found = _checksums(torch.stack([x[rows, heads[:, None]] for x in (keys, values)], dim=1))
    expected = checksums[host_pages, heads]
    wrong = (found != expected).nonzero().squeeze(1)
    notes = torch.stack((torch.full_like(wrong, layer), host_pages[wrong], heads[wrong], found[wrong], expected[wrong]), dim=1)
    places = int(faults[0, 0]) + torch.arange(len(wrong), device=faults.device)
    faults[1 + places % (len(faults) - 1)] = notes.int()
    faults[0, 0] += len(wrong)


def _mixed(number: int) -> int:
    """A hash of ``number`` below 2 ** 32 (Wellons's lowbias32), so that a layer's numbers take all remainders.

    All layers share one list of corrections. A layer's numbers are therefore a fixed distance apart.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number = (number ^ number >> shift) * factor & 0xFFFFFFFF
    return number ^ number >> 16


def _checksums(units: torch.Tensor) -> torch.Tensor:
    """``[...]`` int32 checksums of units ``[..., 2, S, D]``."""
    words = units.contiguous().view(torch.int32).flatten(-3).long()
    weights = (torch.arange(words.shape[-1], device=words.device) * SPREAD) | 1  # int64: its lower 32 bits are the product modulo 2 ** 32
    return (words * weights).sum(-1).to(torch.int32)
