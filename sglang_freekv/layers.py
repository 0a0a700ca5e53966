# SPDX-License-Identifier: Apache-2.0
"""LayerTable: what each layer of a model keeps of the context, and where."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class LayerKind(Enum):
    """What a layer keeps of the context.

    RETRIEVAL and DENSE layers attend to the whole context. The KV of the former is in the host pool and the device cache; that of the
    latter is on the device, in SGLang's buffers. WINDOW layers attend to a sliding window or a chunk. STATELESS layers have no KV.
    """

    RETRIEVAL = "retrieval"
    DENSE = "dense"
    WINDOW = "window"
    STATELESS = "stateless"


@dataclass(frozen=True)
class LayerTable:
    """The kind of each layer of a model, by its number from 0."""

    kinds: tuple[LayerKind, ...]

    @classmethod
    def uniform(cls, retrieval: int, dense: int = 0) -> LayerTable:
        """``dense`` dense layers, then ``retrieval`` retrieval layers."""
        return cls((LayerKind.DENSE,) * dense + (LayerKind.RETRIEVAL,) * retrieval)

    def with_dense(self, numbers: Collection[int]) -> LayerTable:
        """The same, with the retrieval layers among ``numbers`` dense."""
        return LayerTable(
            tuple(LayerKind.DENSE if kind is LayerKind.RETRIEVAL and number in numbers else kind for number, kind in enumerate(self.kinds))
        )

    def numbers(self, kind: LayerKind) -> list[int]:
        return [number for number, other in enumerate(self.kinds) if other is kind]

    def count(self, *kinds: LayerKind) -> int:
        return sum(self.kinds.count(kind) for kind in kinds)

    @property
    def full(self) -> int:
        """Layers that attend to the whole context."""
        return self.count(LayerKind.RETRIEVAL, LayerKind.DENSE)

    @property
    def near(self) -> int:
        """Layers that attend to a window or a chunk."""
        return self.count(LayerKind.WINDOW)

    @cached_property
    def retrieval_index(self) -> dict[int, int]:
        """Number of each retrieval layer -> its place among them, by which the pools are indexed."""
        return {number: index for index, number in enumerate(self.numbers(LayerKind.RETRIEVAL))}
