"""What is asked of the methods of figure 7: prompts, answers, and the load that a length of context brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.profiles import CORRECTED, MISSED_BY_CONTEXT

BATCHES = (1, 4, 8, 16)


@dataclass(frozen=True)
class Scenario:
    """A request of the paper's.

    Args:
        prompt, answer: tokens.
        tau: the paper's, whose load is emulated.
        at: tokens of context at which steps are timed.
    """

    prompt: int
    answer: int
    tau: float
    at: tuple[int, ...]

    def load(self, context: int) -> tuple[float, float]:
        """Shares c and x at so many tokens of context."""
        return CORRECTED[self.tau], line(MISSED_BY_CONTEXT, context)

    def decoding_seconds(self, steps: dict[int, float]) -> float:
        """All steps of an answer, of those that were timed, by context. The first token is the prefill's."""
        points = sorted(steps.items())
        return sum(line(points, self.prompt + token) for token in range(1, self.answer))


SCENARIOS = {
    "long-input": Scenario(32768, 512, 0.8, (32768,)),
    "long-generation": Scenario(600, 16384, 0.9, (600, 2048, 4096, 8192, 16384)),
    "long-both": Scenario(32768, 16384, 0.9, (32768, 40960, 49152)),
}


def line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear between points in ascending order; level before the first and behind the last."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= x <= x1:
            return y0 + (x - x0) * (y1 - y0) / (x1 - x0)
    return points[0][1] if x < points[0][0] else points[-1][1]
