"""FreeKV: "Boosting KV Cache Retrieval for Efficient LLM Inference" (Liu et al., arXiv 2505.13109)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from benchmarks.accuracy.method import Budget, Prompt, Step, Trace

from .need import BEYOND, Need
from .pages import Layout, Pages, box_scores, cuboid_mean, grouped, mass_scores, min_max, similarity, two_bit
from .tail import Tail

DIGESTS = {"min-max": (min_max, box_scores), "cuboid-mean": (cuboid_mean, box_scores), "two-bit": (two_bit, mass_scores)}

POOLINGS = {
    "softmax-mean": lambda scores: scores.softmax(-1).mean(2),
    "softmax-max": lambda scores: scores.softmax(-1).amax(2),
    "max": lambda scores: scores.amax(2),
}
SELECTIONS = ("every-step", "on-turn")


@dataclass(frozen=True)
class FreeKV:
    """Each step attends to the pages that the step before selected; corrected kv heads select anew first (sections 3.2, 3.3).

    As this project's server does it: candidates are the full pages between sink and window; the selection behind a step is for the
    context of the next one; the first is made with the last prompt token's query.

    Args:
        tau: kv heads are corrected whose group-mean cosine with the query that selected for them is below. 1 corrects always: retrieval
            that blocks. A tuple has one for each layer of the model.
        correction: False never corrects.
        pooling: of a group's scores, to the ranking.
        scaled: scores over sqrt(D) before the softmax. The authors' accuracy code has them unscaled.
        digest: of a page. The paper has Quest's, "min-max"; the server's preset fast has ArkVale's, which finds more; "two-bit", of its preset
            accurate, tells single tokens from each other.
        page, sink, window: tokens, in place of the budget's. Smaller pages find evidence that lies scattered, and their digests take more
            room; a narrow sink and window leave more of the budget to selection.
        hysteresis: nats by which the pages of the last selection weigh more.
        selection: behind every step, or "on-turn": of a corrected kv head, and of all when a page is full. The similarity is then with the
            query that selected last, however many steps ago.
        early: the query that selects, and that the similarity is with, is the step's own, made of the input of the layer before, in
            place of the last step's.
        top_p, beyond: a kv head attends to as many pages as hold that share of its attention, as ``Need`` says. None fills the budget.
        tail: tokens of the blocks whose candidates are attended to as a pseudo-token each, where the step does not attend to themselves.
    """

    prompt_queries: ClassVar[int | None] = 1

    tau: float | tuple[float, ...] = 0.9
    correction: bool = True
    pooling: Literal["softmax-mean", "softmax-max", "max"] = "softmax-mean"
    scaled: bool = True
    digest: Literal["min-max", "cuboid-mean", "two-bit"] = "cuboid-mean"
    page: int | None = None
    sink: int | None = None
    window: int | None = None
    hysteresis: float = 0.0
    selection: Literal["every-step", "on-turn"] = "every-step"
    early: bool = False
    top_p: float | None = None
    beyond: Literal["nothing", "in-hand"] = "nothing"
    tail: int | None = None

    def __post_init__(self) -> None:
        for tau in self.tau if isinstance(self.tau, tuple) else (self.tau,):
            if not -1 <= tau <= 1:
                raise ValueError(f"tau {tau}: expected -1 to 1")
        if not 0 <= self.hysteresis <= 10:
            raise ValueError(f"hysteresis {self.hysteresis}: expected 0 to 10")
        if self.early and self.selection == "on-turn":
            raise ValueError("selection on-turn with early: expected every-step, because an early query selects in each step")
        if self.top_p is not None and not 0 < self.top_p < 1:
            raise ValueError(f"top_p {self.top_p}: expected above 0 and below 1, or None")
        if self.top_p is None and self.beyond == "in-hand":
            raise ValueError("beyond in-hand without top_p: expected top_p, because there is nothing beyond a budget that is filled")
        if self.top_p is not None and self.digest != "two-bit":
            raise ValueError(f"top_p with digest {self.digest}: expected two-bit, because a box bounds a page's mass and does not tell it")
        for name, allowed in (("pooling", POOLINGS), ("digest", DIGESTS), ("selection", SELECTIONS), ("beyond", BEYOND)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} {value}: expected one of {', '.join(allowed)}")

    def begin(self, prompt: Prompt, budget: Budget) -> FreeKVCache:
        own = {name: tokens for name in ("page", "sink", "window") if (tokens := getattr(self, name)) is not None}
        budget = replace(budget, **own)
        settings = replace(self, tau=self.tau[prompt.layer]) if isinstance(self.tau, tuple) else self
        pages = Pages(prompt, Layout.of(budget), *DIGESTS[self.digest])
        return FreeKVCache(settings, prompt, pages)


class FreeKVCache:
    """``ahead``: the pages ``[B, H, K]`` of the next step; ``previous``: the query ``[B, H, G, D]`` that the next one is compared with.

    ``last``: the pages of the last selection, and the tokens of its context.
    """

    def __init__(self, settings: FreeKV, prompt: Prompt, pages: Pages) -> None:
        self.settings, self.pages = settings, pages
        self.need = None if settings.top_p is None else Need(pages, settings.top_p, settings.beyond)
        self.tail = None if settings.tail is None else Tail(pages, settings.tail, prompt.scale)
        self.previous = grouped(prompt.queries[:, :, -1], pages.heads)
        self.last: tuple[torch.Tensor, int] | None = None
        self._select_ahead(prompt.keys.shape[2] + 1)
        self.trace: Trace | None = None

    def attend(self, step: Step) -> torch.Tensor:
        self.pages.append(step)
        if self.tail is not None:
            self.tail.append()
        n, query = step.position + 1, grouped(step.query, self.pages.heads)
        if self.settings.early:
            self.previous = grouped(step.early_query, self.pages.heads)
            self._select_ahead(n)
        cosines = similarity(query, self.previous)
        corrected = cosines < self.settings.tau if self.settings.correction else torch.zeros_like(cosines, dtype=torch.bool)
        chosen = torch.where(corrected[..., None], self._select(query, n, self.ahead), self.ahead)
        self.last = chosen, n
        beside = None if self.tail is None else self.tail.beside(step.query, chosen, n)
        output, read = self.pages.attend(step.query, chosen, beside)
        waited = (self.pages.marked(chosen, n) & ~self.pages.marked(self.ahead, n)).sum(-1) * self.pages.layout.page
        self.trace = replace(read, corrected=corrected, similarity=cosines, waited=waited)
        if self.settings.selection == "on-turn" and n % self.pages.layout.page:
            self.previous, self.ahead = torch.where(corrected[..., None, None], query, self.previous), chosen
        elif not self.settings.early:
            self.previous = query
            self._select_ahead(n + 1)
        return output

    def _select_ahead(self, n: int) -> None:
        self.ahead = self._select(self.previous, n)
        self.last = self.ahead, n

    def _select(self, query: torch.Tensor, n: int, in_hand: torch.Tensor | None = None) -> torch.Tensor:
        """Pages ``[B, H, K]``.

        Args:
            in_hand: those ``[B, H, K]`` that a correction need not wait for; None selects ahead.
        """
        scores = self.pages.scores(query, n)
        logits = scores / query.shape[-1] ** 0.5
        ranking = POOLINGS[self.settings.pooling](logits if self.settings.scaled else scores)
        if self.last is not None and self.settings.hysteresis:
            bonus = self.settings.hysteresis * self.pages.kept(*self.last, n)
            ranking = ranking + bonus if self.settings.pooling == "max" else ranking * bonus.exp()
        return self.pages.best(ranking) if self.need is None else self.need.select(query, n, logits, ranking, in_hand)
