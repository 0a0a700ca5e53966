# SPDX-License-Identifier: Apache-2.0
"""Footprint: what one request costs on each tier, how many fit, and what recall asks of the link; by the server's own sizing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_freekv.config import Refusal
from sglang_freekv.memory_pool.sizing import Sizing

CORRECTED, MISSED = 0.13, 0.21  # shares of kv heads and of selected pages, measured on a reasoning model: README, Speed
MOST_REQUESTS = 4096  # SGLang's own limit


@dataclass(frozen=True)
class Footprint:
    """One request of the longest context that ``sizing`` is for."""

    sizing: Sizing

    @property
    def tokens(self) -> int:
        """The context in whole pages."""
        page = self.sizing.config.page_size
        return -(-self.sizing.context_len // page) * page

    @property
    def host_bytes(self) -> int:
        return self.tokens * self.sizing.host_bytes_per_token

    @property
    def digest_bytes(self) -> int:
        return int(self.tokens * self._without(dense_layers=0).device_bytes_per_token)

    @property
    def dense_bytes(self) -> int:
        return int(self.tokens * self._without(retrieval_layers=0).device_bytes_per_token)

    @property
    def recalled_bytes(self) -> float:
        """Of one decoded token: the selected pages that the step before did not have."""
        config = self.sizing.config
        return MISSED * config.pages.selected * config.page_size * self.sizing.host_bytes_per_token

    def host_requests(self, host_bytes: int) -> int:
        return min(MOST_REQUESTS, host_bytes // self.host_bytes)

    def device_requests(self, device_bytes: int) -> int:
        """Requests that fit the device when the host holds as many."""
        return self._most(lambda count: count * self.host_bytes, device_bytes)

    def requests(self, host_bytes: int, device_bytes: int) -> int:
        """Requests that a server with these bytes and that ``--max-running-requests`` has tokens and rows for."""
        return self._most(lambda count: host_bytes, device_bytes)

    def _most(self, host_bytes_for, device_bytes: int) -> int:
        counts = range(MOST_REQUESTS, 0, -1)
        return next((count for count in counts if self._fit(count, host_bytes_for(count), device_bytes)), 0)

    def _fit(self, count: int, host_bytes: int, device_bytes: int) -> bool:
        tokens = self.sizing.tokens(host_bytes, device_bytes, count)
        try:
            return tokens >= count * self.tokens and self.sizing.rows(device_bytes, tokens) >= count
        except Refusal:
            return False

    def _without(self, **layers: int) -> Sizing:
        return replace(self.sizing, shape=replace(self.sizing.shape, **layers))
