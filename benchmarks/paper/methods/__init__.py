"""The methods of figure 7, by the names of their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.paper.method import Method, Work

from .engine import Engine, LouisKV
from .full import Full
from .infinigen import InfiniGen
from .published import ArkValeCopies, InfiniGenCopies
from .raas import RaaS
from .razor import Razor
from .shadowkv import ShadowKV
from .window import Window

METHODS: dict[str, Callable[[Work], Method]] = {
    "full": Full,
    "window": Window,
    "raas": RaaS,
    "razor": Razor,
    "quest": partial(Engine, corrected=1.0, resident=True),
    "arkvale": partial(Engine, corrected=1.0),
    "arkvale-copies": ArkValeCopies,
    "shadowkv": ShadowKV,
    "infinigen": InfiniGen,
    "infinigen-copies": InfiniGenCopies,
    "louiskv": LouisKV,
    "freekv": Engine,
}
