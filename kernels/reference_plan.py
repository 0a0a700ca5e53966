# SPDX-License-Identifier: Apache-2.0
"""Specification of a step's decisions: corrected kv heads, selected pages, and the slot of each; letters as in ``reference``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from sglang_freekv.config import PageBudget
from sglang_freekv.kernels.candidates import Candidates, Heads, Pooling, Tables, Turn, any_absent, due
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reads import Reads

HITS, RECALLED, CORRECTED = range(3)  # columns of counts
FAINT = -3.0e38  # stands for the logarithm of 0, and is finite


def needs_correction(
    queries: torch.Tensor,
    rows: torch.Tensor,
    previous: torch.Tensor,
    tau: float,
    counts: torch.Tensor,
    num_kv_heads: int,
    *,
    turn: Turn | None = None,
) -> torch.Tensor:
    """Tell which kv heads are corrected: those whose query is too unlike that of the last step (paper section 3.3).

    With ``turn`` the query is compared with that of the kv head's last selection. A kv head selects if it is corrected, or if its row is
    ``due``. A lost one needs scores, too, because they rank the pages that leave their slots.

    Args:
        queries: ``[B, Hq, D]`` post-RoPE queries of this step.
        rows: ``[B]`` row of each request.
        previous: ``[R, Hq, D]`` queries of the last step, or with ``turn`` of the last selection. ``queries`` replace those of ``rows``, with
            ``turn`` those of the kv heads that select.
        tau: a kv head is corrected if the cosine similarity, averaged over its group, is below ``tau``.
        counts: ``[R, 3]`` int64 counts of each row, added to: CORRECTED.
        num_kv_heads: H.
        turn: given if kv heads select on turn only; its ``selects`` is written, False for a padding request.

    Returns:
        ``[B, H]`` bool, False for a padding request.
    """
    similarity = F.cosine_similarity(queries.float(), previous[rows].float(), dim=-1)
    real = (rows > 0)[:, None].expand(-1, num_kv_heads)
    corrected = (similarity.unflatten(1, (num_kv_heads, -1)).mean(-1) < tau) & real
    replaced = real
    if turn is not None:
        replaced = corrected | (real & due(turn.seq_lens, turn.page_size, turn.tables.attended.shape[2], turn.budget)[:, None])
        turn.selects.copy_(replaced | turn.tables.lost(rows, turn.frames))
    previous[rows] = queries.where(replaced.repeat_interleave(queries.shape[1] // num_kv_heads, 1)[..., None], previous[rows])
    counts[:, CORRECTED].index_add_(0, rows.long(), corrected.sum(1))
    return corrected


def select_pages(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    budget: PageBudget,
    num_kv_heads: int,
    page_size: int,
    pooling: Pooling = "softmax-mean",
    most: torch.Tensor | None = None,
    *,
    bonus: torch.Tensor | None = None,
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
        most: ``[B]`` how many candidates to choose at most. None means those of ``budget``.
        bonus: ``[B, H, P]`` float32 nats that are added to the weights of candidates. None means 0.

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
    pooled = _pool(grouped, pooling)
    weights = (pooled if bonus is None else pooled + bonus).masked_fill(~candidate, float("-inf"))
    order = weights.sort(dim=-1, descending=True, stable=True).indices
    wanted = pages < (budget.selected if most is None else most[:, None, None])
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter_(2, order, wanted.expand_as(order)) & candidate
    return weights, order, chosen | fixed[:, None]


def most_to_choose(candidates: Candidates, tables: Tables, tokens: torch.Tensor) -> torch.Tensor:
    """``[B]`` how many candidates a kv head chooses at most in contexts of ``tokens [B]``.

    A context of at most A pages is attended to in full. If more of its pages are absent than a row has slots, it chooses as a longer one.
    """
    num_pages, pages = -(-tokens // candidates.page_size), torch.arange(candidates.frames.shape[1], device=tokens.device)
    absent = ((candidates.frames < 0) & (pages < num_pages[:, None])).sum(1)
    in_full = (num_pages <= tables.attended.shape[2]) & (absent <= tables.slot_pages.shape[2])
    return torch.where(in_full, num_pages, candidates.budget.selected)


def seed_slots(candidates: Candidates, tables: Tables) -> None:
    """Start rows anew: select the pages of the first decode step, and give the slots that are left to the next best absent pages.

    A row without slots attends to resident pages only.

    Args:
        candidates: of the contexts. If the next token begins a page, that page gets a slot too, unless a frame waits for it. The page
            table is not read.
        tables: written: absent pages in ascending order, then -1; the pages to attend to, resident ones first, each in ascending order,
            then -1.
    """
    (slot_pages, attended, row_frames), rows, budget = tables, candidates.rows, candidates.budget
    capacity = slot_pages.shape[2]
    weights, order, required = _select(candidates, tables, candidates.seq_lens + 1)
    extra = budget.selected + capacity - budget.total
    resident = (candidates.frames >= 0)[:, None]
    has_slots = (row_frames[rows, :1] >= 0)[:, None]
    in_slots = required.scatter(2, order[..., :extra], True) & (required | (weights > float("-inf"))) & ~resident & has_slots
    real = rows > 0
    slot_pages[rows[real]] = _ranked(in_slots, capacity)[real]
    slot_of_page = (in_slots.cumsum(-1) - 1).to(torch.int32)
    pages = torch.arange(required.shape[2], dtype=torch.int32, device=rows.device)
    attended[rows[real]] = _listed(
        (-2 - pages).where(resident, slot_of_page), required & (resident | in_slots), resident, attended.shape[2]
    )[real]


def plan_pages(
    candidates: Candidates,
    heads: Heads,
    tables: Tables,
    reads: Reads,
    misses_now: Misses,
    misses_ahead: Misses,
    counts: torch.Tensor,
    *,
    ahead_first: bool,
) -> None:
    """Write what each kv head reads in this step: if it is corrected, the pages that it selects now, else those of the last selection.

    A resident page is read in its frame. Every other selected page gets a slot, and keeps one that it has. Empty slots are taken first,
    then the slots of the lightest pages that are not required. The missing pages are put into these slots in ascending order.

    With ``candidates.hysteresis`` h, the pages of a kv head's last selection weigh h more: those that it attends to by ``tables`` as they
    stand when it selects, in slots or resident. So memory has no say in what is selected.

    A page of the last selection may have become absent since. Its kv head is *lost*: the page is missing, and recalled for this step. In a
    context of at most A pages it selects again, because more pages than slots may have become absent. A row
    without slots attends to resident pages only.

    Args:
        candidates: a corrected kv head selects among the candidates of ``seq_lens`` tokens. A selection for the next step is among those
            of ``seq_lens + 1``.
        heads: which are corrected; ``lost`` is written.
        tables: updated. In ``attended`` resident pages come first, then pages in slots, then missing pages, each in ascending order (of
            pages, of slots, of slots), then -1.
        reads: written: what this step attends to.
        misses_now, misses_ahead: lists that receive the units to recall for this step, and for the next. A page that is about to begin is
            never among them.
        counts: ``[R, 3]`` int64, added to: RECALLED, and HITS, the chosen pages that were on the device. HITS counts the first selection
            of a kv head in a step.
        ahead_first: kv heads that are neither corrected nor lost plan ahead here, before attention, instead of in :func:`plan_rest`. Their
            tables are then those of the next step. With ``candidates.on_turn`` they do so only in rows that are ``due``.
    """
    rows, real = candidates.rows, (candidates.rows > 0)[:, None]
    held, frames = tables.pages(rows), tables.frames(rows, candidates.frames)
    heads.lost.copy_(any_absent(held, frames) & real & ~heads.corrected)
    kept, corrected = real & ~heads.corrected & ~heads.lost, real & heads.corrected
    assert reads.present is not None
    reads.present.fill_(tables.attended.shape[2])
    reads.pages[kept] = held[kept]
    reads.frames.fill_(-1)
    reads.frames[kept] = frames[kept]
    reads.present[corrected] = _select_for(corrected, 0, candidates, heads.corrected, tables, misses_now, counts)
    reads.present[heads.lost] = _select_for(heads.lost, 0, candidates, heads.corrected, tables, misses_now, counts, held=held)
    if (chosen := corrected | heads.lost).any():
        reads.pages[chosen] = tables.pages(rows)[chosen]
        reads.frames[chosen] = tables.frames(rows, candidates.frames)[chosen]
    if candidates.on_turn:
        kept = kept & _due(candidates, tables)
    if ahead_first:
        _select_for(kept, 1, candidates, heads.corrected, tables, misses_ahead, counts)


def plan_rest(
    candidates: Candidates, heads: Heads, tables: Tables, misses_ahead: Misses, counts: torch.Tensor, *, ahead_first: bool
) -> None:
    """Behind attention, plan ahead where :func:`plan_pages` did not.

    A corrected kv head selects again if the next token begins a page; otherwise its candidates are the same. A lost one selects here, and
    one that is neither unless ``ahead_first``. With ``candidates.on_turn`` only rows that are ``due`` plan ahead. Arguments as in
    :func:`plan_pages`.
    """
    begins = (candidates.seq_lens % candidates.page_size == 0)[:, None]
    wanted = heads.lost | (heads.corrected & begins if ahead_first else ~heads.corrected | begins)
    if candidates.on_turn:
        wanted = wanted & _due(candidates, tables)
    _select_for((candidates.rows > 0)[:, None] & wanted, 1, candidates, heads.corrected, tables, misses_ahead, counts)


def _due(candidates: Candidates, tables: Tables) -> torch.Tensor:
    """``[B, 1]`` bool: whose kv heads plan ahead, if they select on turn."""
    return due(candidates.seq_lens, candidates.page_size, tables.attended.shape[2], candidates.budget)[:, None]


def _select(
    candidates: Candidates, tables: Tables, tokens: torch.Tensor, bonus: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`select_pages` among ``candidates`` as if the contexts had ``tokens [B]``."""
    most = most_to_choose(candidates, tables, tokens)
    where = candidates.budget, tables.slot_pages.shape[1], candidates.page_size, candidates.pooling
    return select_pages(candidates.logits, tokens, *where, most, bonus=bonus)


def _select_for(
    whose: torch.Tensor,
    more: int,
    candidates: Candidates,
    corrected: torch.Tensor,
    tables: Tables,
    misses: Misses,
    counts: torch.Tensor,
    *,
    held: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select for the kv heads of ``whose [B, H]`` with ``more`` tokens of context, and give slots to what is absent.

    With ``held [B, H, A]`` a context of more than A pages selects those. Returns ``[N]`` int32, how many of the pages of each kv head were on the device.
    """
    heads = b, h = whose.nonzero(as_tuple=True)
    if not len(b):
        return b.to(torch.int32)
    (slot_pages, attended, row_frames), budget, page_size = tables, candidates.budget, candidates.page_size
    rows, seq_lens, tokens, capacity = candidates.rows, candidates.seq_lens, candidates.seq_lens + more, slot_pages.shape[2]
    num_pages = -(-tokens[b] // page_size)
    bonus = candidates.hysteresis * tables.marked(rows, candidates.frames.shape[1]).float() if candidates.hysteresis else None
    weights, _, required = (x[heads] for x in _select(candidates, tables, tokens, bonus))
    if held is not None:
        marked = torch.zeros(*required.shape[:-1], required.shape[1] + 1, dtype=torch.bool, device=b.device)  # the last: no page
        marked.scatter_(1, held[heads].where(held[heads] >= 0, required.shape[1]).long(), True)
        always = required & (weights == float("-inf"))  # sink and window, some of which a row without slots may not have listed
        required = (marked[:, :-1] | always).where((num_pages > attended.shape[2])[:, None], required)
    resident = candidates.frames[b] >= 0
    table = slot_pages[rows[b], h].long()
    page = table.clamp(0, required.shape[1] - 1)
    kept = (required & ~resident).gather(1, page) & (table >= 0)
    in_slots = torch.zeros_like(required, dtype=torch.int32).scatter_add_(1, page, kept.int()) > 0
    missing = required & ~resident & ~in_slots & (row_frames[rows[b], :1] >= 0)
    needed = missing.sum(1, keepdim=True)
    worth = weights.gather(1, page).masked_fill(table < 0, float("-inf")).masked_fill(kept, float("inf"))
    victim = torch.zeros_like(kept).scatter_(1, worth.sort(dim=1, stable=True).indices, torch.arange(capacity, device=b.device) < needed)
    incoming = _ranked(missing, capacity).gather(1, (victim.cumsum(1) - 1).clamp(min=0)).where(victim, -1)

    slot_pages[rows[b], h] = incoming.where(victim, table.to(torch.int32))
    read_in_frames = required & resident
    pages, slots = (torch.arange(count, dtype=torch.int32, device=b.device) for count in (required.shape[1], capacity))
    entries = torch.cat([(-2 - pages).expand_as(required), slots.expand_as(kept)], 1)
    first = torch.cat([read_in_frames, kept], 1)
    attended[rows[b], h] = _listed(entries, torch.cat([read_in_frames, kept | victim], 1), first, attended.shape[2])
    recalled = (incoming >= 0) & (incoming < (seq_lens[b] // page_size)[:, None])
    i, slot = recalled.nonzero(as_tuple=True)
    misses.extend(candidates.page_table[b[i], incoming[i, slot].long()], h[i], row_frames[rows[b[i]], slot])

    most = most_to_choose(candidates, tables, tokens)[b]
    chosen = torch.minimum((num_pages - budget.window - budget.sink).clamp(min=0), most)
    counts[:, RECALLED].index_add_(0, rows[b].long(), recalled.sum(1))
    counts[:, HITS].index_add_(0, rows[b].long(), (chosen - recalled.sum(1)) * (corrected[heads] != bool(more)))
    return (read_in_frames.sum(1) + kept.sum(1)).to(torch.int32)


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


def _listed(entries: torch.Tensor, mask: torch.Tensor, first: torch.Tensor, width: int) -> torch.Tensor:
    """``[..., width]`` int32 ``entries`` at which ``mask [..., N]`` is True, those of ``first`` before the others, then -1."""
    size, index = mask.shape[-1], torch.arange(mask.shape[-1], device=mask.device)
    place = (index + size * (~first).int() + 2 * size * (~mask).int()).sort(-1).values[..., :width]
    place = F.pad(place, (0, width - place.shape[-1]), value=2 * size)
    return entries.expand_as(mask).gather(-1, place % size).where(place < 2 * size, -1).to(torch.int32)
