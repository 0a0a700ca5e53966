# SPDX-License-Identifier: Apache-2.0
"""KVFormat: how KV is stored, and how it is computed with."""

from __future__ import annotations

from typing import NamedTuple

import torch


class KVFormat(NamedTuple):
    """Types of KV.

    Args:
        storage: of keys and values in the host pool, in frames and in staging buffers.
        compute: of queries, of what attention computes with, of dense and window layers, and of digests.
        scales: of the scales that stored KV is multiplied by, one for each token and kv head of keys and of values; None if it has none.
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
        """The format that one of ``config.KV_DTYPES`` names, for a model that computes in ``compute``."""
        return cls.int8(compute) if kv_dtype == "int8" else cls.plain(compute)

    @property
    def vector_bytes(self) -> int:
        """Bytes beside the elements of a stored key or value of one token and kv head."""
        return 0 if self.scales is None else self.scales.itemsize
