"""What methods share whose retrieval units are clusters: k-means of keys, and tokens in the order of their units' scores.

Letters as in ``method``; N tokens of a kv head, U units.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

SCORES = 1 << 25  # in memory at a time


def k_means(keys: torch.Tensor, clusters: int, iterations: int, cosine: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Lloyd's algorithm in every kv head of keys ``[B, H, N, D]``.

    It begins with keys at even distances, which is deterministic; papers that draw them do not say more of them than that. A cluster
    that no key is nearest to keeps its centroid, without tokens.

    Args:
        cosine: a key's nearest centroid has the largest cosine with it, else the smallest distance.

    Returns:
        Clusters ``[B, H, N] int64`` of the keys, and centroids ``[B, H, U, D]`` float32: means of the clusters' keys.
    """
    batch, heads, tokens, dim = keys.shape
    if not clusters:
        return keys.new_zeros(batch, heads, tokens, dtype=torch.int64), keys.new_zeros(batch, heads, 0, dim, dtype=torch.float32)
    flat = keys.flatten(0, 1).float()
    starts = (torch.arange(clusters, device=keys.device) * 2 + 1) * tokens // (2 * clusters)
    centroids = flat[:, starts]
    for _ in range(iterations):
        unit = _nearest(flat, centroids, cosine)
        centroids = _means(flat, unit, centroids)
    return unit.unflatten(0, (batch, heads)), centroids.unflatten(0, (batch, heads))


def in_order(scores: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """All N tokens ``[B, H, N]``, those of the unit with the highest score first, and within a unit by position.

    Args:
        scores: ``[B, H, U]`` of units; of equal ones the lower number wins.
        unit: ``[B, H, N]`` of each token.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(order.shape[-1], dtype=torch.int32, device=order.device).expand_as(order)
    return torch.empty_like(rank).scatter_(-1, order, rank).gather(-1, unit).sort(dim=-1, stable=True).indices


def _nearest(keys: torch.Tensor, centroids: torch.Tensor, cosine: bool) -> torch.Tensor:
    """``[M, N]`` numbers of the centroids ``[M, U, D]`` nearest to keys ``[M, N, D]``; a few keys at a time."""
    if cosine:
        centroids, offset = F.normalize(centroids, dim=-1), 0.0
    else:
        offset = centroids.square().sum(-1)[:, None] / 2
    chunk = max(1, SCORES // (centroids.shape[0] * centroids.shape[1]))
    return torch.cat([(part @ centroids.mT - offset).argmax(-1) for part in keys.split(chunk, dim=1)], dim=1)


def _means(keys: torch.Tensor, unit: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """``[M, U, D]`` means of the keys of each unit, or what was ``before``; by segments of sorted keys, which has one order of addition."""
    order = unit.argsort(dim=-1, stable=True)
    sizes = torch.zeros(before.shape[:2], dtype=torch.int64, device=unit.device).scatter_add_(1, unit, torch.ones_like(unit))
    sums = torch.segment_reduce(keys.take_along_dim(order[..., None], 1), "sum", lengths=sizes, axis=1, unsafe=True)
    return torch.where(sizes[..., None] > 0, sums / sizes.clamp(min=1)[..., None], before)
