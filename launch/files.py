# SPDX-License-Identifier: Apache-2.0
"""Reads untrusted files. Reading ends soon, whatever a file is and holds."""

from __future__ import annotations

import json
import os
import re
import stat
from math import inf
from pathlib import Path
from typing import Any

from sglang_freekv.config import Refusal

MIB = 1 << 20
MOST_NUMBER = 1 << 53
MOST_LAYERS = 4096
OBJECTS = re.compile(r"^(rope_scaling|rope_parameters|(\w+_)?(text|vision|quantization)_config)$")
COUNTED = re.compile(r"^num_(\w+_)?(layers|heads)$|^(hidden|vocab)_size$|^max_position_embeddings$")  # whole numbers in every config


def read_json(file: Path, most: int) -> Any:
    """The JSON of a regular file of at most ``most`` bytes.

    Raises:
        Refusal: it is not such a file, or its content is out of bounds.
    """
    return parse_json(_read(file, most).decode(errors="replace"), str(file))


def parse_json(text: str, source: str) -> Any:
    """The JSON in ``text``, within the bounds of a model's config.

    Args:
        source: name of its file or flag, for errors.

    Raises:
        Refusal: it is broken, nested too deep, or has a number that is too large.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refusal(f"{source}: expected JSON, found it broken ({error}); give the model's own") from None
    except ValueError:
        raise Refusal(f"{source}: expected JSON with numbers of at most 53 bits, found a longer one; give the model's own") from None
    except RecursionError:
        raise _too_deep(source) from None
    try:
        _expect_in_bounds(value, source)
    except RecursionError:
        raise _too_deep(source) from None
    return value


def _too_deep(source: str) -> Refusal:
    return Refusal(f"{source}: expected JSON of a model's config, found one that is nested too deep; give the model's own")


def _expect_in_bounds(value: Any, source: str, key: str = "") -> None:
    """Raise Refusal for a number that is too large. SGLang and transformers make lists with one item per layer, for example."""
    if OBJECTS.search(key) and not isinstance(value, dict | None):
        raise Refusal(f"{source}: expected {key}, an object, found {json.dumps(value)[:80]}; give the model's own")
    if isinstance(value, dict):
        for name, each in value.items():
            _expect_in_bounds(each, source, name)
    elif isinstance(value, list):
        for each in value:
            _expect_in_bounds(each, source, key)
    elif COUNTED.search(key) and (isinstance(value, str | float) or (isinstance(value, int) and value < 0)):
        raise Refusal(f"{source}: expected {key}, a whole number, found {json.dumps(value)[:80]}; give the model's own")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        most = MOST_LAYERS if re.search(r"layers?$", key) and isinstance(value, int) else MOST_NUMBER
        if not abs(value) <= most and abs(value) != inf:
            shown = str(value) if isinstance(value, float) or abs(value) < 1 << 100 else "a longer one"
            raise Refusal(f"{source}: expected {key or 'numbers'} of at most {most}, found {shown}; give the model's own")


def _read(file: Path, most: int, offset: int = 0) -> bytes:
    """The bytes of a regular file from ``offset`` on. It never waits for another process.

    Raises:
        Refusal: it is not a regular file, has more than ``most`` bytes, or cannot be read.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise Refusal(f"{file}: expected a file, found {kind_of(file.stat().st_mode)}; give the config.json of a model")
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            length = os.fstat(opened.fileno()).st_size
            if length - offset > most:
                raise Refusal(f"{file}: expected at most {most // MIB} MiB, found {length // MIB}; give the config.json of a model")
            opened.seek(offset)
            return opened.read(most) or b""
    except (OSError, ValueError) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{file}: expected a file that can be read, found {reason(error)}; give a model on this machine") from None


def reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


def kind_of(mode: int) -> str:
    kinds = {
        "a directory": stat.S_ISDIR,
        "a pipe": stat.S_ISFIFO,
        "a device": lambda m: stat.S_ISCHR(m) or stat.S_ISBLK(m),
        "a socket": stat.S_ISSOCK,
    }
    return next((name for name, applies in kinds.items() if applies(mode)), "something else")
