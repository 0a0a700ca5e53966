# SPDX-License-Identifier: Apache-2.0
"""KVFormat: how KV is stored, and how it is computed with."""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOATS_OF_8_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}  # by their names in SGLang


class KVFormat(NamedTuple):
    """Types of KV.

    Args:
        storage: of keys and values in the host pool, in frames and in staging buffers.
        compute: of queries, of what attention computes with, and of digests.
        scales: of the scales that stored KV is multiplied by, one for each token and kv head of keys and of values; None if it has none.
            Only KV that a flag of ours codes has any, and its keys are rotated.
    """

    storage: torch.dtype
    compute: torch.dtype
    scales: torch.dtype | None = None

    @classmethod
    def plain(cls, dtype: torch.dtype) -> KVFormat:
        """KV that is stored as it is computed with."""
        return cls(dtype, dtype)

    @classmethod
    def int8(cls, compute: torch.dtype) -> KVFormat:
        """Codes of 8 bits with scales of 16."""
        return cls(torch.int8, compute, torch.float16)

    @classmethod
    def of(cls, kv_dtype: str, compute: torch.dtype) -> KVFormat:
        """The format that one of ``config.STORED_DTYPES`` names, for a model that computes in ``compute``."""
        if kv_dtype == "int8":
            return cls.int8(compute)
        return cls(FLOATS_OF_8_BITS.get(kv_dtype, compute), compute)

    @property
    def is_coded(self) -> bool:
        """Whether KV is decoded before attention of an extend computes with it."""
        return self.storage != self.compute

    @property
    def stock(self) -> torch.dtype:
        """Of dense and window layers, which SGLang stores: its ``--kv-cache-dtype``. Codes with scales are of retrieval layers alone."""
        return self.storage if self.scales is None else self.compute

    @property
    def vector_bytes(self) -> int:
        """Bytes beside the elements of a stored key or value of one token and kv head."""
        return 0 if self.scales is None else self.scales.itemsize
