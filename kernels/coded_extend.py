# SPDX-License-Identifier: Apache-2.0
"""Extend attention over contexts that are stored as codes: they are decoded into one scratch, and attended to there."""

from __future__ import annotations

import torch

from sglang_freekv import kernels
from sglang_freekv.kernels.extend import ExtendAttention
from sglang_freekv.kernels.kv import KV, Scales
from sglang_freekv.kernels.ragged import ragged, to_device


class CodedExtend:
    """Wraps an extend attention that computes with numbers, for KV that is coded.

    Each call decodes the contexts of its layer into the scratch, and the wrapped attention reads them there, end to end. All calls share the
    scratch. They are made on the main stream, which orders the next layer's decoding behind this layer's attention; no other stream has it.

    Args:
        attention: what attends to the decoded contexts. It is planned as for staged ones, also in place.
        shape: ``(tokens, H, D)`` of the scratch: token rows of a staging buffer, kv heads, and numbers of a head.
        dtype: of the queries and of the scratch.
        page_size: S.
        device: of the scratch.
    """

    def __init__(self, attention: ExtendAttention, shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, device: str) -> None:
        self.attention, self.page_size = attention, page_size
        self.scratch = KV(*torch.empty(2, *shape, dtype=dtype, device=device))
        self.context, self.rows = self.scratch, torch.empty(0, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        return self.scratch.keys.nbytes + self.scratch.values.nbytes

    def plan(self, query_lens: list[int], key_lens: list[int], frames: torch.Tensor | None = None) -> None:
        """As ``FlashInferExtend.plan``. Nothing waits for the device.

        Raises:
            RuntimeError: the contexts do not fit the scratch.
        """
        tokens, most = sum(key_lens), len(self.scratch.keys)
        if tokens > most:
            raise RuntimeError(f"an extend batch has {tokens} tokens of context, expected at most the {most} of the scratch for decoded KV")
        device = self.scratch.keys.device
        self.rows = torch.arange(tokens, device=device) if frames is None else self._rows(torch.tensor(key_lens), frames)
        self.context = KV(self.scratch.keys[:tokens], self.scratch.values[:tokens])
        self.attention.plan(query_lens, key_lens)

    def _rows(self, key_lens: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """``[sum(key_lens)]`` int64 token row of each token of the contexts, in the frames of the device cache."""
        size = self.page_size
        owners, tokens = ragged(key_lens)
        places = to_device(owners * (frames.shape[1] * size) + tokens, frames.device)
        return frames.take(places // size).long() * size + places % size

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        learned_sinks: torch.Tensor | None = None,
        *,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        """As ``FlashInferExtend.__call__``. ``queries`` arrive rotated if ``keys`` are.

        Args:
            scales: of ``keys`` and ``values``: ``[sum(key_lens), H]``, or in place ``[F, S, H]``; None if they have none.
        """
        stored = KV(keys, values, scales)
        kernels.decode_tokens(stored if keys.dim() == 3 else stored.token_rows, self.rows, self.context)
        return self.attention(queries, self.context.keys, self.context.values, scale, learned_sinks)
