# SPDX-License-Identifier: Apache-2.0
"""Flag: one option of the user's, how it is typed, and how a setting of FreeKVConfig is read from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from sglang_freekv.config import DEFAULT_PAGE_SIZE, FreeKVConfig, Refusal, typed
from sglang_freekv.layer_taus import LayerTaus
from sglang_freekv.refusal import shown


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Args:
        typed: arguments of ``add_argument`` that read it from a command line.
        read: ``(name of the option, value)`` -> the setting, for values that a program gives; raises Refusal for another kind of value.
    """

    typed: dict[str, Any]
    read: Callable[[str, Any], Any]


@dataclass(frozen=True)
class Flag:
    """One option.

    Args:
        setting: the field of FreeKVConfig that it sets.
        kind: of its value.
        help: its text in ``--help`` and in the page of flags.
    """

    setting: str
    kind: Kind
    help: str

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``add_argument``."""
        return self.kind.typed | {"help": self.help}


def one_of(*choices: str) -> Kind:
    """One of ``choices``, which FreeKVConfig checks. What is no word is read as the text that the refusal shows."""
    return Kind({"choices": choices}, lambda name, value: shown(value))


def _whole(unit: str, example: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool) or abs(int(value)) > sys.float_info.max:
            raise Refusal(
                f"{typed(name)} {shown(value)}: expected a whole number of {unit} that a float can hold, found type "
                f"{type(value).__name__}; use for example {typed(name)} {example}"
            )
        return int(value)

    return read


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, Real) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    raise Refusal(
        f"{typed(name)} {shown(value)}: expected a number that a float can hold, found type {type(value).__name__}; use one, or leave it out"
    )


def _layers(name: str, value: Any) -> tuple[int, ...]:
    """Layer numbers, ascending, from ``"0,1"``, ``["0", "1"]`` (a YAML list), ``(0, 1)`` or ``0``. ``""`` and ``"none"`` mean no layer."""
    text = ",".join(map(shown, value)) if isinstance(value, list | tuple) else shown(value, sys.maxsize)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if [word.lower() for word in words] == ["none"] or not text.strip():
        return ()
    try:
        if words:
            return tuple(sorted({int(word) for word in words}))
    except ValueError:
        pass
    raise Refusal(f"{typed(name)} {shown(text)}: expected comma-separated layer numbers or none; use for example 0")


TOKENS = Kind({"type": int, "metavar": "TOKENS"}, _whole("tokens", FreeKVConfig.budget_tokens))
PAGE = Kind({"type": int, "metavar": "TOKENS"}, _whole("tokens", DEFAULT_PAGE_SIZE))
STEPS = Kind({"type": int, "metavar": "STEPS"}, _whole("decode steps", 100))
NATS = Kind({"type": float, "metavar": "NATS"}, _number)
COSINE = Kind({"type": float, "metavar": "COSINE"}, _number)
TAUS = Kind({"metavar": "FILE"}, LayerTaus.read)
GIBIBYTES = Kind({"type": float, "metavar": "GIB"}, _number)
LAYERS = Kind({"nargs": "+", "metavar": "LAYERS"}, _layers)
