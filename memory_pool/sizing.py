# SPDX-License-Identifier: Apache-2.0
"""Sizing: how many tokens the host holds and how many requests the device holds, from bytes."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_freekv.config import GIB, FreeKVConfig, Refusal


@dataclass(frozen=True)
class KVShape:
    """The KV of one rank.

    Args:
        retrieval_layers, dense_layers: number of layers of each kind.
        kv_heads, query_heads, head_dim: of this rank.
        digest_elements: elements of one digest, per (page, kv head).
        element_bytes: bytes of one KV element.
    """

    retrieval_layers: int
    dense_layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    digest_elements: int
    element_bytes: int

    @property
    def layer_token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes


@dataclass(frozen=True)
class Sizing:
    """Bytes that each token and each row costs on each tier (DESIGN.md, Memory)."""

    config: FreeKVConfig
    shape: KVShape
    context_len: int

    @property
    def host_bytes_per_token(self) -> int:
        return self.shape.retrieval_layers * self.shape.layer_token_bytes

    @property
    def device_bytes_per_token(self) -> float:
        """Dense layers in full, and digests: one per page; a checksum beside each if there is a canary."""
        shape = self.shape
        checksum = 4 if self.config.canary != "off" else 0
        digest = shape.kv_heads * (shape.digest_elements * shape.element_bytes + checksum) / self.config.page_size
        return shape.dense_layers * shape.layer_token_bytes + shape.retrieval_layers * digest

    @property
    def row_bytes(self) -> int:
        """Slots, tables, previous queries and misses of one request, its row of token slots, and a step's scores."""
        shape, config = self.shape, self.config
        kv = config.cache_tokens * shape.layer_token_bytes
        tables = 4 * shape.kv_heads * (config.cache_pages + config.pages.total)
        misses = 12 * shape.kv_heads * config.pages.total
        queries = shape.query_heads * shape.head_dim * shape.element_bytes
        pages = self.context_len // config.page_size
        scores = 4 * pages * (shape.query_heads + shape.kv_heads)  # and the notes of the plan
        return shape.retrieval_layers * (kv + tables + misses + queries) + scores + 4 * self.context_len

    @property
    def staging_bytes(self) -> int:
        """Two context buffers for the longest context."""
        return 2 * self.context_len * self.shape.layer_token_bytes

    def tokens(self, host_bytes: int, device_bytes: int, max_rows: int | None) -> int:
        """Tokens the host pool gets: what the host holds, and digests and dense layers leave half of the device to rows.

        Args:
            max_rows: rows the user asked for; when they need less than half of the device, tokens may have the rest.
        """
        room = device_bytes - self.staging_bytes
        share = room / 2 if max_rows is None else max(room / 2, room - (max_rows + 1) * self.row_bytes)
        tokens = min(host_bytes // self.host_bytes_per_token, int(share / self.device_bytes_per_token))
        return tokens // self.config.page_size * self.config.page_size

    def rows(self, device_bytes: int, tokens: int) -> int:
        """Requests that fit the device beside the digests and dense layers of ``tokens``; one row is padding.

        Raises:
            Refusal: not even one fits.
        """
        left = device_bytes - self.staging_bytes - tokens * self.device_bytes_per_token
        rows = int(left // self.row_bytes) - 1
        if rows < 1:
            flag = "budget" if self.config.cache_tokens == self.config.budget_tokens else "device-cache"
            raise Refusal(
                f"--freekv-{flag} {self.config.cache_tokens}: one request takes {self.row_bytes / GIB:.2f} GiB of device memory and "
                f"two must fit, but {max(left, 0) / GIB:.2f} GiB are left beside {self.staging_bytes / GIB:.2f} GiB of prefix staging; "
                f"lower --freekv-{flag} or --context-length, or raise --mem-fraction-static"
            )
        return rows
