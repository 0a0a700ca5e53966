"""How alike two servers' answers are."""

from __future__ import annotations


def alike(one: list[list[int]], other: list[list[int]]) -> float:
    """Share of tokens before the first one that differs, of pairs of answers that are equally long."""
    same = [
        next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in zip(one, other, strict=True)
    ]
    return sum(same) / sum(map(len, one))
