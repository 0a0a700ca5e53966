"""Keys of ShadowKV's chunks from their low rank: gather, product, rotation and store in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def reference_rebuild(
    low_rank: torch.Tensor,
    basis: torch.Tensor,
    angles: torch.Tensor,
    chosen: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    chunk: int,
) -> None:
    """Write the rotated keys of chunks ``chosen`` to the beginning of their requests' rows.

    Args:
        low_rank: ``[B, T, R]`` of all tokens.
        basis: ``[B, H, R, D]``.
        angles: ``[2, T, D]``: cosine and sine by position.
        chosen: ``[B, H, K]`` chunks of ``chunk`` tokens each.
        rows: ``[B]`` of ``keys``.
        keys: ``[n_row, N, H, D]``, N at least K * chunk.
    """
    tokens = (chosen[..., None] * chunk + torch.arange(chunk, device=chosen.device)).flatten(2)  # [B, H, K * chunk]
    requests = torch.arange(len(rows), device=rows.device)[:, None, None]
    plain = low_rank[requests, tokens].float() @ basis.float()
    cos, sin = angles[:, tokens].float()
    low, high = plain.chunk(2, -1)
    keys[rows, : tokens.shape[2]] = (plain * cos + torch.cat((-high, low), -1) * sin).transpose(1, 2).to(keys.dtype)


def rebuild_keys(
    low_rank: torch.Tensor,
    basis: torch.Tensor,
    angles: torch.Tensor,
    chosen: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    chunk: int,
) -> None:
    """As :func:`reference_rebuild`; D is twice a power of two."""
    (batch, tokens, rank), (heads, dim), selected = low_rank.shape, keys.shape[2:], chosen.shape[2]
    assert low_rank.is_contiguous() and basis.is_contiguous() and angles.is_contiguous() and chosen.is_contiguous() and keys.is_contiguous()
    _rebuild_kernel[(triton.cdiv(selected * chunk, 64), batch * heads)](
        low_rank, basis, angles, chosen, rows, keys, tokens, keys.shape[1], selected,
        H=heads, R=rank, D=dim, CHUNK=chunk, BLOCK_N=64, BLOCK_R=32,
    )  # fmt: skip


@triton.jit
def _rebuild_kernel(
    p_low_rank,  # [B, T, R]
    p_basis,  # [B, H, R, D]
    p_angles,  # [2, T, D]
    p_chosen,  # [B, H, K]
    p_rows,  # [B]
    p_keys,  # [n_row, N, H, D]
    T,
    N,
    K,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    pair = tl.program_id(1)
    request, head = (pair // H).to(tl.int64), pair % H
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < K * CHUNK
    token = tl.load(p_chosen + pair * K + o_n // CHUNK, m_n, 0).to(tl.int64) * CHUNK + o_n % CHUNK
    o_d = tl.arange(0, D // 2)
    low = tl.zeros([BLOCK_N, D // 2], tl.float32)
    high = tl.zeros([BLOCK_N, D // 2], tl.float32)
    for start in range(0, R, BLOCK_R):
        o_r = start + tl.arange(0, BLOCK_R)
        b_x = tl.load(p_low_rank + (request * T + token)[:, None] * R + o_r[None, :], m_n[:, None] & (o_r < R)[None, :], 0.0)
        p_half = p_basis + (pair * R + o_r)[:, None] * D + o_d[None, :]
        low = tl.dot(b_x, tl.load(p_half, (o_r < R)[:, None], 0.0), low, input_precision="ieee")
        high = tl.dot(b_x, tl.load(p_half + D // 2, (o_r < R)[:, None], 0.0), high, input_precision="ieee")
    p_cos = p_angles + token[:, None] * D + o_d[None, :]
    p_sin = p_cos + T * D
    b_low = low * tl.load(p_cos, m_n[:, None], 0.0) - high * tl.load(p_sin, m_n[:, None], 0.0)
    b_high = high * tl.load(p_cos + D // 2, m_n[:, None], 0.0) + low * tl.load(p_sin + D // 2, m_n[:, None], 0.0)
    row = tl.load(p_rows + request).to(tl.int64)
    p_out = p_keys + ((row * N + o_n)[:, None] * H + head) * D + o_d[None, :]
    tl.store(p_out, b_low.to(p_keys.dtype.element_ty), m_n[:, None])
    tl.store(p_out + D // 2, b_high.to(p_keys.dtype.element_ty), m_n[:, None])
