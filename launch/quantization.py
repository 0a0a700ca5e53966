# SPDX-License-Identifier: Apache-2.0
"""Quantization: bytes of the matrices of a quantised checkpoint, from its config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")  # keys that list modules in the model's dtype
WORD_BITS = 32  # integers are packed into words of 32 bits


@dataclass(frozen=True)
class Scheme:
    """The storage of a matrix ``[out, in]``.

    Args:
        bits: bits of an element.
        rows, columns: size of the block that shares a scale; 0 is the whole matrix in that direction.
        scale_bytes: bytes of a scale.
        packed: whether elements are packed into words of 32 bits, along ``in``.
        zeros: whether each scale has a zero point of ``bits`` bits.
        index: whether each input has the index of its group, in 4 bytes.
        more: further bytes for each matrix.
    """

    bits: int
    rows: int = 1
    columns: int = 0
    scale_bytes: int = 2
    packed: bool = False
    zeros: bool = False
    index: bool = False
    more: int = 0

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of one matrix with its scales."""
        scales = ceil(outputs / (self.rows or outputs)) * ceil(inputs / (self.columns or inputs))
        elements = ceil(inputs * self.bits / WORD_BITS) * WORD_BITS // 8 * outputs if self.packed else outputs * inputs * self.bits // 8
        zeros = ceil(scales * self.bits / 8) if self.zeros else 0
        return elements + scales * self.scale_bytes + zeros + 4 * inputs * self.index + self.more


NVFP4 = Scheme(bits=4, columns=16, scale_bytes=1, more=8)
MXFP4 = Scheme(bits=4, columns=32, scale_bytes=1)
MXFP8 = Scheme(bits=8, columns=32, scale_bytes=1)
FP8_TENSOR = Scheme(bits=8, rows=0, scale_bytes=4)


@dataclass(frozen=True)
class Quantization:
    """The schemes of a checkpoint's matrices.

    Args:
        schemes: pairs of module patterns and the scheme of matching modules. The first match counts.
        ignored: patterns of modules in the model's dtype.
    """

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """Scheme of a module by its dotted name; None if it is in the model's dtype."""
        if _matches(module, self.ignored):
            return None
        return next((scheme for patterns, scheme in self.schemes if "Linear" in patterns or _matches(module, patterns)), None)


def quantization_of(method: str | None, config: Mapping[str, Any] | None) -> Quantization | None:
    """The quantization of a checkpoint; None if it is not quantised.

    Args:
        method: the name of the method in SGLang's ModelConfig.
        config: the checkpoint's own description.

    Raises:
        AttributeError, KeyError, StopIteration, TypeError, ValueError: the method is not in ``METHODS``, or ``config`` lacks a field.
    """
    if method in (None, "unquant"):
        return None
    config = config or {}
    ignored = tuple(name for key in IGNORED for name in config.get(key) or ())
    if method.startswith("compressed"):
        return Quantization(tuple(_compressed(group, str(config.get("format"))) for group in config["config_groups"].values()), ignored)
    return Quantization((((("re:.*experts.*",) if method == "mxfp4" else ("Linear",)), METHODS[method](config)),), ignored)


def _fp8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size")
    return Scheme(bits=8, rows=int(block[0]), columns=int(block[1]), scale_bytes=4) if block else FP8_TENSOR


def _awq(config: Mapping[str, Any]) -> Scheme:
    return Scheme(int(config["bits"]), columns=_group(config["group_size"]), packed=True, zeros=bool(config.get("zero_point", True)))


def _gptq(config: Mapping[str, Any]) -> Scheme:
    return Scheme(int(config["bits"]), columns=_group(config["group_size"]), packed=True, zeros=True, index=True)


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    return next(scheme for name, scheme in (("FP4", NVFP4), ("FP8", FP8_TENSOR)) if name in config["quant_algo"])


def _compressed(group: Mapping[str, Any], form: str) -> tuple[tuple[str, ...], Scheme]:
    """Module patterns and scheme of a group of a compressed-tensors checkpoint; ``form`` is the checkpoint's format."""
    weights, targets = group["weights"], tuple(group["targets"])
    bits, strategy = int(weights["num_bits"]), str(weights["strategy"])
    form = str(group.get("format") or form)
    if weights["type"] == "float" and bits == 4:
        return targets, MXFP4 if "mxfp4" in form else NVFP4
    columns = _group(weights.get("group_size") or -1)
    if strategy == "block":
        rows, columns = map(int, weights["block_structure"])
    else:
        rows = 0 if strategy == "tensor" else 1
    packed = form.startswith("pack")
    more = 16 if packed else 0  # a packed matrix stores its shape too
    return targets, Scheme(bits, rows, columns, packed=packed, zeros=not weights.get("symmetric", True), more=more)


METHODS = {
    "fp8": _fp8,
    "w8a8_fp8": lambda config: Scheme(bits=8, scale_bytes=4),
    "w8a8_int8": lambda config: Scheme(bits=8, scale_bytes=4),
    "mxfp8": lambda config: MXFP8,
    "mxfp4": lambda config: MXFP4,
    **dict.fromkeys(("awq", "awq_marlin"), _awq),
    **dict.fromkeys(("gptq", "gptq_marlin"), _gptq),
    **dict.fromkeys(("modelopt", "modelopt_fp8", "modelopt_fp4"), _modelopt),
}


def _group(tokens: Any) -> int:
    """Inputs that share a scale; 0 is all of them, which checkpoints write as -1."""
    return max(0, int(tokens))


def _matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the module: as part of its dotted name, with wildcards, or as a regular expression after ``re:``."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], module):
                return True
        elif f".{pattern}." in f".{module}." or fnmatchcase(module, pattern):
            return True
    return False
