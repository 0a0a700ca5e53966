# SPDX-License-Identifier: Apache-2.0
"""Specification of a step's decisions: corrected kv heads, selected pages, and the slot of each; letters as in ``reference``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from sglang_freekv.config import PageBudget
from sglang_freekv.kernels.candidates import Candidates, Pooling, Tables
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reads import Reads

HITS, RECALLED, CORRECTED = range(3)  # columns of counts
FAINT = -3.0e38  # stands for the logarithm of 0, and is finite


def needs_correction(
    queries: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor, tau: float, counts: torch.Tensor, num_kv_heads: int
) -> torch.Tensor:
    """Tell which kv heads are corrected: those whose query is too unlike that of the last step (paper section 3.3).

    Args:
        queries: ``[B, Hq, D]`` post-RoPE queries of this step.
        rows: ``[B]`` row of each request.
        previous: ``[R, Hq, D]`` queries of the last step. ``queries`` replace those of ``rows``.
        tau: a kv head is corrected if the cosine similarity, averaged over its group, is below ``tau``.
        counts: ``[R, 3]`` int64 counts of each row, added to: CORRECTED.
        num_kv_heads: H.

    Returns:
        ``[B, H]`` bool, False for a padding request.
    """
    similarity = F.cosine_similarity(queries.float(), previous[rows].float(), dim=-1)
    corrected = (similarity.unflatten(1, (num_kv_heads, -1)).mean(-1) < tau) & (rows > 0)[:, None]
    previous[rows] = queries.where((rows > 0)[:, None, None], previous[rows])
    counts[:, CORRECTED].index_add_(0, rows.long(), corrected.sum(1))
    return corrected


def select_pages(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    budget: PageBudget,
    num_kv_heads: int,
    page_size: int,
    pooling: Pooling = "softmax-mean",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weigh the candidate pages of every kv head and choose the heaviest; of two equal pages the earlier one.

    :func:`plan_pages` and :func:`seed_slots` select in this way.

    Args:
        logits: ``[B, Hq, P]`` float32 scores of ``reference.score_pages``.
        tokens: ``[B]`` tokens of context.
        budget: pages of the sink, to choose, and of the window.
        num_kv_heads, page_size: H and S.
        pooling: the weight of a page. "softmax-mean" is the softmax over the candidates, averaged over the group (paper section 3.2). It
            stays in logarithms, because far pages would underflow to ties. "mean" and "max" take the group's logits as they are. A logit
            that overflowed does not count.

    Returns:
        ``(weights, order, required)``, each ``[B, H, P]``: float32 weights, -inf unless a page is a candidate; int64 pages from heavy to
        light; bool, True for sink, window and chosen pages.
    """
    pages = torch.arange(logits.shape[2], device=logits.device)
    num_pages = ((tokens + page_size - 1) // page_size)[:, None]
    end = (num_pages - budget.window).clamp(min=budget.sink)
    candidate = ((pages >= budget.sink) & (pages < end))[:, None]
    fixed = (pages < num_pages) & ((pages < budget.sink) | (pages >= end))
    grouped = logits.unflatten(1, (num_kv_heads, -1)).masked_fill(~candidate[:, None], float("-inf"))
    weights = _pool(grouped, pooling).masked_fill(~candidate, float("-inf"))
    order = weights.sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter_(2, order[..., : budget.selected], True) & candidate
    return weights, order, chosen | fixed[:, None]


def seed_slots(candidates: Candidates, tables: Tables) -> None:
    """Start rows anew: select the pages of the first decode step, and give the slots that are left to the next best pages.

    Args:
        candidates: of the contexts. If the next token begins a page, that page gets a slot too. The page table is not read.
        tables: written: pages in ascending order, then -1; slots of the pages to attend to, in ascending order, then -1.
    """
    (slot_pages, attended), rows, budget = tables, candidates.rows, candidates.budget
    num_kv_heads, capacity = slot_pages.shape[1:]
    weights, order, required = _select(candidates, candidates.seq_lens + 1, num_kv_heads)
    extra = budget.selected + capacity - budget.total
    resident = required.scatter(2, order[..., :extra], True) & (required | (weights > float("-inf")))
    real = rows > 0
    slot_pages[rows[real]] = _ranked(resident, capacity)[real]
    slot_of_page = (resident.cumsum(-1) - 1).to(torch.int32)
    wanted = _ranked(required, attended.shape[2])
    slots = slot_of_page.gather(2, wanted.clamp(min=0).long()).where(wanted >= 0, -1)
    attended[rows[real]] = slots[real]


def plan_pages(
    candidates: Candidates,
    corrected: torch.Tensor,
    tables: Tables,
    reads: Reads,
    misses_now: Misses,
    misses_ahead: Misses,
    counts: torch.Tensor,
    *,
    ahead_first: bool,
) -> None:
    """Write what each kv head reads in this step: if it is corrected, the pages that it selects now, else those of the last selection.

    Every selected page gets a slot, and a resident page keeps its own. Empty slots are taken first, then the slots of the lightest pages
    that are not required. The missing pages are put into these slots in ascending order.

    Args:
        candidates: a corrected kv head selects among the candidates of ``seq_lens`` tokens. A selection for the next step is among those
            of ``seq_lens + 1``.
        corrected: ``[B, H]`` bool, True for a kv head that is corrected in this step.
        tables: updated. In ``attended`` slots of resident pages come first, then those of missing pages, both in ascending order, then -1.
        reads: written: what this step attends to.
        misses_now, misses_ahead: lists that receive the units to recall for this step, and for the next. A page that is about to begin is
            never among them.
        counts: ``[R, 3]`` int64, added to: RECALLED, and HITS, the chosen pages that were resident. HITS counts the first selection of a
            kv head in a step.
        ahead_first: kv heads that are not corrected plan ahead here, before attention, instead of in :func:`plan_rest`. Their tables are
            then those of the next step.
    """
    rows, (slot_pages, attended) = candidates.rows, tables
    real, capacity = (rows > 0)[:, None], slot_pages.shape[2]
    assert reads.present is not None
    reads.slots.fill_(-1)
    reads.present.fill_(attended.shape[2])

    def write_down(heads: tuple[torch.Tensor, ...]) -> None:
        b, h = heads
        listed = attended[rows[b], h]
        reads.pages[heads] = slot_pages[rows[b], h].gather(1, listed.clamp(min=0).long())
        reads.slots[heads] = (rows[b, None] * capacity + listed).where(listed >= 0, -1).to(torch.int32)

    others = (real & ~corrected).nonzero(as_tuple=True)
    write_down(others)
    now = (real & corrected).nonzero(as_tuple=True)
    reads.present[now] = _select_for(now, 0, candidates, corrected, tables, misses_now, counts)
    write_down(now)
    if ahead_first:
        _select_for(others, 1, candidates, corrected, tables, misses_ahead, counts)


def plan_rest(
    candidates: Candidates, corrected: torch.Tensor, tables: Tables, misses_ahead: Misses, counts: torch.Tensor, *, ahead_first: bool
) -> None:
    """Behind attention, plan ahead where :func:`plan_pages` did not.

    A corrected kv head selects again if the next token begins a page; otherwise its candidates are the same. A kv head that is not
    corrected selects here unless ``ahead_first``. Arguments as in :func:`plan_pages`.
    """
    begins = (candidates.seq_lens % candidates.page_size == 0)[:, None]
    wanted = corrected & begins if ahead_first else ~corrected | begins
    heads = ((candidates.rows > 0)[:, None] & wanted).nonzero(as_tuple=True)
    _select_for(heads, 1, candidates, corrected, tables, misses_ahead, counts)


def _select(candidates: Candidates, tokens: torch.Tensor, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`select_pages` among ``candidates`` as if the contexts had ``tokens [B]``."""
    return select_pages(candidates.logits, tokens, candidates.budget, num_kv_heads, candidates.page_size, candidates.pooling)


def _select_for(
    heads: tuple[torch.Tensor, ...],
    more: int,
    candidates: Candidates,
    corrected: torch.Tensor,
    tables: Tables,
    misses: Misses,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Select for the kv heads ``(b, h)`` with ``more`` tokens of context; returns ``[N]`` int32, how many of their pages were resident."""
    (b, h), (slot_pages, attended), budget, page_size = heads, tables, candidates.budget, candidates.page_size
    rows, seq_lens, tokens, capacity = candidates.rows, candidates.seq_lens, candidates.seq_lens + more, slot_pages.shape[2]
    weights, _, required = (x[heads] for x in _select(candidates, tokens, slot_pages.shape[1]))
    table = slot_pages[rows[b], h].long()
    page = table.clamp(0, required.shape[1] - 1)
    kept = required.gather(1, page) & (table >= 0)
    resident = torch.zeros_like(required, dtype=torch.int32).scatter_add_(1, page, kept.int()) > 0
    missing = required & ~resident
    needed = missing.sum(1, keepdim=True)
    worth = weights.gather(1, page).masked_fill(table < 0, float("-inf")).masked_fill(kept, float("inf"))
    victim = torch.zeros_like(kept).scatter_(1, worth.sort(dim=1, stable=True).indices, torch.arange(capacity, device=b.device) < needed)
    incoming = _ranked(missing, capacity).gather(1, (victim.cumsum(1) - 1).clamp(min=0)).where(victim, -1)

    slot_pages[rows[b], h] = incoming.where(victim, table.to(torch.int32))
    place = torch.arange(capacity, device=b.device) + capacity * (~kept).int() + capacity * ~(kept | victim)
    listed = place.sort(1).values[:, : attended.shape[2]]
    attended[rows[b], h] = torch.where(listed < 2 * capacity, listed % capacity, -1).to(torch.int32)
    recalled = (incoming >= 0) & (incoming < (seq_lens[b] // page_size)[:, None])
    i, slot = recalled.nonzero(as_tuple=True)
    misses.extend(candidates.page_table[b[i], incoming[i, slot].long()], h[i], rows[b[i]] * capacity + slot)

    chosen = (-(-tokens[b] // page_size) - budget.window - budget.sink).clamp(0, budget.selected)
    counts[:, RECALLED].index_add_(0, rows[b].long(), recalled.sum(1))
    counts[:, HITS].index_add_(0, rows[b].long(), (chosen - recalled.sum(1)) * (corrected[heads] != bool(more)))
    return kept.sum(1, dtype=torch.int32)


def _pool(logits: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """``[B, H, P]`` finite weights of ``[B, H, G, P]`` logits."""
    if pooling == "softmax-mean":
        shares = logits.log_softmax(-1).nan_to_num(nan=FAINT).clamp(min=FAINT)
        return shares.logsumexp(2) - math.log(logits.shape[2])
    finite = logits.abs() < -FAINT
    if pooling == "mean":
        return (logits.where(finite, 0) / logits.shape[2]).sum(2)
    return logits.where(finite, FAINT).amax(2)


def _ranked(mask: torch.Tensor, width: int) -> torch.Tensor:
    """``[..., width]`` int32 indices at which ``mask [..., N]`` is True, in ascending order, then -1."""
    rank = torch.where(mask, mask.cumsum(-1) - 1, width).clamp(max=width)
    index = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.int32).expand(mask.shape)
    ranked = torch.full((*mask.shape[:-1], width + 1), -1, dtype=torch.int32, device=mask.device)
    return ranked.scatter_(-1, rank, index)[..., :width]
