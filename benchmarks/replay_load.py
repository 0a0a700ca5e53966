"""What the load replay draws: which kv heads are corrected, and how the scores of pages move; PyTorch twins of ``replay_kernels.py``.

python -m benchmarks.replay_load        # calibrates, and prints the table SPEEDS
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from benchmarks.profiles import CONCENTRATIONS

THETAS = 4096
GOLDEN, PACES, WAVES, WORD = 0x9E3779B9, 0x85EBCA6B, (1, 0x27D4EB2F, 0x165667B1), 0xFFFFFFFF
SLOWER = 7  # a wave is slower by a factor of 1, 2, 4, .. 2 ** SLOWER
MOST_SPEED = 43_000  # times a factor of up to 1.5 * 65536 still is a word

# Speed of the pages' fastest waves (in 1 / 65536 turns per step) at which a share of the selected pages is new in each step: rows by
# candidates per selected page, columns by that share. ``calibrate`` prints it: bisection of a simulation with 32 selected pages.
RATIOS = (8, 16, 31, 62, 125)
SHARES = (0.05, 0.1, 0.21, 0.3, 0.5)
SPEEDS = {
    8: (1617, 3506, 8062, 12429, 26707),
    16: (1281, 2834, 6466, 9994, 19652),
    31: (1023, 2373, 5249, 7894, 16460),
    62: (824, 1816, 4241, 6382, 13101),
    125: (677, 1428, 3380, 5081, 10750),
}


class Load(NamedTuple):
    """What to emulate.

    Args:
        corrected: share of corrected kv heads, c; of every layer, or of each in the order in which layers run.
        missed: share of the selected pages that the step before did not select, x.
        candidates, selected: pages to choose from, and pages chosen, at the context that is measured.
    """

    corrected: float | Sequence[float]
    missed: float
    candidates: int
    selected: int


def speed_of(load: Load) -> int:
    """Speed of the waves for a load, interpolated in the table."""
    if load.missed <= 0:
        return 0
    ratio = min(max(load.candidates / load.selected, min(SPEEDS)), max(SPEEDS))
    low = max(row for row in SPEEDS if row <= ratio)
    high = min(row for row in SPEEDS if row >= ratio)
    part = 0.0 if low == high else math.log(ratio / low) / math.log(high / low)
    row = [(1 - part) * a + part * b for a, b in zip(SPEEDS[low], SPEEDS[high])]
    return min(MOST_SPEED, max(1, round(_interpolate(load.missed, (0.0, *SHARES), (0.0, *row)))))


def _interpolate(x: float, xs: tuple[float, ...], ys: tuple[float, ...]) -> float:
    """Piecewise linear, the last piece prolonged."""
    right = next((index for index, end in enumerate(xs) if x <= end and index), len(xs) - 1)
    (x0, x1), (y0, y1) = xs[right - 1 : right + 1], ys[right - 1 : right + 1]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)


def thetas_by_layer(corrected: float | Sequence[float], layers: int) -> torch.Tensor:
    """``[layers, THETAS]`` of a load's ``corrected``; layers behind the last that it names have the last one's."""
    if isinstance(corrected, (int, float)):
        return thetas_of(corrected).expand(layers, -1)
    named = [thetas_of(share) for share in corrected]
    return torch.stack((named + [named[-1]] * layers)[:layers])


def thetas_of(corrected: float) -> torch.Tensor:
    """``[THETAS]`` quantiles of the share of corrected kv heads in a layer and step."""
    if not 0 < corrected < 1:
        return torch.full((THETAS,), float(corrected))
    from scipy.stats import beta

    (c0, s0), (c1, s1) = sorted(CONCENTRATIONS.items())
    concentration = s0 + (min(max(corrected, c0), c1) - c0) * (s1 - s0) / (c1 - c0)
    middles = (torch.arange(THETAS, dtype=torch.float64) + 0.5) / THETAS
    quantiles = beta.ppf(middles.numpy(), corrected * concentration, (1 - corrected) * concentration)
    return torch.from_numpy(quantiles).float()


def drawn_flags(rows: torch.Tensor, steps: torch.Tensor, thetas: torch.Tensor, layer: int) -> torch.Tensor:
    """``[B, H]`` bool flags; advances ``steps [R, H]`` of ``rows``."""
    draw = _mix(_key(rows, layer)[:, None] + steps[rows] * GOLDEN)
    steps[rows] += 1
    heads = torch.arange(1, steps.shape[1] + 1, device=rows.device)
    return (_mix(draw + heads * GOLDEN) >> 8) < thetas[draw >> (32 - (THETAS.bit_length() - 1))] * 2.0**24


def page_scores(rows: torch.Tensor, steps: torch.Tensor, num_heads: int, num_pages: int, speed, layer: int) -> torch.Tensor:
    """``[B, H, P]`` float32: the score of every page for each kv head, a smooth function of ``steps [B]``."""
    heads = torch.arange(1, num_heads + 1, device=rows.device)
    key = _mix(_key(rows, layer)[:, None] + heads * GOLDEN)[..., None]
    drawn = _mix(key + torch.arange(num_pages, device=rows.device) * GOLDEN)
    score = torch.zeros(1, device=rows.device)
    for wave in WAVES:
        word = drawn * wave & WORD
        pace = word * PACES & WORD
        turns = ((pace >> 16) + 0x8000) * speed >> (pace >> 13 & SLOWER)
        phase = (word + steps[:, None, None] * turns) & WORD
        score = score + (phase - ((phase >> 31) << 32)).abs().float() * (4 / 2**31)
    return score


def _key(rows: torch.Tensor, layer: int) -> torch.Tensor:
    return _mix(rows.long() * GOLDEN + (layer + 1))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A hash of 32-bit words (lowbias32), in int64 arithmetic."""
    x = x & WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def share_kept(speed: int, candidates: int, selected: int, lag: int, steps: int = 64, heads: int = 16) -> float:
    """Simulated: the share of the selected pages that were selected ``lag`` steps before, too."""
    rows, kept = torch.ones(steps, dtype=torch.int64), 0
    for head in range(heads):
        scores = page_scores(rows, torch.arange(1000, 1000 + steps), 1, candidates, speed, layer=head)[:, 0]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(selected).indices, True)
        kept += int((chosen[lag:] & chosen[:-lag]).sum())
    return kept / (heads * (steps - lag) * selected)


def calibrate(selected: int = 32) -> None:
    """Print the rows of ``SPEEDS``, by bisection, and what of a selection is left after some steps."""
    for ratio in RATIOS:
        row = []
        for share in SHARES:
            low, high = 1, MOST_SPEED
            while high - low > max(4, low // 100):
                middle = (low + high) // 2
                low, high = (middle, high) if 1 - share_kept(middle, ratio * selected, selected, 1) < share else (low, middle)
            row.append(low)
        print(f"    {ratio}: ({', '.join(map(str, row))}),", flush=True)
        lags = {lag: round(share_kept(row[2], ratio * selected, selected, lag, steps=192, heads=4), 2) for lag in (1, 4, 16, 64)}
        print(f"    # missed = {SHARES[2]}, left after so many steps: {lags}", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    calibrate()
