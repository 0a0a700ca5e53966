# SPDX-License-Identifier: Apache-2.0
"""Extend attention: causal attention of new tokens over ``[prefix | new]``. A batch is planned once for all layers."""

from __future__ import annotations

import torch

from sglang_freekv.kernels import reference


class ReferenceExtend:
    """Extend attention in PyTorch, one request after the other."""

    def plan(self, query_lens: list[int], key_lens: list[int]) -> None:
        self.query_lens, self.key_lens = query_lens, key_lens

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return reference.extend_attention(queries, keys, values, self.query_lens, self.key_lens, scale)


class FlashInferExtend:
    """Extend attention by FlashInfer's ragged prefill. Its causal mask ends at each request's last key, as the reference's does.

    Args:
        query_heads, kv_heads, head_dim, dtype: shape and dtype of the model's attention on this rank.
        workspace_bytes: device memory in which FlashInfer keeps partial results.
    """

    def __init__(self, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, workspace_bytes: int) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        self.shape, self.dtype = (query_heads, kv_heads, head_dim), dtype
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self.wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")

    def plan(self, query_lens: list[int], key_lens: list[int]) -> None:
        starts = (torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lens in (query_lens, key_lens))
        self.wrapper.plan(*starts, *self.shape, causal=True, q_data_type=self.dtype)

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return self.wrapper.forward(queries.contiguous(), keys, values, causal=True, sm_scale=scale)
