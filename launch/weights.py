# SPDX-License-Identifier: Apache-2.0
"""Weights: bytes of a model's weights on each rank, from the headers of its files, or from a model that is built without storage."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from sglang_freekv.launch.checkpoint import Tensor
from sglang_freekv.launch.quantization import Quantization

FLOATS = ("F64", "F32", "F16", "BF16")  # SGLang casts these to the model's dtype


@dataclass(frozen=True)
class Weights:
    """The sizes of all weights of a model.

    Args:
        divided: bytes of matrices, which are divided among ranks.
        repeated: bytes of norms, biases and scales, which every rank holds.
        parameters: number of parameters; None if only bytes are known.
        origin: source of these numbers, in words.
    """

    divided: int
    repeated: int
    parameters: int | None
    origin: str

    @property
    def num_bytes(self) -> int:
        return self.divided + self.repeated

    def rank_bytes(self, ranks: int, repeated_kv: float = 0.0) -> int:
        """Bytes of one of ``ranks`` ranks.

        Args:
            repeated_kv: bytes of key and value projections that a rank has beyond its share.
        """
        return int(self.divided / ranks + self.repeated + repeated_kv)


@dataclass(frozen=True)
class Part:
    """A parameter of a model.

    Args:
        module: dotted name of its module; for a stack of experts, of the parameter.
        shape: of the parameter.
        quantised: whether it is the matrix of a linear layer, or a stack of these, which a quantised checkpoint may store in fewer bits.
    """

    module: str
    shape: tuple[int, ...]
    quantised: bool


def from_files(tensors: Iterable[Tensor], element_bytes: int | None) -> Weights:
    """The sizes of the tensors in a checkpoint's files.

    Args:
        tensors: all tensors.
        element_bytes: bytes of the dtype to which floating-point tensors are cast; None if none is cast.
    """
    divided, repeated, parameters = 0, 0, 0
    for tensor in tensors:
        cast = element_bytes is not None and tensor.dtype in FLOATS
        num_bytes = prod(tensor.shape) * element_bytes if cast else tensor.num_bytes
        parameters += prod(tensor.shape)
        divided, repeated = (divided + num_bytes, repeated) if len(tensor.shape) > 1 else (divided, repeated + num_bytes)
    return Weights(divided, repeated, parameters if element_bytes is not None else None, "by the headers of its files")


def from_parts(parts: Iterable[Part], element_bytes: int, quantization: Quantization | None) -> Weights:
    """The sizes of a model's parameters. Each element takes ``element_bytes``, unless its matrix has a scheme in ``quantization``."""
    divided, repeated, parameters = 0, 0, 0
    for part in parts:
        count = prod(part.shape)
        scheme = quantization.scheme_of(part.module) if quantization and part.quantised else None
        num_bytes = prod(part.shape[:-2]) * scheme.num_bytes(*part.shape[-2:]) if scheme else count * element_bytes
        parameters += count
        divided, repeated = (divided + num_bytes, repeated) if len(part.shape) > 1 else (divided, repeated + num_bytes)
    return Weights(divided, repeated, parameters, "computed from its config")


def parts_of(config) -> Iterator[Part] | None:
    """Parameters of the model of a transformers config; None if transformers has no such model. It is built without storage.

    Raises:
        Exception: any error from building the model, because the config is untrusted.
    """
    import transformers

    model_class = getattr(transformers, config.architectures[0], None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        return None
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = model_class._from_config(config, attn_implementation="eager")  # type: ignore[attr-defined]
    return _parts(model)


def _parts(model: Any) -> Iterator[Part]:
    seen, head = set(), model.get_output_embeddings()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            stacked = parameter.ndim == 3
            linear = isinstance(module, torch.nn.Linear) and name == "weight" and module is not head
            yield Part(f"{module_name}.{name}" if stacked else module_name, tuple(parameter.shape), linear or stacked)
