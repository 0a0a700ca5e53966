"""Triton kernels of the replay policy; ``replay_load.py`` has their twins in PyTorch, and what the numbers mean."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks import replay_load
from sglang_freekv.kernels import CORRECTED
from sglang_freekv.kernels.correction import launch_of, note_turn
from sglang_freekv.kernels.follow import can_follow, let_next_in
from sglang_freekv.kernels.score import PROGRAMS

_GOLDEN, _PACES = tl.constexpr(replay_load.GOLDEN), tl.constexpr(replay_load.PACES)
_SECOND, _THIRD = tl.constexpr(replay_load.WAVES[1]), tl.constexpr(replay_load.WAVES[2])
_SLOWER = tl.constexpr(replay_load.SLOWER)


def needs_correction(queries, rows, previous, tau, counts, num_kv_heads, knobs, thetas, steps, layer, *, turn=None) -> torch.Tensor:
    """The product's kernel read for read, but while the replay is on the flags are drawn; ``steps [R, H]`` counts the calls."""
    batch, num_heads, head_dim = queries.shape
    group = num_heads // num_kv_heads
    assert queries.stride(2) == 1 and previous.is_contiguous() and counts.is_contiguous() and steps.stride(1) == 1
    corrected = torch.empty(batch, num_kv_heads, dtype=torch.bool, device=queries.device)
    given, sizes = launch_of(turn)
    block_g, block_d = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    _needs_correction[(batch, num_kv_heads)](
        queries,
        rows,
        previous,
        counts,
        corrected,
        knobs,
        thetas,
        steps,
        float(tau),
        queries.stride(0),
        queries.stride(1),
        steps.stride(0),
        layer,
        *given,
        THETA_SHIFT=32 - (thetas.shape[0].bit_length() - 1),
        H=num_kv_heads,
        G=group,
        D=head_dim,
        COUNTS=counts.shape[1],
        COLUMN=CORRECTED,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        num_warps=min(4, max(1, block_g * block_d // 1024)),
        **sizes,
    )
    return corrected


@triton.jit(do_not_specialize=["layer"])
def _needs_correction(
    p_queries,  # [B, Hq, D]
    p_rows,  # [B]
    p_previous,  # [R, Hq, D]
    p_counts,  # [R, COUNTS]
    p_corrected,  # [B, H]
    p_knobs,  # [2]: on, speed
    p_thetas,  # quantiles of the share of corrected kv heads
    p_steps,  # [R, H]
    tau,
    stride_b,
    stride_h,
    stride_steps,
    layer,
    p_seq_lens,  # [B] or None
    p_attended,  # [R, H, A] or None
    p_frames,  # [B, P] or None
    p_selects,  # [B, H] or None
    P,
    THETA_SHIFT: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    COUNTS: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    S: tl.constexpr,
    A: tl.constexpr,
    A_BLOCK: tl.constexpr,
    BUDGET: tl.constexpr,
):
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(p_rows + i_b).to(tl.int64)
    if row == 0:
        tl.store(p_corrected + i_b * H + i_h, row != 0)
        if p_selects is not None:
            tl.store(p_selects + i_b * H + i_h, row != 0)
        return
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    mask = (o_g < G)[:, None] & (o_d < D)[None, :]
    o_head = i_h * G + o_g
    b_new = tl.load(p_queries + i_b * stride_b + o_head[:, None] * stride_h + o_d[None, :], mask=mask, other=0.0)
    p_old = p_previous + row * (H * G * D) + o_head[:, None] * D + o_d[None, :]
    b_old = tl.load(p_old, mask=mask, other=0.0)

    x, y = b_new.to(tl.float32), b_old.to(tl.float32)
    x /= tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-8)[:, None]
    y /= tl.maximum(tl.sqrt(tl.sum(y * y, 1)), 1e-8)[:, None]
    similarity = tl.sum(tl.sum(x * y, 1), 0) / G

    p_step = p_steps + row * stride_steps + i_h
    step = tl.load(p_step)
    tl.store(p_step, step + 1)
    draw = _mix(_key(layer, row) + step.to(tl.uint32) * _GOLDEN)
    theta = tl.load(p_thetas + (draw >> THETA_SHIFT).to(tl.int32))
    drawn = (_mix(draw + (i_h + 1).to(tl.uint32) * _GOLDEN) >> 8).to(tl.float32) < theta * 16777216.0
    corrected = tl.where(tl.load(p_knobs) != 0, drawn, similarity < tau)
    if p_selects is not None:
        p_list = p_attended + (row * H + i_h) * A
        mask = mask & note_turn(p_selects + i_b * H + i_h, p_seq_lens + i_b, p_list, p_frames + i_b * P, corrected, S, A, A_BLOCK, BUDGET)
    tl.debug_barrier()  # a thread may write what another reads
    tl.store(p_old, b_new.to(p_previous.dtype.element_ty), mask=mask)
    tl.store(p_corrected + i_b * H + i_h, corrected)
    tl.atomic_add(p_counts + row * COUNTS + COLUMN, corrected.to(tl.int64), mask=corrected, sem="relaxed")


def score_pages(queries, digests, rows, seq_lens, page_table, budget, page_size, scale, knobs, layer, selects=None) -> torch.Tensor:
    """The product's kernel read for read, but while the replay is on all query heads of a kv head get the page's score."""
    (batch, num_heads, head_dim), num_kv_heads, num_pages = queries.shape, digests.shape[1], page_table.shape[1]
    assert queries.stride(2) == 1 and digests.is_contiguous() and page_table.is_contiguous()
    logits = torch.empty(batch, num_heads, num_pages, dtype=torch.float32, device=queries.device)
    block_d = triton.next_power_of_2(2 * head_dim)
    block_p = max(16, min(64, 32768 // (block_d * digests.element_size())))
    shares = max(1, min(PROGRAMS // (batch * num_kv_heads), triton.cdiv(num_pages, block_p)))
    _score_pages[(shares, num_kv_heads, batch)](
        queries,
        digests,
        rows,
        seq_lens,
        page_table,
        knobs,
        logits,
        selects,
        queries.stride(0),
        queries.stride(1),
        num_pages,
        budget.sink,
        budget.window,
        scale,
        layer,
        H=num_kv_heads,
        G=num_heads // num_kv_heads,
        D=head_dim,
        S=page_size,
        BLOCK_G=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_P=block_p,
        BLOCK_D=block_d,
        FOLLOWED=can_follow(queries.device),
        num_warps=4,
        num_stages=2,
    )
    return logits


@triton.jit(do_not_specialize=["layer"])  # one kernel for all layers
def _score_pages(
    p_queries,  # [B, Hq, D]
    p_digests,  # [n_page, H, 2, D]
    p_rows,  # [B]
    p_seq_lens,  # [B]
    p_page_table,  # [B, P]
    p_knobs,  # [2]: on, speed
    p_logits,  # [B, Hq, P]
    p_selects,  # [B, H] or None
    stride_b,
    stride_h,
    P,
    sink,
    window,
    scale,
    layer,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FOLLOWED: tl.constexpr,
):
    let_next_in(FOLLOWED)
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    step = tl.load(p_seq_lens + i_b).to(tl.int32)
    row = tl.load(p_rows + i_b).to(tl.int64)
    end = tl.where(row != 0, tl.minimum((step + S) // S - window, P), 0)
    if p_selects is not None:
        end = tl.where(tl.load(p_selects + i_b * H + i_h).to(tl.int32) != 0, end, 0)
    first = sink + i_n * BLOCK_P
    if first >= end:
        return

    o_t, o_g, o_d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g, m_d = o_g < G, o_d < 2 * D
    o_head = i_h * G + o_g
    b_q = tl.load(
        p_queries + i_b * stride_b + o_head[:, None] * stride_h + (o_d % D)[None, :], mask=m_g[:, None] & m_d[None, :], other=0.0
    ).to(tl.float32)
    b_q = tl.where((o_d < D)[None, :], tl.maximum(b_q, 0.0), tl.minimum(b_q, 0.0))
    b_q = b_q.to(p_digests.dtype.element_ty)
    replayed = tl.load(p_knobs) != 0
    speed = tl.load(p_knobs + 1).to(tl.uint32)
    key = _mix(_key(layer, row) + (i_h + 1).to(tl.uint32) * _GOLDEN)
    p_table = p_page_table + i_b * P
    p_out = p_logits + (i_b * (H * G) + o_head[:, None]) * P
    b_page = tl.load(p_table + first + o_t, mask=first + o_t < end, other=0)
    for start in range(first, end, tl.num_programs(0) * BLOCK_P):
        o_p = start + o_t
        unit = (tl.maximum(b_page, 0).to(tl.int64) * H + i_h) * (2 * D)
        m_p = o_p < end
        b_digest = tl.load(p_digests + unit[:, None] + o_d[None, :], mask=m_p[:, None] & m_d[None, :], other=0.0)
        o_next = o_p + tl.num_programs(0) * BLOCK_P
        b_page = tl.load(p_table + o_next, mask=o_next < end, other=0)
        b_score = _waves(key, o_p, step, speed)
        b_bound = tl.dot(b_q, tl.trans(b_digest), input_precision="ieee") * scale
        tl.store(p_out + o_p[None, :], tl.where(replayed, b_score[None, :], b_bound), mask=m_g[:, None] & m_p[None, :])


def overwrite_scores(logits, rows, seq_lens, budget, page_size, num_kv_heads, knobs, layer, selects=None) -> None:
    """The page's score for all query heads of a kv head, for candidates of ``selects [B, H]`` and while the replay is on; others stay."""
    batch, num_heads, num_pages = logits.shape
    grid = (triton.cdiv(num_pages, 256), num_kv_heads, batch)
    where = (rows, seq_lens, knobs, logits, selects, num_pages, budget.sink, budget.window, layer)
    _overwrite_scores[grid](*where, H=num_kv_heads, G=num_heads // num_kv_heads, S=page_size, BLOCK_P=256)


@triton.jit(do_not_specialize=["layer"])
def _overwrite_scores(
    p_rows,
    p_seq_lens,
    p_knobs,
    p_logits,
    p_selects,
    P,
    sink,
    window,
    layer,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_n, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    step = tl.load(p_seq_lens + i_b).to(tl.int32)
    row = tl.load(p_rows + i_b).to(tl.int64)
    end = tl.where(row != 0, tl.minimum((step + S) // S - window, P), 0)
    if p_selects is not None:
        end = tl.where(tl.load(p_selects + i_b * H + i_h).to(tl.int32) != 0, end, 0)
    if (tl.load(p_knobs) == 0) | (sink + i_n * BLOCK_P >= end):
        return
    o_p = sink + i_n * BLOCK_P + tl.arange(0, BLOCK_P)
    key = _mix(_key(layer, row) + (i_h + 1).to(tl.uint32) * _GOLDEN)
    b_score = _waves(key, o_p, step, tl.load(p_knobs + 1).to(tl.uint32))
    for g in range(G):
        tl.store(p_logits + ((i_b * H + i_h) * G + g) * P + o_p, b_score, mask=o_p < end)


@triton.jit
def _waves(key, o_p, step, speed):
    b_drawn = _mix(key + o_p.to(tl.uint32) * _GOLDEN)
    b_score = tl.zeros(o_p.shape, tl.float32)
    for wave in tl.static_range(3):
        b_word = b_drawn * (1 if wave == 0 else _SECOND if wave == 1 else _THIRD)
        b_pace = b_word * _PACES
        b_turns = ((b_pace >> 16) + 0x8000) * speed >> (b_pace >> 13 & _SLOWER)
        b_phase = (b_word + step.to(tl.uint32) * b_turns).to(tl.int32, bitcast=True)
        b_score += tl.abs(b_phase.to(tl.float32)) * 1.862645149230957e-09  # 4 / 2 ** 31
    return b_score


@triton.jit
def _key(layer, row):
    return _mix(row.to(tl.uint32) * _GOLDEN + (layer + 1).to(tl.uint32))


@triton.jit
def _mix(x):
    """A hash of 32-bit words (lowbias32)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)
