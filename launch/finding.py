# SPDX-License-Identifier: Apache-2.0
"""Finding: one fact that the doctor found, and its remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from sglang_freekv.config import GIB


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Args:
        name: the subject, such as "memlock".
        value: the fact, in words.
        remedy: how to mend it; None if there is nothing to mend.
        stops: whether it keeps a server from starting, or from serving the requests of the plan.
        figures: the numbers in ``value``, for programs. The unit is the last part of a name, such as ``bytes_per_s``.
    """

    name: str
    value: str
    remedy: str | None = None
    stops: bool = False
    figures: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: {self.value}" + (f" - {self.remedy}" if self.remedy else "")

    def to_json(self) -> dict:
        return asdict(self)


def size(num_bytes: float) -> str:
    """``num_bytes`` in words, with a unit from KiB to PiB."""
    for unit, name in ((1 << 50, "PiB"), (1 << 40, "TiB"), (GIB, "GiB"), (1 << 20, "MiB")):
        if abs(num_bytes) >= unit / 2 and (unit <= GIB or abs(num_bytes) >= unit):
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1024:.1f} KiB"
