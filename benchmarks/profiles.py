"""What the load replay emulates, as it was measured: the shares of ``profiles.json``, which says where each is from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

PATH = Path(__file__).resolve().parent / "profiles.json"
PROFILES = json.loads(PATH.read_text())
EMULATED = "deepseek-r1-distill-llama-8b"  # stands for every shape: no other model's correction rates and miss rates are known by context
_REPLAYED = PROFILES[EMULATED]["replayed"]

CORRECTED = MappingProxyType({float(tau): share for tau, share in _REPLAYED["corrected"].items()})  # c, by tau
CONCENTRATIONS = MappingProxyType(  # a + b of the Beta distribution of a layer's and step's share, by c
    {CORRECTED[float(tau)]: total for tau, total in _REPLAYED["concentration"].items()}
)
MISSED_BY_CONTEXT = tuple((int(tokens), share) for tokens, share in _REPLAYED["missed_by_context"].items())  # x
MISSED = _REPLAYED["missed"]  # x in the mean over the contexts of the measurement, which most benchmarks replay at every context


class Shares(NamedTuple):
    """What a load replays.

    Args:
        corrected: c, of every layer, or of each layer that was measured, in their order.
        missed: x.
    """

    corrected: float | tuple[float, ...]
    missed: float

    def on(self, layers: int) -> Shares:
        """Of a model in which so many layers are compressed."""
        return self if isinstance(self.corrected, float) else Shares(spread(self.corrected, layers), self.missed)


def spread(shares: Sequence[float], layers: int) -> tuple[float, ...]:
    """``shares`` along another number of layers: first to first, last to last, straight lines between."""
    found = []
    for layer in range(layers):
        at = layer * (len(shares) - 1) / max(1, layers - 1)
        low = min(int(at), len(shares) - 2)
        found.append(round(shares[low] + (at - low) * (shares[low + 1] - shares[low]), 4))
    return tuple(found)


def _by_layer(name: str) -> Shares:
    profile = PROFILES[name]
    tau, budget = profile["replayed"]["tau"], profile["replayed"]["budget"]
    return Shares(tuple(profile["corrected_by_layer"][tau]), profile[f"missed_pages_by_budget_at_{tau}"][budget])


BY_LAYER = "smollm2-135m-instruct"
USUAL, NEAREST = "tau-0.8", "tau-0.9-by-layer"  # what most results replay; fast's tau, on layers that differ as a real model's do
LOADS = MappingProxyType(  # by the names that benchmarks take for --load
    {f"tau-{tau:g}": Shares(share, MISSED) for tau, share in sorted(CORRECTED.items())} | {NEAREST: _by_layer(BY_LAYER)}
)
BY_PRESET = MappingProxyType(  # of single steps: what each preset does with the same texts
    {
        f"{preset}-by-layer": Shares(tuple(shares["corrected_by_layer"]), shares["missed"])
        for preset, shares in PROFILES["smollm2-135m-instruct-presets"]["presets"].items()
    }
)
