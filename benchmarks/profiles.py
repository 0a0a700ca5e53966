"""What the load replay emulates, as it was measured: the shares of ``profiles.json``, which says where each is from."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

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
