"""PyTorch specification of every kernel; on CPU these are the kernels.

Letters: B requests, H kv heads, G query heads of a kv head (Hq = H * G), D head_dim, S tokens of a page, C slots of a row,
P pages of the longest context, K selected pages, T tokens. Ids are int64 unless said otherwise; -1 means none.

Layouts (paper section 4.2): the device cache is NHD, ``[n_slot, S, H, D]`` for keys and for values; the host pool is HND,
``[n_page, H, 2, S, D]``, so that one (page, kv head) is one contiguous unit of keys then values.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def digest_pages(keys: torch.Tensor, starts: torch.Tensor, host_pages: torch.Tensor, digests: torch.Tensor, page_size: int) -> None:
    """Summarise full pages by the elementwise max and min of their keys (paper section 3.2).

    Args:
        keys: ``[T, H, D]`` token rows to read.
        starts: ``[N, H]`` row of each page's first token, per kv head.
        host_pages: ``[N]`` host page whose digest is written, -1 to skip.
        digests: ``[n_page, H, 2, D]`` maxima then minima, in the dtype of the keys; written in place.
    """
    chosen = (host_pages >= 0).nonzero().squeeze(1)
    pages = _gather_pages(keys, starts[chosen], page_size)
    digests[host_pages[chosen]] = torch.stack((pages.amax(2), pages.amin(2)), dim=2)


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


def recall_pages(
    host_pool: torch.Tensor,
    host_pages: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Copy (page, kv head) units from the host pool (HND) to device slots (NHD).

    Args:
        host_pool: ``[n_page, H, 2, S, D]``.
        host_pages: ``[B, H, C]`` host page to bring in, -1 for none.
        slots: ``[B, H, C]`` slot that receives it.
        keys, values: ``[n_slot, S, H, D]`` written in place.
    """
    b, h, c = (host_pages >= 0).nonzero(as_tuple=True)
    units = host_pool[host_pages[b, h, c].to(host_pool.device), h.to(host_pool.device)].to(keys.device)
    keys[slots[b, h, c], :, h] = units[:, 0]
    values[slots[b, h, c], :, h] = units[:, 1]


def fill_pages(
    source_keys: torch.Tensor,
    source_values: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Copy pages from token rows that are on the device already to device slots.

    Args:
        source_keys, source_values: ``[T, H, D]``. A partial last page is copied with whatever follows it; attention masks it.
        starts: ``[B, H, C]`` row of the page's first token, -1 for none.
        slots: ``[B, H, C]`` slot that receives it.
        keys, values: ``[n_slot, S, H, D]`` written in place.
    """
    b, h, c = (starts >= 0).nonzero(as_tuple=True)
    offsets = torch.arange(keys.shape[1], device=starts.device)
    rows = (starts[b, h, c, None] + offsets).clamp_(max=source_keys.shape[0] - 1)
    keys[slots[b, h, c], :, h] = source_keys[rows, h[:, None]]
    values[slots[b, h, c], :, h] = source_values[rows, h[:, None]]


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


def append_tokens(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Write the new token of every request into its current page.

    Args:
        new_keys, new_values: ``[B, H, D]``.
        slots: ``[B, H]`` slot of the current page, per kv head.
        offsets: ``[B]`` position within the page.
        keys, values: ``[n_slot, S, H, D]`` written in place.
    """
    heads = torch.arange(new_keys.shape[1], device=slots.device)
    keys[slots, offsets[:, None], heads] = new_keys
    values[slots, offsets[:, None], heads] = new_values


def needs_correction(queries: torch.Tensor, previous: torch.Tensor, num_kv_heads: int, tau: float) -> torch.Tensor:
    """Flag the kv heads whose query turned since the last step (paper section 3.3).

    Args:
        queries, previous: ``[B, Hq, D]`` post-RoPE queries of this step and the one before.
        tau: threshold on the cosine similarity, averaged over the group.

    Returns:
        ``[B, H]`` bool.
    """
    similarity = F.cosine_similarity(queries.float(), previous.float(), dim=-1)
    return similarity.unflatten(1, (num_kv_heads, -1)).mean(-1) < tau


def score_pages(
    queries: torch.Tensor, digests: torch.Tensor, page_table: torch.Tensor, first: int, last: torch.Tensor
) -> torch.Tensor:
    """Score candidate pages for every kv head; higher is better (paper section 3.2, group-consistent selection).

    A page's score for a query head bounds its largest attention logit: ``sum_d max(q_d * max_d, q_d * min_d) / sqrt(D)``,
    which is ``relu(q) . max - relu(-q) . min``. Softmax over the candidates, then the mean over the group, in logarithms:
    far pages would underflow to equal scores.

    Args:
        queries: ``[B, Hq, D]``.
        digests: ``[n_page, H, 2, D]``.
        page_table: ``[B, P]`` logical page -> host page.
        first: first candidate page, the same for all requests.
        last: ``[B]`` one past the last candidate page.

    Returns:
        ``[B, H, P]`` float32 logarithms of the weights, -inf where the page is not a candidate.
    """
    num_kv_heads, head_dim = digests.shape[1], digests.shape[3]
    q = queries.float().unflatten(1, (num_kv_heads, -1))
    maxima, minima = digests[page_table].float().unbind(3)
    bound = torch.einsum("bhgd,bphd->bhgp", q.relu(), maxima) - torch.einsum("bhgd,bphd->bhgp", (-q).relu(), minima)
    pages = torch.arange(page_table.shape[1], device=queries.device)
    candidate = ((pages >= first) & (pages < last[:, None]))[:, None]
    logits = (bound / head_dim**0.5).masked_fill(~candidate[:, None], float("-inf"))
    weights = logits.log_softmax(-1).logsumexp(2) - math.log(q.shape[2])
    return weights.masked_fill(~candidate, float("-inf"))


def select_pages(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Take the pages of highest score; of equal scores the earlier page.

    Args:
        scores: ``[B, H, P]`` float32, -inf where a page is no candidate.
        count: K.

    Returns:
        ``[B, H, K]`` int32 logical pages, -1 where there are fewer candidates.
    """
    values, pages = scores.sort(dim=-1, descending=True, stable=True)
    pages = pages.to(torch.int32).masked_fill(values == float("-inf"), -1)[..., :count]
    return F.pad(pages, (0, count - pages.shape[-1]), value=-1)


def plan_slots(slot_pages: torch.Tensor, required: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every required page a slot: keep what is resident, put what is missing where nothing is required.

    Args:
        slot_pages: ``[B, H, C]`` int32 logical page in each slot, -1 empty.
        required: ``[B, H, A]`` int32 logical pages without repetition, -1 padding; at most C of them.

    Returns:
        ``(planned, incoming)``, both ``[B, H, C]`` int32: the slot table afterwards, and the page that is new in a slot (-1: none).
    """
    match = (slot_pages[..., :, None] == required[..., None, :]) & (required >= 0)[..., None, :]
    kept, missing = match.any(-1), (required >= 0) & ~match.any(-2)
    capacity = slot_pages.shape[-1]
    order = torch.where(missing, missing.cumsum(-1) - 1, capacity)
    queue = required.new_full((*required.shape[:-1], capacity + 1), -1).scatter_(-1, order, required)
    queue[..., capacity] = -1
    turn = torch.where(kept, capacity, (~kept).cumsum(-1) - 1)
    incoming = queue.gather(-1, turn)
    return torch.where(kept, slot_pages, incoming), incoming


def attend_pages(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Decode attention over the resident pages of every (request, kv head).

    Args:
        queries: ``[B, Hq, D]``.
        keys, values: ``[n_slot, S, H, D]``.
        slots: ``[B, C]`` slots of each request's row.
        pages: ``[B, H, C]`` int32 logical page in each of them, -1 where there is none; the order is free.
        seq_lens: ``[B]`` tokens of context, the new one included; masks the partial last page.

    Returns:
        ``[B, Hq, D]``.
    """
    page_size, num_kv_heads = keys.shape[1], keys.shape[2]
    used = int((pages >= 0).any(1).any(0).nonzero().max()) + 1
    slots, pages = slots[:, :used], pages[..., :used]
    position = pages[..., None] * page_size + torch.arange(page_size, device=pages.device)
    visible = ((pages[..., None] >= 0) & (position < seq_lens[:, None, None, None])).flatten(2)
    pages_of_heads = (cache[slots].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
    k, v = (x.masked_fill(~visible[..., None], 0) for x in pages_of_heads)  # what lies there may be another request's, even NaN
    q = queries.unflatten(1, (num_kv_heads, -1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, :, None], scale=scale).flatten(1, 2)


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


def _gather_pages(rows: torch.Tensor, starts: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[N, H, S, D]`` pages that begin at ``starts [N, H]`` of token rows ``[T, H, D]``."""
    token = starts[:, :, None] + torch.arange(page_size, device=starts.device)
    heads = torch.arange(rows.shape[1], device=starts.device)[None, :, None]
    return rows[token, heads]
