# SPDX-License-Identifier: Apache-2.0
"""Finding: one thing the doctor looked at, what it saw, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from sglang_freekv.config import GIB


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Args:
        name, value: what was looked at, and what was seen, for a reader.
        remedy: what to do about it; None where nothing is to be done.
        stops: a server would not start, or could not serve the requests that were asked about.
        figures: what ``value`` says, for a program: bytes, counts, bytes per second; the unit ends the name.
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
    """Bytes in TiB or GiB, or in MiB or KiB if they are few."""
    for unit, name in ((1 << 50, "PiB"), (1 << 40, "TiB"), (GIB, "GiB"), (1 << 20, "MiB")):
        if abs(num_bytes) >= unit / 2 and (unit <= GIB or abs(num_bytes) >= unit):
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1024:.1f} KiB"
