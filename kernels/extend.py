# SPDX-License-Identifier: Apache-2.0
"""Extend attention: causal attention of new tokens over ``[prefix | new]``. A batch is planned once for all layers.

The contexts of a staged extend lie end to end in a staging buffer. Those of an extend in place lie in frames of the device cache.
"""

from __future__ import annotations

import torch

from sglang_freekv.kernels import reference
from sglang_freekv.kernels.ragged import ragged, to_device


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
        workspace: uint8 device memory in which FlashInfer keeps partial results of one call. All attention on one stream may share it.
    """

    def __init__(self, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, workspace: torch.Tensor) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        self.shape, self.dtype = (query_heads, kv_heads, head_dim), dtype
        self.wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")

    def plan(self, query_lens: list[int], key_lens: list[int]) -> None:
        self.wrapper.plan(_bounds(query_lens), _bounds(key_lens), *self.shape, causal=True, q_data_type=self.dtype)

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return self.wrapper.forward(queries.contiguous(), keys, values, causal=True, sm_scale=scale)


class ReferencePagedExtend:
    """Extend attention in place in PyTorch: gathers each context from its frames."""

    def plan(self, query_lens: list[int], key_lens: list[int], frames: torch.Tensor) -> None:
        """As ``FlashInferPagedExtend.plan``."""
        self.query_lens, self.key_lens, self.frames = query_lens, key_lens, frames

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """As ``FlashInferPagedExtend.__call__``."""
        page_size = keys.shape[1]
        owners, tokens = (to_device(x, self.frames.device) for x in ragged(torch.tensor(self.key_lens)))
        where = self.frames[owners, tokens // page_size].long(), tokens % page_size
        return reference.extend_attention(queries, keys[where], values[where], self.query_lens, self.key_lens, scale)


class FlashInferPagedExtend:
    """Extend attention in place by FlashInfer's paged prefill, for any page size. Nothing waits for the device.

    Args:
        query_heads, kv_heads, head_dim, dtype, workspace: as of ``FlashInferExtend``.
        page_size: S.
    """

    def __init__(self, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, workspace: torch.Tensor, page_size: int) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.shape, self.dtype = (query_heads, kv_heads, head_dim, page_size), dtype
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, query_lens: list[int], key_lens: list[int], frames: torch.Tensor) -> None:
        """Prepare for all layers of a batch.

        Args:
            query_lens, key_lens: new tokens and all tokens of each request.
            frames: ``[B, P]`` int32 frame of each logical page, on the device. It is read for the pages of the contexts, which all have one.
        """
        page_size, keys = self.shape[-1], torch.tensor(key_lens)
        pages = -(-keys // page_size)
        owners, indices = (to_device(x, frames.device) for x in ragged(pages))
        last_lens = (keys - (pages - 1) * page_size).int()  # on the host, as the bounds: FlashInfer computes lengths from both there
        bounds = _bounds(query_lens), _bounds(pages.tolist())
        self.wrapper.plan(*bounds, frames[owners, indices], last_lens, *self.shape, causal=True, q_data_type=self.dtype)

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """``[sum(query_lens), Hq, D]`` from ``queries`` of the same shape and the frames ``keys``, ``values [N, S, H, D]``."""
        return self.wrapper.forward(queries.contiguous(), (keys, values), causal=True, sm_scale=scale)


def _bounds(lens: list[int]) -> torch.Tensor:
    """``[B + 1]`` int32: where each request's items begin, and the end of the last one's. FlashInfer needs them on the host."""
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
