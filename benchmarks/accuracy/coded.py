"""KV in 8 bits, as ``--freekv-kv-dtype int8`` or SGLang's fp8 stores it: what methods, and the prefill before them, see of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.accuracy.method import AS_COMPUTED, Budget, Cache, Method, Prompt
from sglang_freekv.config import STORED_DTYPES
from sglang_freekv.kernels.reference_codes import code_floats, code_vectors, decode_vectors
from sglang_freekv.kernels.reference_rotation import rotate
from sglang_freekv.memory_pool.kv_format import FLOATS_OF_8_BITS


@dataclass(frozen=True)
class Coded:
    """A method in layers that store KV as ``kv_dtype`` says; the model hands it KV as it leaves the codes."""

    method: Method
    kv_dtype: str = "int8"

    def __post_init__(self) -> None:
        if self.kv_dtype not in STORED_DTYPES:
            raise ValueError(f"kv_dtype {self.kv_dtype}: expected one of {', '.join(STORED_DTYPES)}")

    @property
    def prompt_queries(self) -> int | None:
        return self.method.prompt_queries

    def begin(self, prompt: Prompt, budget: Budget) -> Cache:
        if prompt.kv_dtype != self.kv_dtype:
            raise ValueError(f"kv_dtype {self.kv_dtype}: expected a prompt that was prefilled with it, got one with {prompt.kv_dtype}")
        return self.method.begin(prompt, budget)


def kv_dtype_of(method: Method) -> str:
    """How a method's layers store KV."""
    return getattr(method, "kv_dtype", AS_COMPUTED)


def kv_dtypes_of(method: Method, dense_layers: int, layers: int) -> tuple[str, ...]:
    """How each layer stores KV. Dense layers have SGLang's fp8, too, and no int8."""
    own = kv_dtype_of(method)
    return (own if own in FLOATS_OF_8_BITS else AS_COMPUTED,) * dense_layers + (own,) * (layers - dense_layers)


def stored(keys: torch.Tensor, values: torch.Tensor, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[..., D]`` as attention, digests and selection see what is stored of them: keys in int8 are rotated back.

    Raises:
        ValueError: KV is in int8, and 8 does not divide D.
    """
    if kv_dtype == AS_COMPUTED:
        return keys, values
    if kv_dtype in FLOATS_OF_8_BITS:
        as_floats = (code_floats(each, FLOATS_OF_8_BITS[kv_dtype]) for each in (keys, values))
        return tuple(each.to(keys.dtype) for each in as_floats)
    rotated, decoded_values = (decode_vectors(*code_vectors(each)) for each in (_rotated(keys), values))
    return _rotated(rotated).to(keys.dtype), decoded_values.to(values.dtype)


def _rotated(keys: torch.Tensor) -> torch.Tensor:
    """The rotation is its own inverse."""
    return rotate(keys, keys)[1]
