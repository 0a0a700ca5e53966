# SPDX-License-Identifier: Apache-2.0
"""Specification of the rotation of keys that are coded, and of the queries that meet them; letters and layouts as in ``reference``.

The rotation is an orthonormal Hadamard matrix, so logits stay, and a number that stands out is spread over the dimensions. The matrix is
symmetric: what is rotated twice is as it was.
"""

from __future__ import annotations

from functools import cache

import torch

from sglang_freekv.kernels.kv import KV
from sglang_freekv.kernels.reference_movers import gather_pages


def rotated_together(head_dim: int) -> int:
    """How many neighbouring dimensions are rotated together: the largest power of two that divides ``head_dim``.

    Raises:
        ValueError: 8 does not divide ``head_dim``, so that hardly any are.
    """
    if head_dim % 8:
        raise ValueError(f"rotate: expected a head_dim that 8 divides, got {head_dim}; store this model's KV as it is computed with")
    return head_dim & -head_dim


@cache
def signs_of_rotation(head_dim: int, device: torch.device) -> torch.Tensor:
    """``[D, D]`` float32: the rotation times the square root of :func:`rotated_together`. Its numbers are 1 and -1, and 0 between blocks."""
    together = rotated_together(head_dim)
    block = torch.ones(1, 1)
    while len(block) < together:
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), block)
    return torch.block_diag(*[block] * (head_dim // together)).to(device)


def rotate(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by one matrix, in float32, rounded once.

    Args:
        queries: ``[..., Hq, D]``.
        keys: ``[..., H, D]``.

    Returns:
        Both rotated, in tensors of their own.

    Raises:
        ValueError: 8 does not divide D.
    """
    signs, size = signs_of_rotation(queries.shape[-1], queries.device), rotated_together(queries.shape[-1]) ** -0.5
    return (queries.float() @ signs * size).to(queries.dtype), (keys.float() @ signs * size).to(keys.dtype)


def unrotated_keys(kv: KV, starts: torch.Tensor, host_pages: torch.Tensor, page_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys of pages as they were before they were rotated, but for what their codes lose: what digests are made of.

    The codes are rotated first. Their sums are exact in float32 in any order, so the result is the same on every path.

    Args:
        kv: ``[T, H, D]`` token rows of codes to read.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page of each page, -1 to skip.
        page_size: S.
        dtype: of the result.

    Returns:
        ``[N * S, H, D]`` keys of one page behind the other. Those of a skipped page are undefined.

    Raises:
        ValueError: ``kv`` has no scales, so its keys are not rotated.
    """
    if kv.scales is None:
        raise ValueError("unrotated_keys: expected codes with scales, got numbers; they are not rotated, so read them where they lie")
    _, num_heads, head_dim = kv.keys.shape
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    codes, scales = (gather_pages(rows, starts[chosen], page_size).transpose(1, 2) for rows in (kv.keys, kv.scales.keys))
    numbers = codes.float() @ signs_of_rotation(head_dim, codes.device) * scales.float()[..., None] * rotated_together(head_dim) ** -0.5
    keys = torch.empty((len(host_pages), page_size, num_heads, head_dim), dtype=dtype, device=kv.keys.device)
    keys[chosen] = numbers.to(dtype)
    return keys.flatten(0, 1)
