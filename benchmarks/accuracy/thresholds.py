"""A threshold for each layer, so that a share of all kv heads is corrected: half of it in every layer, half where it gains most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

BINS = 32  # of the samples of a layer, by cosine: a mean over one of them is stable
EVEN = 0.5  # of the corrections, spread over all layers: a layer without any was far off where its queries did change
NEVER, ALWAYS = -1.0, 1.0


class Piece(NamedTuple):
    """Samples of one layer with neighbouring cosines, and their mean gain."""

    gain: float
    layer: int
    count: int


def pieces(layer: int, gains: torch.Tensor) -> Iterator[Piece]:
    """The samples of a layer, from the lowest cosine, in pieces whose mean gain falls from one to the next: the upper hull of the sums.

    Args:
        gains: ``[N]``, by ascending cosine.
    """
    ends = [round(number * len(gains) / BINS) for number in range(BINS + 1)]
    sums, at = [gains[:end].double().sum().item() for end in ends], 0

    def slope(to: int) -> float:
        return (sums[to] - sums[at]) / (ends[to] - ends[at]) if ends[to] > ends[at] else float("-inf")

    while at < BINS:
        to = max(range(at + 1, BINS + 1), key=slope)
        if ends[to] > ends[at]:
            yield Piece(slope(to), layer, ends[to] - ends[at])
        at = to


def counts_of(samples: Sequence[torch.Tensor], share: float) -> list[int]:
    """How many samples of each layer to correct, from its lowest cosine: ``EVEN`` of the share in each, the rest where it gains most.

    What gains nothing is not among the rest, so there may be fewer.

    Args:
        samples: of each layer ``[N, 2]``: cosine and gain.
        share: of all samples, 0 to 1.
    """
    counts = [round(EVEN * share * len(each)) for each in samples]
    rest = [each[each[:, 0].argsort(), 1][count:] for each, count in zip(samples, counts)]
    found = [piece for layer, gains in enumerate(rest) for piece in pieces(layer, gains)]
    left = round(share * sum(map(len, samples))) - sum(counts)
    for piece in sorted(found, reverse=True):
        if piece.gain > 0:
            taken = min(piece.count, left)
            counts[piece.layer] += taken
            left -= taken
    return counts


def tau_of(cosines: torch.Tensor, count: int) -> float:
    """The threshold below which ``count`` of ``[N]`` cosines lie."""
    if count == 0:
        return NEVER
    if count == len(cosines):
        return ALWAYS
    ordered = cosines.sort().values
    return round(ordered[count - 1 : count + 1].mean().item(), 5)


def taus_of(samples: Sequence[torch.Tensor], share: float) -> list[float]:
    """The threshold of each layer."""
    return [tau_of(each[:, 0], count) for each, count in zip(samples, counts_of(samples, share), strict=True)]


def kept(samples: Sequence[torch.Tensor], taus: Sequence[float]) -> tuple[float, float]:
    """Share of the samples that are corrected by these thresholds, and of the gain of correcting all."""
    masks = [each[:, 0] < tau for each, tau in zip(samples, taus, strict=True)]
    gained = sum(each[mask, 1].sum().item() for each, mask in zip(samples, masks))
    whole = sum(each[:, 1].sum().item() for each in samples)
    return sum(int(mask.sum()) for mask in masks) / sum(map(len, samples)), gained / whole if whole else 0.0
