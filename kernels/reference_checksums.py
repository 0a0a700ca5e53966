# SPDX-License-Identifier: Apache-2.0
"""Specification of the canary's checksums; letters as in ``reference``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_freekv.kernels.kv import Scales
from sglang_freekv.kernels.reference_movers import gather_pages
from sglang_freekv.kernels.units import Units

SPREAD = 0x9E3779B1 - (1 << 32)  # odd, near 2 ** 32 / golden ratio, as int32: neighbouring words get weights far apart


def checksum_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    host_pages: torch.Tensor,
    checksums: torch.Tensor,
    page_size: int,
    *,
    scales: Scales | None = None,
) -> None:
    """Write the checksum of every unit that ``reference.offload_pages`` stores with the same arguments.

    A checksum is a sum of a unit's 32-bit words, keys before values, modulo 2 ** 32. Each word is multiplied by an odd number that depends
    on its place. The scales of coded KV come behind the words, keys before values, each as a signed integer of 16 bits in a place of its own.
    Any change of one word or one scale changes the checksum; other changes do with a probability of 1 - 2 ** -32.

    Args:
        keys, values: ``[T, H, D]`` token rows to read; a row of D elements is a whole number of words.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page whose checksums are written, -1 to skip.
        checksums: ``[n_page, H]`` int32, written in place.
        scales: ``[T, H]`` of codes.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)

    def gathered(kinds: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([gather_pages(rows, starts[chosen], page_size) for rows in kinds], dim=2)

    checksums[host_pages[chosen]] = _checksums(gathered((keys, values)), None if scales is None else gathered(scales))


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
    scales: Scales | None = None,
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
        scales: ``[T, H]`` of codes.
    """
    count, call = units.length.tolist()
    examined = slice(_mixed(call) % every, min(count, len(units.host_pages)), every)
    starts, heads, host_pages = (x[examined].long() for x in (units.starts, units.heads, units.host_pages))
    rows = starts[:, None] * units.tokens_per_start + torch.arange(page_size, device=starts.device)

    def gathered(kinds: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([x[rows, heads[:, None]] for x in kinds], dim=1)

    found = _checksums(gathered((keys, values)), None if scales is None else gathered(scales))
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


def _checksums(units: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """``[...]`` int32 checksums of units ``[..., 2, S, D]`` and of their scales ``[..., 2, S]``."""
    numbers = units.contiguous().view(torch.int32).flatten(-3).long()
    if scales is not None:
        numbers = torch.cat((numbers, scales.view(torch.int16).flatten(-2).long()), -1)
    weights = (torch.arange(numbers.shape[-1], device=numbers.device) * SPREAD) | 1  # int64: the lower 32 bits are those modulo 2 ** 32
    return (numbers * weights).sum(-1).to(torch.int32)
