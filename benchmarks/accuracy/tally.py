"""What layers did while an answer was generated: sums on the device, means in the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.accuracy.method import Prompt, Trace

FIELDS = ("attended", "fetched", "corrected", "similarity", "selected", "waited", "mass")
DIGITS = 5


class Tally:
    """Sums over decode steps and sequences that had not ended, for one method.

    Args:
        layers: of the model.
        dense_layers: the first layers, where the method does not act; they do not count in the means over layers.
        watch_queries: also measure, whatever the method, how similar each layer's query is to that of the step before.
    """

    def __init__(self, layers: int, dense_layers: int = 0, watch_queries: bool = False) -> None:
        self.dense_layers, self.watch_queries = dense_layers, watch_queries
        self.sums: dict[str, list[torch.Tensor | None]] = {field: [None] * layers for field in FIELDS}  # [layer] -> [2] of sum and count
        self.cosines: list[list[torch.Tensor]] = [[] for _ in range(layers)]  # [layer][step] -> [H, 2] of sum and count
        self._previous: list[torch.Tensor] = []
        self._steps = [0] * layers

    def begin(self, prompts: list[Prompt]) -> None:
        """Further sequences begin; ``prompts`` of each layer."""
        self._previous = [prompt.queries[:, :, -1] for prompt in prompts]
        self._heads = prompts[0].keys.shape[1]
        self._steps = [0] * len(prompts)

    def add(self, layer: int, query: torch.Tensor, trace: Trace | None, alive: torch.Tensor) -> None:
        """One layer's decode step: query ``[B, Hq, D]``, and ``[B] bool`` which sequences count."""
        for field in FIELDS if trace is not None else ():
            if (value := getattr(trace, field)) is not None:
                earlier, total = self.sums[field][layer], _sum_and_count(value, alive).sum(dim=0)
                self.sums[field][layer] = total if earlier is None else earlier + total
        if self.watch_queries:
            cosines = F.cosine_similarity(query.float(), self._previous[layer].float(), dim=-1)
            total = _sum_and_count(cosines.unflatten(1, (self._heads, -1)).mean(dim=-1), alive)
            steps, step = self.cosines[layer], self._steps[layer]
            steps[step : step + 1] = [steps[step] + total] if step < len(steps) else [total]
            self._previous[layer] = query
            self._steps[layer] += 1

    def summary(self) -> dict:
        """``mean`` of each field over the layers where the method acts, ``by_layer`` with None where nothing is known, and, of queries
        that were watched, ``query_similarity`` as ``[layer][step]`` and ``[layer][kv head]``."""
        known = {field: sums for field, sums in self.sums.items() if any(total is not None for total in sums)}
        by_layer = {field: [None if total is None else _mean(*total.tolist()) for total in sums] for field, sums in known.items()}
        acting = {field: [value for value in values[self.dense_layers :] if value is not None] for field, values in by_layer.items()}
        mean = {field: round(sum(values) / len(values), DIGITS) for field, values in acting.items() if values}
        found = {"mean": mean, "by_layer": by_layer}
        if any(self.cosines):
            stacked = torch.stack([torch.stack(steps) for steps in self.cosines]).cpu()  # [layer, step, H, 2]
            of = {"by_step": stacked.sum(dim=2), "by_head": stacked.sum(dim=1)}
            found["query_similarity"] = {name: [[_mean(*cell) for cell in row] for row in sums.tolist()] for name, sums in of.items()}
        return found


def _sum_and_count(values: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """``[B, H]`` of which NaN is nothing, to ``[H, 2] float64``."""
    values = values.to(alive.device, torch.float64)
    counted = alive[:, None] & ~values.isnan()
    return torch.stack((values.where(counted, 0).sum(dim=0), counted.double().sum(dim=0)), dim=-1)


def _mean(total: float, count: float) -> float | None:
    return round(total / count, DIGITS) if count else None
