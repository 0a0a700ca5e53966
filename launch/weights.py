# SPDX-License-Identifier: Apache-2.0
"""Weights: how many bytes of a model each rank holds, by the headers of its files, or by a model without storage."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from sglang_freekv.launch.checkpoint import Tensor
from sglang_freekv.launch.quantization import Quantization

FLOATS = ("F64", "F32", "F16", "BF16")  # that SGLang casts to the model's dtype


@dataclass(frozen=True)
class Weights:
    """All weights of a model.

    Args:
        divided: bytes of matrices, which ranks divide.
        repeated: bytes that every rank has: norms, biases, scales.
        parameters: None where only bytes are known.
        origin: where that is from.
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
            repeated_kv: bytes of key and value projections that each rank has beyond its share.
        """
        return int(self.divided / ranks + self.repeated + repeated_kv)


@dataclass(frozen=True)
class Part:
    """A parameter of a model.

    Args:
        module: dotted name of what has it; of a stack of experts, with the name of the parameter.
        quantised: a linear layer, or a stack of them: what a quantised checkpoint may store in fewer bits.
    """

    module: str
    shape: tuple[int, ...]
    quantised: bool


def from_files(tensors: Iterable[Tensor], element_bytes: int | None) -> Weights:
    """Of what headers tell.

    Args:
        element_bytes: of the dtype that floating-point tensors are cast to; None keeps all as they are.
    """
    divided, repeated, parameters = 0, 0, 0
    for tensor in tensors:
        cast = element_bytes is not None and tensor.dtype in FLOATS
        num_bytes = prod(tensor.shape) * element_bytes if cast else tensor.num_bytes
        parameters += prod(tensor.shape)
        divided, repeated = (divided + num_bytes, repeated) if len(tensor.shape) > 1 else (divided, repeated + num_bytes)
    return Weights(divided, repeated, parameters if element_bytes is not None else None, "by the headers of its files")


def from_parts(parts: Iterable[Part], element_bytes: int, quantization: Quantization | None) -> Weights:
    """Of a model's parameters, in ``element_bytes`` each where ``quantization`` does not tell otherwise."""
    divided, repeated, parameters = 0, 0, 0
    for part in parts:
        count = prod(part.shape)
        scheme = quantization.scheme_of(part.module) if quantization and part.quantised else None
        num_bytes = prod(part.shape[:-2]) * scheme.num_bytes(*part.shape[-2:]) if scheme else count * element_bytes
        parameters += count
        divided, repeated = (divided + num_bytes, repeated) if len(part.shape) > 1 else (divided, repeated + num_bytes)
    return Weights(divided, repeated, parameters, "computed from its config")


def parts_of(config) -> Iterator[Part] | None:
    """Parameters of a model of this transformers config, which is built without storage; None where transformers has no such model.

    Raises:
        Exception: whatever building it raises; the config is a stranger's.
    """
    import transformers

    model_class = getattr(transformers, config.architectures[0], None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        return None
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = model_class._from_config(config, attn_implementation="eager")
    return _parts(model)


def _parts(model: torch.nn.Module) -> Iterator[Part]:
    seen, head = set(), model.get_output_embeddings()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            stacked = parameter.ndim == 3
            linear = isinstance(module, torch.nn.Linear) and name == "weight" and module is not head
            yield Part(f"{module_name}.{name}" if stacked else module_name, tuple(parameter.shape), linear or stacked)
