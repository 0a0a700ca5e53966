# SPDX-License-Identifier: Apache-2.0
"""KVFormat: how KV is stored, and how it is computed with."""

from __future__ import annotations

from typing import NamedTuple

import torch


class KVFormat(NamedTuple):
    """Types of KV.

    Args:
        storage: of keys and values in the host pool and in slots.
        compute: of queries, of what attention reads, of staged contexts and of digests.
        scales: of the scales that stored KV is multiplied by; None if it has none.
    """

    storage: torch.dtype
    compute: torch.dtype
    scales: torch.dtype | None = None

    @classmethod
    def plain(cls, dtype: torch.dtype) -> KVFormat:
        """KV that is stored as it is computed with."""
        return cls(dtype, dtype)
