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
from pathlib import Path

from sglang_freekv.config import Refusal
from sglang_freekv.launch.files import MIB, MOST_NUMBER, kind_of, read_json, reason

MOST_BYTES = 16 * MIB  # of a config; the largest of published models have about one
MOST_INDEX_BYTES = MOST_HEADER_BYTES = 100 * MIB  # the format's own limit of a header
ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)  # of a model at Hugging Face
MOST_FILES = 100_000
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
                get = f"`hf download {asked} --include '*.json'`, or give a directory" if ID.fullmatch(asked) else "give one of these"
                raise Refusal(
                    f"--model-path {asked[:200]}: expected a directory with config.json, such a file, or a Hugging Face id in the local "
                    f"cache, found {reason(error)}; {get}"
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


def _in_cache(repository: str) -> Path | None:
    """config.json of an id in Hugging Face's cache; None if it is no id or not there. Asks nobody else."""
    if not ID.fullmatch(repository):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _header(file: Path) -> Iterator[Tensor]:
    """Tensors of a safetensors file, by its first bytes."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(kind_of(file.stat().st_mode))
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
        raise Refusal(f"{file}: expected safetensors, found {reason(error)}; download the file again, or give --weights-gib") from None
