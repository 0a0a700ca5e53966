"""A decoder's decode step without a server: the matrices of a published shape, random, and attention that is a method's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

SHAPES = Path(__file__).resolve().parent.parent / "shapes"
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What of a model's config costs time; biases and norms of queries and keys are left out.

    Args:
        layers, hidden, intermediate, vocabulary: numbers of them.
        query_heads, kv_heads, head_dim: of one layer.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, name: str) -> Shape:
        """By the name of a file of ``benchmarks/shapes``."""
        config = json.loads((SHAPES / f"{name}.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            name,
            config["num_hidden_layers"],
            config["hidden_size"],
            config["intermediate_size"],
            config["vocab_size"],
            heads,
            config["num_key_value_heads"],
            config.get("head_dim") or config["hidden_size"] // heads,
        )

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    def weight_bytes(self, element_bytes: int) -> int:
        """Read by every decode step."""
        attention = self.hidden * self.head_dim * 2 * (self.query_heads + self.kv_heads)
        return (self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden) * element_bytes


TINY = Shape("tiny", 2, 64, 96, 128, 4, 2, 16)  # for a dry run


class Decoder:
    """Each layer has matrices of its own, so that they come from memory and not from a cache."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, dtype=dtype, device=device) * columns**-0.5

        self.shape = shape
        self.layers = [
            {
                "qkv": matrix((shape.query_heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
                "o": matrix(shape.hidden, shape.query_heads * shape.head_dim),
                "up": matrix(2 * shape.intermediate, shape.hidden),
                "down": matrix(shape.hidden, shape.intermediate),
            }
            for _ in range(shape.layers)
        ]
        self.head = matrix(shape.vocabulary, shape.hidden)

    def step(self, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Logits ``[B, vocabulary]`` of one token each, from ``hidden [B, hidden]``.

        Args:
            attention: ``(layer, q [B, Hq, D], k [B, H, D], v [B, H, D])`` to ``[B, Hq, D]``.
        """
        return self._logits(self._body(hidden, attention))

    def prefill(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[1, vocabulary]`` behind a prompt ``hidden [T, hidden]``, with dense causal attention."""

        def attention(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = (each.transpose(0, 1)[None] for each in qkv)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

        return self._logits(self._body(hidden, attention)[-1:])

    def _body(self, hidden: torch.Tensor, attention: Attention) -> torch.Tensor:
        shape, width = self.shape, (self.shape.hidden,)
        for index, layer in enumerate(self.layers):
            qkv = F.linear(F.rms_norm(hidden, width), layer["qkv"]).view(len(hidden), -1, shape.head_dim)
            q, k, v = qkv.split((shape.query_heads, shape.kv_heads, shape.kv_heads), 1)
            hidden = hidden + F.linear(attention(index, q, k, v).flatten(1), layer["o"])
            gate, up = F.linear(F.rms_norm(hidden, width), layer["up"]).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer["down"])
        return F.rms_norm(hidden, width)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.head)
