"""What the time of a measured step went to, and what it cannot go below."""

from __future__ import annotations

from typing import NamedTuple

WHOLE = "full", "razor"  # attend to more than the budget, so that a window's step is not their computation


class Parts(NamedTuple):
    """Seconds.

    Args:
        compute: matrices and attention: the step of the window, or of the method where it attends to more.
        select: what is on top without any copy.
        exposed: of the copies, what the step is longer by.
        hidden: the rest of what the link takes for them.
        bound: the link's or the device memory's time for the bytes that the step moves at least, whichever is longer.
    """

    compute: float
    select: float
    exposed: float
    hidden: float
    bound: float


def parts_of(method: str, result: dict, window: float, ceilings: dict[str, float]) -> Parts:
    """Of a result of ``step.measured``.

    Args:
        window: seconds of the step of a window alone with the same load.
        ceilings: bytes per second, of ``timing.Ceilings`` in the run that made the result.
    """
    whole = result["seconds"]["median"]
    without = result.get("without_copies", result["seconds"])["median"]
    compute = without if method in WHOLE else min(window, without)
    exposed, link = max(0.0, whole - without), result["bytes"]["link"] / ceilings["to_device"]
    return Parts(compute, without - compute, exposed, max(0.0, link - exposed), bound_of(result["bytes"], ceilings))


def bound_of(moved: dict[str, float], ceilings: dict[str, float]) -> float:
    """Seconds that ``moved`` bytes over the link, from device memory and of weights take at least; the two go side by side."""
    return max(moved["link"] / ceilings["to_device"], (moved["weights"] + moved["device"]) / ceilings["device"])
