# SPDX-License-Identifier: Apache-2.0
"""Extend attention by FlashAttention 3, which SGLang's kernels have for Hopper: nothing is compiled at start, and a batch needs no plan."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from sglang_freekv.kernels.extend import bounds
from sglang_freekv.kernels.ragged import to_device
from sglang_freekv.refusal import Refusal

HEAD_DIMS = range(8, 257, 8)
MOST_PAGE_SIZE = 64  # larger pages may be read whole, and NaN behind the end of a context is not left out then
DTYPES = torch.bfloat16, torch.float16


class FlashAttentionExtend:
    """As ``FlashInferExtend``, by FlashAttention 3: over one staged context, or over pages that a table names.

    A tile of contexts end to end takes in the next one's first values, and NaN there would reach this request's answers. So several staged
    contexts are read as pages of one token, of which those behind a context's end are left out. Pages of more than ``MOST_PAGE_SIZE`` are
    read in equal parts.

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
        self.attend_staged, self.attend_in_pages = flash_attn_varlen_func, flash_attn_with_kvcache
        self.parts = next(parts for parts in count(-(-page_size // MOST_PAGE_SIZE)) if page_size % parts == 0)
        self.page_size, self.device = page_size, torch.device(device)
        self.read = 0  # tokens of a page that the table names; 0 if there is none
        self.where: dict[str, Any] = {}

    def plan(self, query_lens: list[int], key_lens: list[int], frames: torch.Tensor | None = None) -> None:
        """As ``FlashInferExtend.plan``."""
        most = max(key_lens)
        tables = bounds(query_lens), bounds(key_lens), torch.tensor(key_lens, dtype=torch.int32)
        query_bounds, key_bounds, lengths = to_device(torch.cat(tables), self.device).split([len(table) for table in tables])
        self.where = {"cu_seqlens_q": query_bounds, "max_seqlen_q": max(query_lens)}
        if frames is None and len(key_lens) == 1:
            self.read = 0
            self.where |= {"cu_seqlens_k": key_bounds, "max_seqlen_k": most}
            return
        if frames is None:
            self.read, last = 1, sum(key_lens) - 1
            pages = (key_bounds[:-1, None] + torch.arange(most, dtype=torch.int32, device=self.device)).clamp_(max=last)
        else:
            self.read, pages = self.page_size // self.parts, frames[:, : -(-most // self.page_size)]
            if self.parts > 1:
                within = torch.arange(self.parts, dtype=torch.int32, device=self.device)
                pages = (pages[..., None] * self.parts + within).flatten(1)
        # its width is taken for the longest context, by which parts of contexts are shared among programs
        self.where |= {"cache_seqlens": lengths, "page_table": pages[:, : -(-most // self.read)]}

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, learned_sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``FlashInferExtend.__call__``."""
        attend = self.attend_in_pages if self.read else self.attend_staged
        if self.read:
            keys, values = (x.view(-1, self.read, *x.shape[-2:]) for x in (keys, values))
        return attend(queries, keys, values, softmax_scale=scale, causal=True, num_splits=0, sinks=learned_sinks, **self.where)


def is_computed(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashAttention 3 has heads of this size and numbers of this type."""
    return head_dim in HEAD_DIMS and dtype in DTYPES
