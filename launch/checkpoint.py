# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: the files of a model on this machine. Whatever they hold, reading them ends, and nothing of them is executed."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from sglang_freekv.config import Refusal

MIB = 1 << 20
MOST_BYTES = 16 * MIB  # of a config; the largest of published models have about one
MOST_INDEX_BYTES = MOST_HEADER_BYTES = 100 * MIB  # the format's own limit of a header
MOST_FILES = 100_000
MOST_NUMBER = 1 << 53
MOST_LAYERS = 4096
COUNTED = re.compile(r"^num_(\w+_)?(layers|heads)$|^(hidden|vocab)_size$|^max_position_embeddings$")  # by whole numbers in every config
QUANTIZATION_FILES = ("hf_quant_config.json", "quant_model_description.json")  # that SGLang reads beside config.json


@dataclass(frozen=True)
class Tensor:
    """A tensor of a weights file.

    Args:
        dtype: as safetensors writes it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A model on this machine.

    Args:
        asked: as it was typed.
        file: its config.json.
        config: what that holds.
    """

    asked: str
    file: Path
    config: dict

    @classmethod
    def find(cls, asked: str) -> Checkpoint:
        """Of a directory, a config.json, or an id in Hugging Face's cache.

        Raises:
            Refusal: there is none, or it is no config of a model.
        """
        file = Path(asked)
        try:
            if stat.S_ISDIR(file.stat().st_mode):
                file = file / "config.json"
        except (OSError, ValueError) as error:
            file = _in_cache(asked)
            if file is None:
                raise Refusal(
                    f"--model-path {asked[:200]}: expected a directory with config.json, such a file, or a Hugging Face id in the local "
                    f"cache, found {_reason(error)}; get it with `hf download {asked[:100]} --include '*.json'`, or give a directory"
                ) from None
        config = read_json(file, MOST_BYTES)
        names = config.get("architectures") if isinstance(config, dict) else None
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise Refusal(f"{file}: expected architectures, a list of names, found none; give the config.json of a Hugging Face model")
        if not isinstance(config.get("model_type", ""), str):
            raise Refusal(f"{file}: expected model_type, a name, found another value; give the config.json of a Hugging Face model")
        return cls(asked, file, config)

    @property
    def directory(self) -> Path:
        return self.file.parent

    @property
    def name(self) -> str:
        """What a server is started with: the id, or the directory."""
        return str(self.directory) if Path(self.asked) == self.file and self._has_neighbours else self.asked

    @property
    def _has_neighbours(self) -> bool:
        """Whether what lies beside the config is of the same model."""
        return self.file.name == "config.json"

    def quantization_files(self) -> Iterator[tuple[str, dict]]:
        """What lies beside config.json and tells SGLang how the weights are quantised."""
        for name in QUANTIZATION_FILES:
            file = self.directory / name
            if self._has_neighbours and file.exists():
                yield name, read_json(file, MOST_BYTES)

    def tensors(self) -> list[Tensor] | None:
        """What the headers of the weights' files tell; None where not all of the files are here.

        Raises:
            Refusal: a file is none of its format.
        """
        names, _ = self._index()
        if names is None:
            with os.scandir(self.directory) as entries:
                names = [entry.name for entry in islice(entries, MOST_FILES) if entry.name.endswith(".safetensors")]
            names = [name for name in names if not name.startswith("consolidated")] or names
        files = [self.directory / name for name in sorted(names)]
        if not self._has_neighbours or not files or not all(file.exists() for file in files):
            return None
        return [tensor for file in files for tensor in _header(file)]

    def total_size(self) -> int | None:
        """Bytes of all weights by the index; None where there is none."""
        return self._index()[1]

    def _index(self) -> tuple[list[str] | None, int | None]:
        file = self.directory / "model.safetensors.index.json"
        if not self._has_neighbours or not file.exists():
            return None, None
        index = read_json(file, MOST_INDEX_BYTES)
        try:
            names, total = set(index["weight_map"].values()), index.get("metadata", {}).get("total_size")
            plain = all(isinstance(name, str) and "/" not in name for name in names)
        except (AttributeError, KeyError, TypeError):
            plain = False
        if not plain:
            raise Refusal(f"{file}: expected weight_map, an object of file names, found another value; download the file again")
        return list(names), int(total) if isinstance(total, int | float) and 0 < total < MOST_NUMBER else None


def read_json(file: Path, most: int) -> Any:
    """The JSON of a regular file of at most ``most`` bytes.

    Raises:
        Refusal: it is no such file, or its content is out of bounds.
    """
    return parse_json(_read(file, most).decode(errors="replace"), str(file))


def parse_json(text: str, source: str) -> Any:
    """JSON within the bounds of what a config may hold.

    Raises:
        Refusal: it is broken, too deep, or has a number that no model has.
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
    """No number that would keep somebody counting for ever: lists as long as a model has layers are made of configs."""
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


def _in_cache(repository: str) -> Path | None:
    """config.json of an id in Hugging Face's cache; None if it is no id or not there. Asks nobody else."""
    if not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", repository, flags=re.ASCII):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _read(file: Path, most: int, offset: int = 0) -> bytes:
    """At most ``most`` bytes of a regular file; never waits for a writer.

    Raises:
        Refusal: it is no regular file, or longer.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise Refusal(f"{file}: expected a file, found {_kind(file.stat().st_mode)}; give the config.json of a model")
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            length = os.fstat(opened.fileno()).st_size
            if length - offset > most:
                raise Refusal(f"{file}: expected at most {most // MIB} MiB, found {length // MIB}; give the config.json of a model")
            opened.seek(offset)
            return opened.read(most) or b""
    except (OSError, ValueError) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{file}: expected a file that can be read, found {_reason(error)}; give a model on this machine") from None


def _header(file: Path) -> Iterator[Tensor]:
    """Tensors of a safetensors file, by its first bytes."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(_kind(file.stat().st_mode))
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MOST_HEADER_BYTES:
                raise ValueError("a header that is too long")
            for name, entry in json.loads(opened.read(length)).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    if not 0 <= begin <= end < MOST_NUMBER:
                        raise ValueError("a tensor of no size")
                    yield Tensor(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), end - begin)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(f"{file}: expected safetensors, found {_reason(error)}; download the file again, or give --weights-gib") from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


def _kind(mode: int) -> str:
    kinds = {
        "a directory": stat.S_ISDIR,
        "a pipe": stat.S_ISFIFO,
        "a device": lambda m: stat.S_ISCHR(m) or stat.S_ISBLK(m),
        "a socket": stat.S_ISSOCK,
    }
    return next((name for name, applies in kinds.items() if applies(mode)), "something else")
