"""What a KV compression method is to the offline harness: one object per layer, given a prompt and then one step after the other.

Letters: B prompts of equal length, T prompt tokens, n tokens of context with the one being decoded, H kv heads, G query heads of a kv
head, Hq = H * G, D head_dim. Query head h belongs to kv head h // G.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

AS_COMPUTED = "auto"  # the kv_dtype of KV that is stored as it is


@dataclass(frozen=True)
class Budget:
    """What a layer may attend to, in tokens: ``total`` includes sink and window; ``page`` is the unit of methods that have pages."""

    total: int
    sink: int
    window: int
    page: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.page <= self.window or self.sink < 0 or self.sink + self.window >= self.total:
            raise ValueError(f"{self}: expected page <= window and sink + window < total")


@dataclass(frozen=True)
class Prompt:
    """A layer's view of B prompts after dense prefill; shared by all methods, which must not write to it.

    Args:
        queries: ``[B, Hq, T, D]`` post-RoPE.
        keys, values: ``[B, H, T, D]``, keys post-RoPE.
        plain_keys: ``[B, H, T, D]`` keys before RoPE.
        rotate: post-RoPE keys of plain ones ``[..., N, D]`` at positions ``[..., N]``.
        scale: of attention logits.
        layer, layers: number of this layer, and how many the model has.
        kv_dtype: how the layer stores KV: ``keys``, ``values`` and those of steps are what is left of it. ``plain_keys`` are as computed.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    plain_keys: torch.Tensor
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    scale: float
    layer: int
    layers: int
    kv_dtype: str = AS_COMPUTED

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]


@dataclass(frozen=True)
class Step:
    """One new token for each of B prompts.

    Args:
        query: ``[B, Hq, D]`` post-RoPE.
        early_query: ``[B, Hq, D]`` what this layer's query would be if the layer before added nothing: made of that layer's input.
        key, value: ``[B, H, D]``, key post-RoPE.
        position: of the token, n - 1.
    """

    query: torch.Tensor
    early_query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    position: int


@dataclass(frozen=True)
class Trace:
    """What one layer did in one decode step, of methods that have something to tell.

    Args:
        attended: ``[B, H]`` tokens that each kv head read.
        fetched: ``[B, H]`` tokens of them whose KV the step before did not read.
        corrected: ``[B, H]`` bool, kv heads that chose anew before they attended.
        similarity: ``[B, H]`` group-mean cosine between this step's query and the last one's.
        selected: ``[B, H]`` tokens of ``attended`` that a selection chose; the others are read whatever their score.
        waited: ``[B, H]`` tokens of ``attended`` that a correction chose and the selection ahead had not.
        read: bool, broadcast to ``[B, H, n]``, which tokens of the context each kv head read.
        mass: ``[B, H]`` share of dense attention that lies on them, where it is watched (``mass.py``).
    """

    attended: torch.Tensor
    fetched: torch.Tensor | None = None
    corrected: torch.Tensor | None = None
    similarity: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    waited: torch.Tensor | None = None
    read: torch.Tensor | None = None
    mass: torch.Tensor | None = None


class Cache(Protocol):
    """What a method keeps of one layer of B prompts."""

    trace: Trace | None  # of the last step

    def attend(self, step: Step) -> torch.Tensor:
        """``[B, Hq, D]`` attention output of the new tokens; the new token is part of the context and is always attended to."""


class Method(Protocol):
    """A published method: a frozen dataclass of its own settings, with the paper's defaults."""

    @property
    def prompt_queries(self) -> int | None:
        """How many of a prompt's last positions it reads the queries of; None is all."""

    def begin(self, prompt: Prompt, budget: Budget) -> Cache:
        """Take what the method keeps of a prompt that has been prefilled densely."""
