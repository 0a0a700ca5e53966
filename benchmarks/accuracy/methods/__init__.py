"""Published methods by name: a method is one file here and one entry in ``METHODS``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.accuracy.coded import Coded
from benchmarks.accuracy.method import Method
from sglang_freekv.presets import PRESETS

from .arkvale import ArkVale
from .clusterkv import ClusterKV
from .freekv import FreeKV
from .full import Full
from .h2o import H2O
from .infinigen import InfiniGen
from .louiskv import LouisKV
from .quest import Quest
from .raas import RaaS
from .razor import RazorAttention
from .shadowkv import ShadowKV
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM

TWO_BIT = {"digest": "two-bit", "page": 8}
RECIPE = TWO_BIT | {"sink": 16, "window": 32}
ON_TURN, IN_HAND = {"selection": "on-turn"}, {"beyond": "in-hand"}
ACCURATE = PRESETS["accurate"]
ACCURATE_ROW = partial(  # the budget is the cell's
    FreeKV,
    **{name: getattr(ACCURATE, name) for name in ("tau", "pooling", "digest", "hysteresis")},
    page=ACCURATE.page_size,
    sink=ACCURATE.sink_tokens,
    window=ACCURATE.window_tokens,
)
BESIDE_RECIPE: dict[str, dict] = {
    "hysteresis": {"hysteresis": 1.4},
    "hysteresis-0.70": {"hysteresis": 0.7},
    "hysteresis-1.00": {"hysteresis": 1.0},
    "tau-0.80": {"tau": 0.8},
    "tau-0.80-hysteresis-1.00": {"tau": 0.8, "hysteresis": 1.0},
    "on-turn": ON_TURN,
    "on-turn-hysteresis-1.00": ON_TURN | {"hysteresis": 1.0},
    "on-turn-tau-0.85": ON_TURN | {"tau": 0.85},
    "on-turn-tau-0.80": ON_TURN | {"tau": 0.8},
    "on-turn-tau-0.80-hysteresis-0.70": ON_TURN | {"tau": 0.8, "hysteresis": 0.7},
    "on-turn-tau-0.80-hysteresis": ON_TURN | {"tau": 0.8, "hysteresis": 1.4},
    "top-p-0.95": {"top_p": 0.95},
    "top-p-0.98": {"top_p": 0.98},
    "top-p-0.95-in-hand": IN_HAND | {"top_p": 0.95},
    "top-p-0.95-in-hand-hysteresis-0.70": IN_HAND | {"top_p": 0.95, "hysteresis": 0.7},
    "tail-32": {"tail": 32},
    "tail-128": {"tail": 128},
    "tail-8192": {"tail": 8192},
}

METHODS: dict[str, Callable[..., Method]] = {
    "full": Full,
    "streaming_llm": StreamingLLM,
    "razor": RazorAttention,
    "h2o": H2O,
    "snapkv": SnapKV,
    "raas": RaaS,
    "raas-at-budget": partial(RaaS, keep_prompt=False),
    "quest": Quest,
    "quest-page-8": partial(Quest, page=8),
    "arkvale": ArkVale,
    "arkvale-narrow-page-8": partial(ArkVale, page=8, sink=16, window=32),
    "shadowkv": ShadowKV,
    "infinigen": InfiniGen,
    "infinigen-0.30": partial(InfiniGen, columns=0.3),
    "clusterkv": ClusterKV,
    "louiskv": LouisKV,
    "freekv": FreeKV,
    "freekv-accurate": ACCURATE_ROW,
    "freekv-accurate-int8": partial(Coded, ACCURATE_ROW()),
    "freekv-accurate-fp8": partial(Coded, ACCURATE_ROW(), "fp8_e4m3"),
    "freekv-no-correction": partial(FreeKV, correction=False),
    "freekv-min-max": partial(FreeKV, digest="min-max"),
    "freekv-page-16": partial(FreeKV, page=16),
    "freekv-page-8": partial(FreeKV, page=8),
    "freekv-narrow": partial(FreeKV, sink=32, window=64),
    "freekv-narrow-page-16": partial(FreeKV, page=16, sink=16, window=32),
    "freekv-narrow-page-8": partial(FreeKV, page=8, sink=16, window=32),
    "freekv-two-bit": partial(FreeKV, digest="two-bit"),
    "freekv-two-bit-page-8": partial(FreeKV, **TWO_BIT),
    "freekv-two-bit-narrow-page-8": partial(FreeKV, **RECIPE),
    "freekv-two-bit-narrow-page-16": partial(FreeKV, **RECIPE | {"page": 16}),
    "freekv-two-bit-narrow-page-16-tau-0.80-hysteresis-1.00": partial(FreeKV, **RECIPE | {"page": 16, "tau": 0.8, "hysteresis": 1.0}),
    "freekv-two-bit-page-8-sink-0-window-16": partial(FreeKV, **TWO_BIT, sink=0, window=16),
    "freekv-two-bit-page-8-sink-8-window-16": partial(FreeKV, **TWO_BIT, sink=8, window=16),
    "freekv-two-bit-page-8-sink-16-window-16": partial(FreeKV, **TWO_BIT, sink=16, window=16),
    "freekv-two-bit-page-8-sink-16-window-64": partial(FreeKV, **TWO_BIT, sink=16, window=64),
    "freekv-max-narrow-page-8": partial(FreeKV, pooling="max", page=8, sink=16, window=32),
    "freekv-max-pool": partial(FreeKV, pooling="softmax-max"),
    "freekv-hysteresis": partial(FreeKV, hysteresis=1.4),
    "freekv-two-bit-page-8-hysteresis": partial(FreeKV, **TWO_BIT, hysteresis=1.4),
    "freekv-early-query": partial(FreeKV, early=True),
    "freekv-unscaled": partial(FreeKV, scaled=False),
    "freekv-tau-0.70": partial(FreeKV, tau=0.70),
    "freekv-tau-0.80": partial(FreeKV, tau=0.80),
    "freekv-tau-0.85": partial(FreeKV, tau=0.85),
    "freekv-tau-0.95": partial(FreeKV, tau=0.95),
    "freekv-tau-1.00": partial(FreeKV, tau=1.00),
}
METHODS |= {f"freekv-two-bit-narrow-page-8-{name}": partial(FreeKV, **(RECIPE | settings)) for name, settings in BESIDE_RECIPE.items()}
