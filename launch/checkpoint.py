# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: the files of a model on this machine. Reading them always ends, whatever they hold, and never runs their code."""

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

MOST_BYTES = 16 * MIB  # of a config; those of published models have at most about 1 MiB
MOST_INDEX_BYTES = MOST_HEADER_BYTES = 100 * MIB  # safetensors' own limit of a header
ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)  # a Hugging Face id
MOST_FILES = 100_000
QUANTIZATION_FILES = ("hf_quant_config.json", "quant_model_description.json")  # SGLang reads these beside config.json


@dataclass(frozen=True)
class Tensor:
    """A tensor in a safetensors file.

    Args:
        dtype: its name in safetensors, such as "BF16".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A model on this machine.

    Args:
        asked: the user's ``--model-path``.
        file: the model's config.json.
        config: the content of ``file``.
    """

    asked: str
    file: Path
    config: dict

    @classmethod
    def find(cls, asked: str) -> Checkpoint:
        """The checkpoint of a directory, a config.json, or a Hugging Face id in the local cache.

        Raises:
            Refusal: it was not found, or its config.json does not describe a model.
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
        """The ``--model-path`` for a server: the id, or the directory."""
        return str(self.directory) if Path(self.asked) == self.file and self._has_neighbours else self.asked

    @property
    def _has_neighbours(self) -> bool:
        """Whether the files beside the config belong to the same model."""
        return self.file.name == "config.json"

    def quantization_files(self) -> Iterator[tuple[str, dict]]:
        """Names and contents of the files beside config.json that tell SGLang how the weights are quantised."""
        for name in QUANTIZATION_FILES:
            file = self.directory / name
            if self._has_neighbours and file.exists():
                yield name, read_json(file, MOST_BYTES)

    def tensors(self) -> list[Tensor] | None:
        """All tensors, from the headers of the safetensors files; None if a file is absent.

        Raises:
            Refusal: a file is not in the format of safetensors.
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
        """Bytes of all weights, from the index of the files; None without an index."""
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
    """config.json of a Hugging Face id in the local cache, or None. The network is not used."""
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
    """Tensors of a safetensors file, from the header at its beginning.

    Raises:
        Refusal: the file is not in the format of safetensors.
    """
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
