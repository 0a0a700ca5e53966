# SPDX-License-Identifier: Apache-2.0
"""Extend attention by FlashAttention 3, which SGLang's kernels have for Hopper: nothing is compiled at start, and a batch needs no plan."""

from __future__ import annotations

from typing import Any

import torch

from sglang_freekv.kernels.extend import bounds
from sglang_freekv.kernels.ragged import to_device
from sglang_freekv.refusal import Refusal

HEAD_DIMS = range(8, 257, 8)
MOST_PAGE_SIZE = 64  # larger pages may be read whole, and NaN behind the end of a context is not left out then
DTYPES = torch.bfloat16, torch.float16


class FlashAttentionExtend:
    """As ``FlashInferExtend``, by FlashAttention 3: over what is staged, or over frames that a page table names.

    Args:
        page_size: S.
        device: of the tables.

    Raises:
        Refusal: SGLang's kernels cannot be loaded.
    """

    def __init__(self, page_size: int, device: str) -> None:
        try:
            from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        except ImportError as error:
            raise Refusal(
                f"--kv-retrieval: expected FlashAttention 3 in sgl_kernel, because this GPU is a Hopper one, but: {error} "
                "Reinstall the sglang-kernel that SGLang asks for (pip install --force-reinstall sglang-kernel==VERSION)"
            ) from error
        self.attend_staged, self.attend_in_frames = flash_attn_varlen_func, flash_attn_with_kvcache
        self.page_size, self.device = page_size, torch.device(device)
        self.where: dict[str, Any] = {}
        self.in_place = False

    def plan(self, query_lens: list[int], key_lens: list[int], frames: torch.Tensor | None = None) -> None:
        """As ``FlashInferExtend.plan``."""
        self.in_place, most = frames is not None, max(key_lens)
        tables = bounds(query_lens), bounds(key_lens), torch.tensor(key_lens, dtype=torch.int32)
        query_bounds, key_bounds, lengths = to_device(torch.cat(tables), self.device).split([len(table) for table in tables])
        self.where = {"cu_seqlens_q": query_bounds, "max_seqlen_q": max(query_lens)}
        if frames is None:
            self.where |= {"cu_seqlens_k": key_bounds, "max_seqlen_k": most}
        else:  # its width is taken for the longest context, by which parts of contexts are shared among programs
            self.where |= {"cache_seqlens": lengths, "page_table": frames[:, : -(-most // self.page_size)]}

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, learned_sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``FlashInferExtend.__call__``."""
        attend = self.attend_in_frames if self.in_place else self.attend_staged
        return attend(queries, keys, values, softmax_scale=scale, causal=True, num_splits=0, sinks=learned_sinks, **self.where)


def is_computed(head_dim: int, dtype: torch.dtype, page_size: int) -> bool:
    """Whether FlashAttention 3 has heads of this size, numbers of this type, and pages whose tails it leaves out."""
    return head_dim in HEAD_DIMS and dtype in DTYPES and page_size <= MOST_PAGE_SIZE
