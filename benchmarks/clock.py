"""The time that a benchmark was given, of which what is measured by its end is kept."""

from __future__ import annotations

import math

from benchmarks.report import seconds_since_start

LONGEST_START_S = 480  # of a server; the first one on a machine compiles kernels for minutes, and 126 GiB are pinned in one


class OutOfTime(RuntimeError):
    """The time that the run was given does not reach for this part."""


class Clock:
    """Deadlines of the parts of a run that ends after ``minutes``.

    Args:
        part_s: most seconds for one request of a part.
    """

    def __init__(self, minutes: float, part_s: float = math.inf) -> None:
        self.end_s, self.part_s = seconds_since_start() + minutes * 60, part_s

    def left(self, least_s: float = 10) -> float:
        """Seconds that the next step may take; raises OutOfTime if they are fewer than ``least_s``."""
        return min(self._left(least_s), self.part_s)

    def left_to_start(self, least_s: float = 60) -> float:
        """Seconds that a server may take until it is ready, whatever the most is for a part; raises OutOfTime."""
        return min(self._left(least_s), LONGEST_START_S)

    def _left(self, least_s: float) -> float:
        left = self.end_s - seconds_since_start()
        if left < least_s:
            raise OutOfTime(f"{max(0, left):.0f} s are left; run the rest with --systems, --only and --skip")
        return left

    @property
    def is_over(self) -> bool:
        return seconds_since_start() >= self.end_s
