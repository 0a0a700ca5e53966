# SPDX-License-Identifier: Apache-2.0
"""Footprint: what requests cost a rank on each tier, and what recall asks of the link; by the server's own sizing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_freekv.config import Refusal
from sglang_freekv.memory_pool.sizing import Sizing

CORRECTED, MISSED = 0.13, 0.21  # shares of kv heads and of selected pages, measured on a reasoning model: README, Speed
MOST_REQUESTS = 4096  # SGLang's own limit, unless more are asked for


@dataclass(frozen=True)
class Footprint:
    """Requests of the longest context that ``sizing`` is for, on one rank."""

    sizing: Sizing

    @property
    def tokens(self) -> int:
        """The context of a request in whole pages."""
        page = self.sizing.config.page_size
        return -(-self.sizing.context_len // page) * page

    @property
    def host_bytes(self) -> int:
        """Of one request in the host pool."""
        return self.tokens * self.sizing.host_bytes_per_token

    @property
    def digest_token_bytes(self) -> float:
        """Digests, and checksums if there is a canary."""
        return replace(self.sizing, shape=replace(self.sizing.shape, dense_layers=0)).device_bytes_per_token

    @property
    def dense_token_bytes(self) -> float:
        return replace(self.sizing, shape=replace(self.sizing.shape, retrieval_layers=0)).device_bytes_per_token

    @property
    def recalled_bytes(self) -> float:
        """Of one decoded token: the selected pages that the step before did not have."""
        config = self.sizing.config
        return MISSED * config.pages.selected * config.page_size * self.sizing.host_bytes_per_token

    def device_bytes(self, requests: int) -> float:
        """Of ``requests`` at once, a row of padding and the staging of prefixes included."""
        tokens = requests * self.tokens * self.sizing.device_bytes_per_token
        return tokens + (requests + 1) * self.sizing.row_bytes + self.sizing.staging_bytes

    def fit(self, requests: int, host_bytes: int, device_bytes: int, most_tokens: int | None, most_rows: int | None) -> bool:
        """Whether a server with these bytes for its pools has tokens and rows for so many.

        Args:
            most_tokens: ``--max-total-tokens``.
            most_rows: ``--max-running-requests``; None is ``requests``.
        """
        tokens = self.sizing.tokens(host_bytes, device_bytes, most_rows or requests)
        tokens = tokens if most_tokens is None else min(tokens, most_tokens)
        try:
            return tokens >= requests * self.tokens and self.sizing.rows(device_bytes, tokens) >= requests
        except Refusal:
            return False
