"""Bootstrap confidence intervals: prompts are drawn anew, with replacement, within each task."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

RESAMPLES, LEVEL = 4000, 0.95
ROWS = 20_000  # resamples in memory at a time


class Interval(NamedTuple):
    """A mean, and the ends of its percentile interval."""

    mean: float
    low: float
    high: float


@lru_cache(maxsize=64)
def _draws(size: int, resamples: int, seed: tuple[int, ...]) -> np.ndarray:
    """``[resamples, size] int32`` which of ``size`` prompts each resample has."""
    return np.random.default_rng(seed).integers(size, size=(resamples, size), dtype=np.int32)


def bootstrap(groups: Sequence[Sequence[float]], level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Interval of the mean over groups of their means.

    Args:
        groups: values of each group's prompts: one group is one task, several are the mean over tasks. Differences of pairs are
            values as well: then the interval is that of a paired difference.
        level: share of resamples inside, the rest evenly on both sides.
        seed: the same seed gives the same interval.
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    if not arrays or any(array.ndim != 1 or not len(array) for array in arrays):
        raise ValueError(f"groups of {[array.shape for array in arrays]}: expected at least one, each of at least one value")
    parts = []
    for start in range(0, resamples, ROWS):
        rows = min(ROWS, resamples - start)
        means = [array[_draws(len(array), rows, (seed, start, number))].mean(axis=1) for number, array in enumerate(arrays)]
        parts.append(np.mean(means, axis=0))
    low, high = np.quantile(np.concatenate(parts), ((1 - level) / 2, (1 + level) / 2), method="closest_observation")
    return Interval(float(np.mean([array.mean() for array in arrays])), float(low), float(high))
