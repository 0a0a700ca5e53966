# SPDX-License-Identifier: Apache-2.0
"""Presets of method freekv: named sets of defaults. A flag that the user gives wins over them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Settings of FreeKVConfig, by its names; ``about`` says what they are for."""

    about: str
    page_size: int
    budget_tokens: int
    sink_tokens: int
    window_tokens: int
    tau: float
    digest: str
    pooling: str
    hysteresis: float = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """All but ``about``."""
        settings = asdict(self)
        del settings["about"]
        return settings

    @property
    def told(self) -> str:
        """In ``--help``."""
        return (
            f"{self.about}: --page-size {self.page_size}, budget {self.budget_tokens}, sink {self.sink_tokens}, window "
            f"{self.window_tokens}, tau {self.tau:g}, {self.digest} digests, {self.pooling} pooling, hysteresis {self.hysteresis:g}"
        )


PRESETS = {
    # benchmarks/results/real.json: KL to dense attention .0104, where fast has .0651; attention waits for 22 tokens, with fast for 51
    "accurate": Preset("for answers near dense attention's", 8, 2048, 16, 32, 0.8, "two-bit", "softmax-mean", 1.0),
    "fast": Preset("for the shortest steps and the least device memory", 32, 2048, 512, 512, 0.9, "cuboid-mean", "softmax-mean"),
    # arXiv 2505.13109, section 5: long generation; for long input it has a tau of 0.8
    "paper": Preset("what the FreeKV paper has for long generation", 32, 2048, 512, 512, 0.9, "min-max", "softmax-mean"),
}
DEFAULT_PRESET = "accurate"
