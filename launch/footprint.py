# SPDX-License-Identifier: Apache-2.0
"""Footprint: bytes of a rank that requests take in each kind of memory, and bytes that recall copies, by the server's own sizing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sglang_freekv.config import Refusal
from sglang_freekv.memory_pool.sizing import SHARES_OF_STATES, SLOTS_OF_REQUEST, Sizing
from sglang_freekv.presets import PRESETS

MOST_REQUESTS = 4096  # SGLang's default limit
STATE_SHARE = 0.9 / 1.9  # of what weights leave, by SGLang's default --mamba-full-memory-ratio


class Recalled(NamedTuple):
    """What a decode step recalls, as it was measured.

    Args:
        missed: share of the selected pages that the step before did not select.
        awaited: share of these for which attention waits.
        where: it was measured.
    """

    missed: float
    awaited: float
    where: str


BOXES = Recalled(0.21, 0.13, "on one reasoning model with budget 2048")
ACCURATE = Recalled(0.10, 0.48, "on real texts by SmolLM2-135M with budget 512")  # benchmarks/results/real.json


class Room(NamedTuple):
    """What a server has on one rank.

    Args:
        tokens: of its host pool.
        rows: requests that may run at once.
        frames: N.
        longest_requests: requests of the longest context that may run at once.
    """

    tokens: int
    rows: int
    frames: int
    longest_requests: int


@dataclass(frozen=True)
class Footprint:
    """Sizes of requests on one rank, each with the longest context of ``sizing``.

    Args:
        sizing: of KV.
        slot_bytes: of a slot for the states of linear attention; 0 for a model without.
    """

    sizing: Sizing
    slot_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a request's context, rounded up to whole pages."""
        page = self.sizing.config.page_size
        return -(-self.sizing.context_len // page) * page

    @property
    def host_bytes(self) -> int:
        """Bytes of one request in the host pool."""
        return self.tokens * self.sizing.host_bytes_per_token

    @property
    def digest_token_bytes(self) -> float:
        """Bytes of digests for one token, and of checksums if there is a canary."""
        return self.sizing.digest_bytes_per_token

    @property
    def dense_token_bytes(self) -> float:
        return self.sizing.dense_bytes_per_token

    @property
    def recalled(self) -> Recalled:
        """Shares of settings that are alike: those of the preset accurate, or boxes and whatever else was not measured."""
        config, accurate = self.sizing.config, PRESETS["accurate"]
        alike = all(getattr(config, name) == getattr(accurate, name) for name in ("page_size", "tau", "digest", "hysteresis"))
        return ACCURATE if alike else BOXES

    @property
    def recalled_bytes(self) -> float:
        """Bytes that one decode step of a request recalls: the units that it selects and the step before did not."""
        config = self.sizing.config
        return self.recalled.missed * config.pages.selected * config.page_size * self.sizing.host_bytes_per_token

    def device_bytes(self, requests: int) -> float:
        """Device bytes of ``requests`` at once, with the row of padding, the staging buffers, and what prefills take of window layers."""
        sizing = self.sizing
        tokens = requests * self.tokens * sizing.device_bytes_per_token
        return tokens + self.row_bytes(requests) + sizing.staging_bytes + sizing.shared_window_bytes + self.state_bytes(requests)

    def state_bytes(self, requests: int) -> int:
        """Device bytes of the states of ``requests``, of as many again for the prefix cache, and of padding."""
        return (SHARES_OF_STATES * SLOTS_OF_REQUEST * requests + 1) * self.slot_bytes

    def row_bytes(self, requests: int) -> int:
        """Device bytes of the rows of ``requests``, and of the row of padding."""
        return requests * self.sizing.row_bytes + self.sizing.padding_bytes

    def fit(self, requests: int, host_bytes: int, device_bytes: int, most_tokens: int | None, most_rows: int | None) -> bool:
        """Whether a server has tokens, rows and frames for ``requests`` at once.

        Args:
            requests: number of requests.
            host_bytes, device_bytes: of its pools, on one rank.
            most_tokens: ``--max-total-tokens``; None is no limit.
            most_rows: ``--max-running-requests``; None is ``requests``.
        """
        try:
            room = self.room(most_rows or requests, host_bytes, device_bytes, most_tokens)
        except Refusal:
            return False
        return room.tokens >= requests * self.tokens and room.longest_requests >= requests

    def room(self, rows: int, host_bytes: int, device_bytes: int, most_tokens: int | None) -> Room:
        """What a server with ``--max-running-requests rows`` builds on one rank. Other arguments are as of ``fit``.

        Raises:
            Refusal: the device has no room for one request.
        """
        if self.slot_bytes:
            slots = min(SHARES_OF_STATES * SLOTS_OF_REQUEST * rows, int(device_bytes * STATE_SHARE // self.slot_bytes) - 1)
            device_bytes -= (slots + 1) * self.slot_bytes
            rows = min(rows, slots // SLOTS_OF_REQUEST)
            if rows < 1:
                raise Refusal("freekv-doctor: the device has no room for the states of one request; use a larger one")
        sizing, tokens = self.sizing, self._pool_tokens(host_bytes, device_bytes, most_tokens, rows)
        rows = min(rows, sizing.rows(device_bytes, tokens))
        return Room(tokens, rows, sizing.frames(device_bytes, tokens, rows), sizing.longest_requests(device_bytes, tokens, rows))

    def _pool_tokens(self, host_bytes: int, device_bytes: int, most_tokens: int | None, rows: int) -> int:
        tokens = self.sizing.tokens(host_bytes, device_bytes, rows)
        return tokens if most_tokens is None else min(tokens, most_tokens)
