# SPDX-License-Identifier: Apache-2.0
"""Extend attention: causal attention of new tokens over ``[prefix | new]``. A batch is planned once for all layers.

The contexts of a staged extend lie end to end in a staging buffer. Those of an extend in place lie in frames of the device cache.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_freekv import kernels
from sglang_freekv.kernels import reference
from sglang_freekv.kernels.ragged import ragged, to_device

# FlashInfer's kernels for every GPU. Those for Hopper take in values behind a staged context's end: the next request's, NaN among them.
BACKEND = "fa2"


class ExtendAttention(Protocol):
    """Causal attention of new tokens over ``[prefix | new]``, for each request on its own. ``FlashInferExtend`` documents it."""

    def plan(self, query_lens: list[int], key_lens: list[int], frames: torch.Tensor | None = None) -> None:
        """Prepare for all layers of a batch. A request's queries are those of its last ``query_len`` positions."""

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, learned_sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend, where ``plan`` says that the contexts lie."""


class ReferenceExtend:
    """Extend attention in PyTorch, one request after the other. In place it gathers each context from its frames."""

    def plan(self, query_lens: list[int], key_lens: list[int], frames: torch.Tensor | None = None) -> None:
        """As ``FlashInferExtend.plan``."""
        self.query_lens, self.key_lens, self.frames = query_lens, key_lens, frames

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, learned_sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``FlashInferExtend.__call__``."""
        if self.frames is not None:
            page_size = keys.shape[1]
            owners, tokens = (to_device(x, self.frames.device) for x in ragged(torch.tensor(self.key_lens)))
            where = self.frames[owners, tokens // page_size].long(), tokens % page_size
            keys, values = keys[where], values[where]
        return reference.extend_attention(queries, keys, values, self.query_lens, self.key_lens, scale, learned_sinks=learned_sinks)


class FlashInferExtend:
    """Extend attention by FlashInfer: its ragged prefill of what is staged, its paged prefill in place. Nothing waits for the device.

    The causal mask ends at each request's last key, as the reference's does.

    Args:
        query_heads, kv_heads, head_dim, dtype: shape and dtype of the model's attention on this rank.
        page_size: S.
        device: of the workspace.
        workspace_bytes: device memory in which FlashInfer keeps partial results of one call.
    """

    def __init__(
        self, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int, device: str, workspace_bytes: int
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

        self.shape, self.dtype, self.page_size, self.in_place = (query_heads, kv_heads, head_dim), dtype, page_size, False
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)  # calls on one stream can share it
        self.ragged, self.paged = (
            wrapper(workspace, "NHD", backend=BACKEND)
            for wrapper in (BatchPrefillWithRaggedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)
        )

    def plan(self, query_lens: list[int], key_lens: list[int], frames: torch.Tensor | None = None) -> None:
        """Prepare for all layers of a batch.

        Args:
            query_lens, key_lens: new tokens and all tokens of each request.
            frames: in place, ``[B, P]`` int32 frame of each logical page, on the device; all pages of the contexts have one. Else None.
        """
        self.in_place = frames is not None
        if frames is None:
            self.ragged.plan(bounds(query_lens), bounds(key_lens), *self.shape, causal=True, q_data_type=self.dtype)
            return
        keys = torch.tensor(key_lens)
        pages = -(-keys // self.page_size)
        owners, page = ragged(pages)
        held = frames.take(to_device(owners * frames.shape[1] + page, frames.device))
        last_lens = (keys - (pages - 1) * self.page_size).int()  # on the host, as the bounds: FlashInfer computes lengths from both there
        ends, shape = (bounds(query_lens), bounds(pages.tolist())), (*self.shape, self.page_size)
        self.paged.plan(*ends, held, last_lens, *shape, causal=True, q_data_type=self.dtype)

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, learned_sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[sum(query_lens), Hq, D]`` from ``queries`` of the same shape.

        ``keys``, ``values`` are ``[sum(key_lens), H, D]`` contexts end to end, or in place the frames ``[F, S, H, D]``. ``learned_sinks`` are
        as in ``kernels.merge_shares``.
        """
        kernel, context = (self.paged, ((keys, values),)) if self.in_place else (self.ragged, (keys, values))
        how = {"causal": True, "sm_scale": scale}
        if learned_sinks is None:
            return kernel.forward(queries.contiguous(), *context, **how)
        output, weights = kernel.forward_return_lse(queries.contiguous(), *context, **how)  # to base 2
        return kernels.add_learned_sinks(output, weights, learned_sinks)


def bounds(lens: list[int]) -> torch.Tensor:
    """``[B + 1]`` int32: where each request's items begin, and the end of the last one's, on the host."""
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
