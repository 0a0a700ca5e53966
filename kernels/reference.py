"""PyTorch specification of every kernel; on CPU these are the kernels.

Letters: B requests, H kv heads, G query heads of a kv head (Hq = H * G), D head_dim, S tokens of a page, R rows, C slots of a row,
A pages attended to in one step, P pages of the longest context, K selected pages, T tokens. Integers may be of any width; -1 means none.

Layouts (paper section 4.2): the device cache is NHD, ``[R * C, S, H, D]`` for keys and for values; the host pool is HND,
``[n_page, H, 2, S, D]``, so that one (page, kv head) is one contiguous unit of keys then values.

Row 0 is padding: requests of that row are passed over, and their attention output is zero.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F

from sglang_freekv.config import WORD_TOKENS, PageBudget
from sglang_freekv.kernels.misses import Misses
from sglang_freekv.kernels.reads import Reads

HITS, RECALLED, CORRECTED = range(3)
SPREAD = 0x9E3779B1 - (1 << 32)  # an odd number near 2 ** 32 over the golden ratio, as int32: neighbours get weights far apart
FAINT = -3.0e38

Pooling = Literal["softmax-mean", "mean", "max"]  # of a group's logits, to the weight of a page
Box = Literal["cuboid-mean", "min-max"]  # around the keys of a page


def digest_pages(
    keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int, box: Box = "min-max"
) -> None:
    """Summarise full pages by a box around their keys.

    Args:
        keys: ``[T, H, D]`` token rows to read.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page whose digest is written, -1 to skip.
        digests: ``[n_page, H, 2, D]`` upper then lower corners, in the dtype of the keys; written in place.
        box: "min-max", the elementwise max and min (paper section 3.2); or "cuboid-mean" (ArkVale), around the centre of that as far as
            the keys are from it in the mean, summed in float64, so that a digest is the same in whatever order its keys are added.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    pages = _gather_pages(keys, starts[chosen], page_size)
    upper, lower = pages.amax(2), pages.amin(2)
    if box == "cuboid-mean":
        centre = (upper.double() + lower.double()) / 2
        radius = (pages.double() - centre[:, :, None]).abs().sum(2) / page_size
        upper, lower = centre + radius, centre - radius
    digests[host_pages[chosen]] = torch.stack((upper, lower), dim=2).to(digests.dtype)


def digest_two_bit(keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int) -> None:
    """Summarise full pages by two bits for each dimension of each key: which of four levels is nearest, of equal ones the lower.

    The levels go from the smallest to the largest of the page's keys in equal steps: KIVI (Liu et al., ICML 2024) quantises keys so,
    per dimension. A dimension with a number that is not finite has codes of 0, and its page a score that is none.

    Args:
        keys, starts, host_pages: as of :func:`digest_pages`; D is even.
        digests: ``[n_page, H, E]`` the "min-max" box in the dtype of the keys, then ``[S / WORD_TOKENS, D / 2]`` words of 32 bits: bits 2 t
            and 2 t + 1 of word (w, d) are the code of token WORD_TOKENS * w + t in dimension d, and those 16 higher in dimension d + D / 2;
            written in place.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    pages = _gather_pages(keys, starts[chosen], page_size).float()
    upper, lower = pages.amax(2), pages.amin(2)
    above, span = 6 * (pages - lower[:, :, None]), (upper - lower)[:, :, None]
    codes = sum((above > odd * span).long() for odd in (1, 3, 5))  # [N, H, S, D]
    codes = codes.unflatten(3, (2, -1)).unflatten(2, (-1, WORD_TOKENS)) << _code_bits(keys.device)
    words = codes.sum((3, 4)).to(torch.int32).flatten(2)
    box = torch.cat((upper, lower), dim=2).to(digests.dtype)
    digests[host_pages[chosen]] = torch.cat((box, words.view(digests.dtype)), dim=2)


def offload_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    host_pages: torch.Tensor,
    host_pool: torch.Tensor,
) -> None:
    """Copy full pages from token rows (NHD) to the host pool (HND).

    Args:
        keys, values: ``[T, H, D]`` token rows to read.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page to write, -1 to skip.
        host_pool: ``[n_page, H, 2, S, D]`` written in place.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    page_size = host_pool.shape[3]
    units = torch.stack([_gather_pages(rows, starts[chosen], page_size) for rows in (keys, values)], dim=2)
    host_pool[host_pages[chosen].to(host_pool.device)] = units.to(host_pool.device)


def recall_pages(host_pool: torch.Tensor, misses: Misses, keys: torch.Tensor, values: torch.Tensor, programs: int = 8) -> None:
    """Copy the missing (page, kv head) units from the host pool (HND) to device slots (NHD), and leave the list empty.

    Args:
        host_pool: ``[n_page, H, 2, S, D]``.
        misses: what to copy, and where to.
        keys, values: ``[R * C, S, H, D]`` written in place.
        programs: on a GPU, how many copy; the rest of the device computes on.
    """
    host_pages, heads, slots = (column.long() for column in misses.columns())
    units = host_pool[host_pages.to(host_pool.device), heads.to(host_pool.device)].to(keys.device)
    keys[slots, :, heads] = units[:, 0]
    values[slots, :, heads] = units[:, 1]
    misses.clear()


def fill_pages(
    source_keys: torch.Tensor,
    source_values: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_pages: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Copy every page of the slot tables that has content from token rows that are on the device already.

    Args:
        source_keys, source_values: ``[T, H, D]``. A partial last page is copied with whatever follows it; attention masks it.
        starts: ``[B]`` first token row of each request.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of each request that the source holds.
        slot_pages: ``[R, H, C]`` logical page in each slot.
        keys, values: ``[R * C, S, H, D]`` written in place.
    """
    size, capacity = keys.shape[1], slot_pages.shape[2]
    pages = slot_pages[rows].long()
    b, h, c = ((pages >= 0) & (pages * size < seq_lens[:, None, None]) & (rows > 0)[:, None, None]).nonzero(as_tuple=True)
    tokens = (starts[b] + pages[b, h, c] * size)[:, None] + torch.arange(size, device=pages.device)
    tokens.clamp_(max=source_keys.shape[0] - 1)
    slots = rows[b] * capacity + c
    keys[slots, :, h] = source_keys[tokens, h[:, None]]
    values[slots, :, h] = source_values[tokens, h[:, None]]


def stage_pages(
    host_pool: torch.Tensor,
    host_pages: torch.Tensor,
    starts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Stream whole pages, all kv heads, from the host pool (HND) to token rows (NHD): the prefix of an extend.

    Args:
        host_pool: ``[n_page, H, 2, S, D]``.
        host_pages: ``[N]`` pages to read.
        starts: ``[N]`` first token row of each page.
        keys, values: ``[T, H, D]`` written in place.
    """
    units = host_pool[host_pages.to(host_pool.device)].to(keys.device).permute(2, 0, 3, 1, 4)
    rows = starts[:, None] + torch.arange(host_pool.shape[3], device=starts.device)
    keys[rows], values[rows] = units[0], units[1]


def checksum_pages(
    keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, checksums: torch.Tensor, page_size: int
) -> None:
    """Write the checksum of every unit of full pages: what :func:`offload_pages` with the same arguments stores.

    A checksum is the sum of a unit's 32-bit words, keys then values, each times an odd number of its place, modulo 2 ** 32: it tells any
    change of a single word, and words that changed places.

    Args:
        keys, values: ``[T, H, D]`` token rows to read; a row is whole words.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page whose checksums are written, -1 to skip.
        checksums: ``[n_page, H]`` int32, written in place.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    units = torch.stack([_gather_pages(rows, starts[chosen], page_size) for rows in (keys, values)], dim=2)
    checksums[host_pages[chosen]] = _checksums(units)


def verify_units(
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    tokens_per_start: int,
    heads: torch.Tensor,
    host_pages: torch.Tensor,
    count: torch.Tensor,
    every: int,
    checksums: torch.Tensor,
    layer: int,
    faults: torch.Tensor,
    page_size: int,
) -> None:
    """Compare units that came from the host with the checksums of their pages; what differs is noted.

    Args:
        keys, values: ``[T, H, D]`` token rows that hold the units.
        starts: ``[M]``; a unit's first token is in row ``start * tokens_per_start``.
        tokens_per_start: the page size if starts are slots, 1 if they are rows.
        heads, host_pages: ``[M]`` kv head and host page of each unit.
        count: ``[2]`` int32: so many of M are units; and a number that is another one each time.
        every: one unit in ``every`` is examined; the number says which one is the first.
        checksums: ``[n_page, H]`` int32 of :func:`checksum_pages`.
        layer: to be noted.
        faults: ``[1 + F, 5]`` int32: the first element counts faults, in all; fault n is row ``1 + n % F``: layer, host page, kv head,
            the checksum found, the one expected.
    """
    units, turn = count.tolist()
    examined = slice(_mixed(turn) % every, min(units, len(host_pages)), every)
    starts, heads, host_pages = (x[examined].long() for x in (starts, heads, host_pages))
    rows = starts[:, None] * tokens_per_start + torch.arange(page_size, device=starts.device)
    found = _checksums(torch.stack([x[rows, heads[:, None]] for x in (keys, values)], dim=1))
    expected = checksums[host_pages, heads]
    wrong = (found != expected).nonzero().squeeze(1)
    notes = torch.stack((torch.full_like(wrong, layer), host_pages[wrong], heads[wrong], found[wrong], expected[wrong]), dim=1)
    places = int(faults[0, 0]) + torch.arange(len(wrong), device=faults.device)
    faults[1 + places % (len(faults) - 1)] = notes.int()
    faults[0, 0] += len(wrong)


def append_tokens(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    slot_pages: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new token of every request into its current page, which must be resident.

    Args:
        new_keys, new_values: ``[B, H, D]``.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context, the new one included.
        page_table: ``[B, P]`` logical page -> host page.
        slot_pages: ``[R, H, C]`` logical page in each slot.
        keys, values: ``[R * C, S, H, D]`` written in place.

    Returns:
        ``(starts, filled)``: ``[B, H]`` first token row of the current page in the flattened cache, and ``[B]`` the host page of a
        page that this token fills, -1 where it fills none.
    """
    size, capacity = keys.shape[1], slot_pages.shape[2]
    page, offset = (seq_lens - 1) // size, (seq_lens - 1) % size
    position = (slot_pages[rows] == page[:, None, None]).to(torch.int32).argmax(-1)
    slots = rows[:, None] * capacity + position
    real = (rows > 0).nonzero().squeeze(1)
    heads = torch.arange(new_keys.shape[1], device=rows.device)
    keys[slots[real], offset[real, None], heads] = new_keys[real]
    values[slots[real], offset[real, None], heads] = new_values[real]
    filled = page_table.gather(1, page[:, None].long()).squeeze(1)
    return slots * size, filled.where((offset == size - 1) & (rows > 0), -1)


def needs_correction(
    queries: torch.Tensor, rows: torch.Tensor, previous: torch.Tensor, tau: float, counts: torch.Tensor, num_kv_heads: int
) -> torch.Tensor:
    """Flag the kv heads whose query turned since the last step (paper section 3.3), and remember the query for the next.

    Args:
        queries: ``[B, Hq, D]`` post-RoPE queries of this step.
        rows: ``[B]`` row of each request.
        previous: ``[R, Hq, D]`` queries of the step before; those of ``rows`` are replaced by ``queries``.
        tau: threshold on the cosine similarity, averaged over the group.
        counts: ``[R, 3]`` int64; CORRECTED is added to.

    Returns:
        ``[B, H]`` bool.
    """
    similarity = F.cosine_similarity(queries.float(), previous[rows].float(), dim=-1)
    turned = (similarity.unflatten(1, (num_kv_heads, -1)).mean(-1) < tau) & (rows > 0)[:, None]
    previous[rows] = queries.where((rows > 0)[:, None, None], previous[rows])
    counts[:, CORRECTED].index_add_(0, rows.long(), turned.sum(1))
    return turned


def score_pages(
    queries: torch.Tensor,
    digests: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """Bound the attention logits of every page that is a candidate for the next step, per query head (paper section 3.2).

    A page's bound is ``scale * sum_d max(q_d * max_d, q_d * min_d)``, which is ``relu(q) . max - relu(-q) . min``.

    Args:
        queries: ``[B, Hq, D]``.
        digests: ``[n_page, H, 2, D]``.
        rows, seq_lens, page_table: ``[B]``, ``[B]``, ``[B, P]`` as in :func:`plan_pages`.
        budget: sink and window bound the candidates.
        scale: of the layer's attention logits.

    Returns:
        ``[B, Hq, P]`` float32 of the candidates of ``seq_lens + 1`` tokens, among which are those of ``seq_lens``; anything elsewhere.
    """
    q = queries.float().unflatten(1, (digests.shape[1], -1))
    maxima, minima = digests[page_table.clamp(min=0).long()].float().unbind(3)
    bound = torch.einsum("bhgd,bphd->bhgp", q.relu(), maxima) - torch.einsum("bhgd,bphd->bhgp", (-q).relu(), minima)
    return (bound * scale).flatten(1, 2)


def score_two_bit(
    queries: torch.Tensor,
    digests: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """As :func:`score_pages`, by the ``digests [n_page, H, E]`` of :func:`digest_two_bit`: the logarithm of the sum of the exponentials
    of ``scale * q . k`` over the tokens of a page."""
    num_kv_heads, head_dim = digests.shape[1], queries.shape[2]
    logits = torch.empty(*queries.shape[:2], page_table.shape[1], device=queries.device)
    for q, pages, into in zip(queries.float().unflatten(1, (num_kv_heads, -1)), page_table, logits):  # the keys of one request at a time
        units = digests[pages.clamp(min=0).long()]  # [P, H, E]
        upper, lower = units[..., : 2 * head_dim].float().unflatten(-1, (2, 1, head_dim)).unbind(2)
        words = units[..., 2 * head_dim :].contiguous().view(torch.int32).unflatten(2, (page_size // WORD_TOKENS, 1, 1, -1))
        codes = (words >> _code_bits(words.device)) & 3
        keys = lower + codes.flatten(4).flatten(2, 3) * ((upper - lower) / 3)  # [P, H, S, D]
        into[:] = (torch.einsum("hgd,phsd->hgps", q, keys) * scale).logsumexp(-1).flatten(0, 1)
    return logits


def _code_bits(device: torch.device) -> torch.Tensor:
    """``[WORD_TOKENS, 2, 1]`` where in a word the codes of its tokens are, in the lower and in the upper half of the dimensions."""
    return 2 * torch.arange(2 * WORD_TOKENS, device=device).view(2, WORD_TOKENS, 1).transpose(0, 1)


def select_pages(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    budget: PageBudget,
    num_kv_heads: int,
    page_size: int,
    pooling: Pooling = "softmax-mean",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weigh candidate pages for every kv head, and take the heaviest; of equal weights the earlier page.

    It is part of :func:`plan_pages` and :func:`seed_slots`.

    Args:
        logits: ``[B, Hq, P]`` of :func:`score_pages`.
        tokens: ``[B]`` tokens of context.
        pooling: the weight of a page. "softmax-mean": the softmax over the candidates, averaged over the group (paper section 3.2); in
            logarithms, because far pages would underflow to equal weights. "mean", "max": of the group's logits as they are. What
            overflowed has no say.

    Returns:
        ``(weights, order, required)``: ``[B, H, P]`` float32, -inf where a page is no candidate; ``[B, H, P]`` pages from
        heavy to light; ``[B, H, P]`` bool, pages of the sink, the window, and those chosen.
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


def seed_slots(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    budget: PageBudget,
    slot_pages: torch.Tensor,
    attended: torch.Tensor,
    page_size: int,
    pooling: Pooling = "softmax-mean",
) -> None:
    """Begin a row afresh: what the first decode step attends to, and in the slots that are left the next best pages.

    Args:
        logits: ``[B, Hq, P]`` of :func:`score_pages`.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context; the next one may begin a page, which gets its slot here.
        slot_pages: ``[R, H, C]`` int32, written: logical page in each slot, in ascending order, then -1.
        attended: ``[R, H, A]`` int32, written: slots of the pages to attend to, in ascending order, then -1.
        pooling: as :func:`select_pages`.
    """
    num_kv_heads, capacity = slot_pages.shape[1:]
    weights, order, required = select_pages(logits, seq_lens + 1, budget, num_kv_heads, page_size, pooling)
    extra = budget.selected + capacity - budget.total
    resident = required.scatter(2, order[..., :extra], True) & (required | (weights > float("-inf")))
    real = rows > 0
    slot_pages[rows[real]] = _ranked(resident, capacity)[real]
    slot_of_page = (resident.cumsum(-1) - 1).to(torch.int32)
    wanted = _ranked(required, attended.shape[2])
    slots = slot_of_page.gather(2, wanted.clamp(min=0).long()).where(wanted >= 0, -1)
    attended[rows[real]] = slots[real]


def plan_pages(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    turned: torch.Tensor,
    early: bool,
    slot_pages: torch.Tensor,
    attended: torch.Tensor,
    reads: Reads,
    corrected: Misses,
    ahead: Misses,
    counts: torch.Tensor,
    page_size: int,
    pooling: Pooling = "softmax-mean",
) -> None:
    """Write down what this step attends to: of a kv head that turned the pages that it selects now, else those selected a step ago.

    What it selects gets a slot: what is resident is kept, what is missing goes where nothing is required. Missing pages in ascending
    order take the slots that hold nothing, then those whose page is lightest, in order of slots.

    Args:
        logits: ``[B, Hq, P]`` of :func:`score_pages`.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context. Who turned selects among the candidates of so many, for the next step among those of one more.
        page_table: ``[B, P]`` logical page -> host page.
        turned: ``[B, H]`` bool, kv heads that are corrected in this step.
        early: kv heads that have not turned select for the next step here, and not in :func:`plan_rest`. The tables are then those of the
            next step.
        slot_pages: ``[R, H, C]`` int32, updated: logical page in each slot.
        attended: ``[R, H, A]`` int32, updated: slots of the pages to attend to: those that are in theirs, in ascending order, then those
            that are not yet, in ascending order, then -1.
        reads: written.
        corrected, ahead: receive the pages to recall for this step, and behind its attention for the next; a page about to begin has no
            content and is not among them.
        counts: ``[R, 3]`` int64, added to: RECALLED, and HITS, pages chosen by score that were resident, of the first selection of each
            kv head in a step.
        pooling: as :func:`select_pages`.
    """
    real, capacity = (rows > 0)[:, None], slot_pages.shape[2]
    where = logits, rows, seq_lens, page_table, budget
    written = slot_pages, attended, counts, page_size, pooling
    reads.slots.fill_(-1)
    reads.present.fill_(attended.shape[2])

    def write_down(heads: tuple[torch.Tensor, torch.Tensor]) -> None:
        b, h = heads
        listed = attended[rows[b], h]
        reads.pages[heads] = slot_pages[rows[b], h].gather(1, listed.clamp(min=0).long())
        reads.slots[heads] = (rows[b, None] * capacity + listed).where(listed >= 0, -1).to(torch.int32)

    write_down((real & ~turned).nonzero(as_tuple=True))
    now = (real & turned).nonzero(as_tuple=True)
    reads.present[now] = _select_for(now, 0, *where, turned, corrected, *written)
    write_down(now)
    if early:
        _select_for((real & ~turned).nonzero(as_tuple=True), 1, *where, turned, ahead, *written)


def plan_rest(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    turned: torch.Tensor,
    early: bool,
    slot_pages: torch.Tensor,
    attended: torch.Tensor,
    ahead: Misses,
    counts: torch.Tensor,
    page_size: int,
    pooling: Pooling = "softmax-mean",
) -> None:
    """Behind the attention, select for the next step what :func:`plan_pages` has not: for kv heads that turned, where the next token begins
    a page; elsewhere the candidates are the same. And for those that have not turned, unless ``early``.

    Arguments as of :func:`plan_pages`.
    """
    begins = (seq_lens % page_size == 0)[:, None]
    wanted = turned & begins if early else ~turned | begins
    heads = ((rows > 0)[:, None] & wanted).nonzero(as_tuple=True)
    _select_for(heads, 1, logits, rows, seq_lens, page_table, budget, turned, ahead, slot_pages, attended, counts, page_size, pooling)


def _select_for(
    heads: tuple[torch.Tensor, torch.Tensor],
    more: int,
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    budget: PageBudget,
    turned: torch.Tensor,
    misses: Misses,
    slot_pages: torch.Tensor,
    attended: torch.Tensor,
    counts: torch.Tensor,
    page_size: int,
    pooling: Pooling,
) -> torch.Tensor:
    """Select for kv heads ``(b, h)`` in contexts of so many ``more`` tokens; returns of how many of their pages nothing has to come."""
    (b, h), tokens, capacity = heads, seq_lens + more, slot_pages.shape[2]
    weights, _, required = (x[heads] for x in select_pages(logits, tokens, budget, slot_pages.shape[1], page_size, pooling))
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
    misses.extend(page_table[b[i], incoming[i, slot].long()], h[i], rows[b[i]] * capacity + slot)

    chosen = (-(-tokens[b] // page_size) - budget.window - budget.sink).clamp(0, budget.selected)
    counts[:, RECALLED].index_add_(0, rows[b].long(), recalled.sum(1))
    counts[:, HITS].index_add_(0, rows[b].long(), (chosen - recalled.sum(1)) * (turned[heads] != bool(more)))
    return kept.sum(1, dtype=torch.int32)


def attend_pages(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    reads: Reads,
    scale: float,
    begun: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode attention over the pages in ``reads``, in one call, or in two if some pages are on their way.

    Args:
        queries: ``[B, Hq, D]``.
        keys, values: ``[R * C, S, H, D]``.
        seq_lens: ``[B]`` tokens of context, the new one included; masks the partial last page.
        reads: of :func:`plan_pages`: a first call reads no more pages of a list than are present.
        begun: what the first call returned; this one attends to the others, and may read all.

    Returns:
        ``[B, Hq, D]``; of a first call something for the second.
    """
    page_size, num_kv_heads = keys.shape[1:3]
    grouped = queries.unflatten(1, (num_kv_heads, -1))
    result = torch.zeros_like(grouped) if begun is None else begun.unflatten(1, (num_kv_heads, -1)).clone()
    wanted = reads.slots[..., 0] >= 0
    if reads.present is not None:  # a kv head that has to wait for a page is left to the second call
        waits = reads.present < (reads.slots >= 0).sum(-1)
        wanted = wanted & (waits if begun is not None else ~waits)
    b, h = wanted.nonzero(as_tuple=True)
    if len(b):
        width = int((reads.slots[b, h] >= 0).sum(-1).max())
        slots, pages = (x[b, h, :width].long() for x in (reads.slots, reads.pages))
        position = pages[..., None] * page_size + torch.arange(page_size, device=b.device)
        visible = ((slots >= 0)[..., None] & (position < seq_lens[b, None, None])).flatten(1)
        k, v = (cache[slots.clamp(min=0), :, h[:, None]].flatten(1, 2) for cache in (keys, values))
        k, v = (x.masked_fill_(~visible[..., None], 0) for x in (k, v))  # what lies there may be another request's, even NaN
        result[b, h] = F.scaled_dot_product_attention(grouped[b, h], k, v, attn_mask=visible[:, None], scale=scale)
    return result.flatten(1, 2)


def extend_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_lens: list[int],
    key_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of new tokens over ``[prefix | new]``, request after request.

    Args:
        queries: ``[sum(query_lens), Hq, D]``.
        keys, values: ``[sum(key_lens), H, D]``; a request's queries are its last ``query_len`` positions.

    Returns:
        ``[sum(query_lens), Hq, D]``.
    """
    outputs = []
    for q, k, v in zip(queries.split(query_lens), keys.split(key_lens), values.split(key_lens)):
        past = k.shape[0] - q.shape[0]
        rows = torch.arange(q.shape[0], device=q.device)[:, None] + past
        mask = torch.arange(k.shape[0], device=q.device) <= rows if past else None
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def snapshot_pages(
    req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> None:
    """Read the host pages of every request off the token slots of its pages, the one that the next token may begin included.

    Args:
        req_to_token: ``[R, T]`` token slot of each position; T bounds the context.
        rows: ``[B]`` row of each request.
        seq_lens: ``[B]`` tokens of context.
        page_table: ``[B, P]`` written: logical page -> host page, 0 beyond the context.
    """
    first = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    begun = (first <= seq_lens[:, None]) & (first < req_to_token.shape[1])
    tokens = req_to_token[rows[:, None], first.clamp(max=req_to_token.shape[1] - 1)]
    page_table.copy_((tokens // page_size).where(begun, 0))


def _pool(logits: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """``[B, H, P]`` weights of ``[B, H, G, P]`` logits, all finite."""
    if pooling == "softmax-mean":
        shares = logits.log_softmax(-1).nan_to_num(nan=FAINT).clamp(min=FAINT)
        return shares.logsumexp(2) - math.log(logits.shape[2])
    finite = logits.abs() < -FAINT
    if pooling == "mean":
        return (logits.where(finite, 0) / logits.shape[2]).sum(2)
    return logits.where(finite, FAINT).amax(2)


def _mixed(number: int) -> int:
    """A number below 2 ** 32 that looks random (Wellons's lowbias32): a layer whose turn comes at regular intervals gets all remainders."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number = (number ^ number >> shift) * factor & 0xFFFFFFFF
    return number ^ number >> 16


def _checksums(units: torch.Tensor) -> torch.Tensor:
    """int32 ``[...]`` of units ``[..., 2, S, D]``."""
    words = units.contiguous().view(torch.int32).flatten(-3).long()
    weights = (torch.arange(words.shape[-1], device=words.device) * SPREAD) | 1  # int64, whose lower half is int32's product
    return (words * weights).sum(-1).to(torch.int32)


def _gather_pages(rows: torch.Tensor, starts: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[N, H, S, D]`` pages that begin at ``starts [N, H]`` of token rows ``[T, H, D]``."""
    token = starts[:, :, None] + torch.arange(page_size, device=starts.device)
    heads = torch.arange(rows.shape[1], device=starts.device)[None, :, None]
    return rows[token, heads]


def _ranked(mask: torch.Tensor, width: int) -> torch.Tensor:
    """``[..., width]`` int32 indices at which ``mask [..., N]`` holds, in ascending order, then -1."""
    rank = torch.where(mask, mask.cumsum(-1) - 1, width).clamp(max=width)
    index = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.int32).expand(mask.shape)
    ranked = torch.full((*mask.shape[:-1], width + 1), -1, dtype=torch.int32, device=mask.device)
    return ranked.scatter_(-1, rank, index)[..., :width]
