"""How far a method's predictions are from dense attention's, where both are given the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks.accuracy.method import Budget, Method
from benchmarks.accuracy.model import OfflineModel, Prefilled
from benchmarks.accuracy.tally import DIGITS, Tally

QUANTITIES = ("nll", "kl", "agreement")


@dataclass(frozen=True)
class Texts:
    """B texts after dense prefill of all but their ends.

    Args:
        beginnings: B times ``[1, T]`` token ids.
        prefilled: of the beginnings, with KV as it is stored.
        fed: ``[B, N] int64`` tokens that follow.
        truth: ``[B, N] int64`` the token behind each of them.
        dense: ``[B, N, V] float32`` logits behind each of them, of dense attention to KV as computed.
    """

    beginnings: Sequence[torch.Tensor]
    prefilled: Prefilled
    fed: torch.Tensor
    truth: torch.Tensor
    dense: torch.Tensor

    @classmethod
    def of(cls, model: OfflineModel, token_ids: torch.Tensor, steps: int, queries: int | None) -> Texts:
        """Of ``[B, T + steps + 1]`` token ids, prefilled one by one: logits of attention may take memory by the square of T.

        Args:
            queries: as of ``OfflineModel.prefill``.
        """
        token_ids = token_ids.to(model.device)
        beginnings, fed, truth = token_ids[:, : -steps - 1].split(1), token_ids[:, -steps - 1 : -1], token_ids[:, -steps:]
        prefilled = joined([model.prefill(each, queries) for each in beginnings])
        return cls(beginnings, prefilled, fed, truth, model.dense_logits(prefilled, fed))

    def stored(self, model: OfflineModel, queries: int | None, kv_dtypes: Sequence[str]) -> Texts:
        """These texts, and the same dense attention, after a prefill that stores KV otherwise; arguments as of ``OfflineModel.prefill``."""
        return replace(self, prefilled=joined([model.prefill(each, queries, kv_dtypes) for each in self.beginnings]))


def joined(parts: Sequence[Prefilled]) -> Prefilled:
    """Prompts of equal length as one batch."""
    prompts = []
    for layer in zip(*(part.prompts for part in parts)):
        batch = {name: torch.cat([getattr(prompt, name) for prompt in layer]) for name in ("queries", "keys", "values", "plain_keys")}
        prompts.append(replace(layer[0], **batch))
    return Prefilled(prompts, torch.cat([part.first for part in parts]))


@dataclass
class Distance:
    """Means over the steps of each text, text by text.

    Args:
        nll: negative log-likelihood of the true token, in nats.
        kl: Kullback-Leibler divergence of the prediction from dense attention's, in nats.
        agreement: share of steps in which the likeliest token is dense attention's.
    """

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)

    def add(self, model: OfflineModel, texts: Texts, methods: Sequence[Method], budget: Budget, tally: Tally) -> None:
        """Follow more texts with a method in each layer."""
        steps = [
            _distances(logits, texts.dense[:, number], texts.truth[:, number])
            for number, logits in enumerate(model.follow(texts.prefilled, methods, budget, texts.fed, tally))
        ]
        for name, means in zip(QUANTITIES, torch.stack(steps).mean(0).tolist()):
            getattr(self, name).extend(means)

    @property
    def result(self) -> dict[str, list[float]]:
        return {name: [float(f"{value:.6g}") for value in getattr(self, name)] for name in QUANTITIES}


def _distances(logits: torch.Tensor, dense: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """``[3, B] float64``, the quantities of one step: of logits ``[B, V]``, dense ones, and true tokens ``[B]``."""
    ours, theirs = (each.double().log_softmax(-1) for each in (logits, dense))
    nll = -ours.gather(-1, truth[:, None]).squeeze(-1)
    return torch.stack((nll, (theirs.exp() * (theirs - ours)).sum(-1), (ours.argmax(-1) == theirs.argmax(-1)).double()))


def missing(trace: dict) -> list[float | None]:
    """By layer, the share of selected tokens that the step before did not read, of a trace as of ``Tally.summary``."""
    fields = (trace["by_layer"].get(name) for name in ("fetched", "selected"))
    both = zip(*(values or [] for values in fields))
    return [round(fetched / selected, DIGITS) if selected else None for fetched, selected in both]
