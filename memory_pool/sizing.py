# SPDX-License-Identifier: Apache-2.0
"""Sizing: how many tokens fit the host, and how many requests fit the device."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_freekv.config import GIB, FreeKVConfig, Refusal


@dataclass(frozen=True)
class KVShape:
    """The shape of one rank's KV.

    Args:
        retrieval_layers, dense_layers: number of layers of each kind.
        kv_heads, query_heads, head_dim: shape of the attention on this rank.
        digest_elements: elements in the digest of one unit.
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
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes


@dataclass(frozen=True)
class Sizing:
    """Bytes that tokens and rows take on the host and on the device (DESIGN.md, section Memory).

    Args:
        config: budget, device cache, page size and canary.
        shape: KV of this rank.
        context_len: longest context, in tokens.
    """

    config: FreeKVConfig
    shape: KVShape
    context_len: int

    @property
    def host_bytes_per_token(self) -> int:
        return self.shape.retrieval_layers * self.shape.layer_token_bytes

    @property
    def device_bytes_per_token(self) -> float:
        """Dense layers, and the digests of retrieval layers. With a canary each digest has a checksum beside it."""
        shape = self.shape
        checksum = 4 if self.config.canary != "off" else 0
        digest = shape.kv_heads * (shape.digest_elements * shape.element_bytes + checksum) / self.config.page_size
        return shape.dense_layers * shape.layer_token_bytes + shape.retrieval_layers * digest

    @property
    def row_bytes(self) -> int:
        """Bytes of one request: slots, tables, previous queries, misses, SGLang's row of token slots, and the scores of a step."""
        shape, config = self.shape, self.config
        kv = config.cache_tokens * shape.layer_token_bytes
        tables = 4 * shape.kv_heads * (config.cache_pages + config.pages.total)
        misses = 12 * shape.kv_heads * config.pages.total
        queries = shape.query_heads * shape.head_dim * shape.element_bytes
        pages = self.context_len // config.page_size
        scores = 4 * pages * (shape.query_heads + shape.kv_heads)  # and the plan's scratch
        return shape.retrieval_layers * (kv + tables + misses + queries) + scores + 4 * self.context_len

    @property
    def staging_bytes(self) -> int:
        """Bytes of the two staging buffers, each for one longest context."""
        return 2 * self.context_len * self.shape.layer_token_bytes

    def tokens(self, host_bytes: int, device_bytes: int, max_rows: int | None) -> int:
        """Tokens of the host pool: as many as the host holds, if their digests and dense layers leave half of the device to rows.

        Args:
            host_bytes, device_bytes: bytes available on each.
            max_rows: number of rows that the user asked for, or None. If they need less than half of the device, tokens get the rest.
        """
        room = device_bytes - self.staging_bytes
        share = room / 2 if max_rows is None else max(room / 2, room - (max_rows + 1) * self.row_bytes)
        tokens = min(host_bytes // self.host_bytes_per_token, int(share / self.device_bytes_per_token))
        return tokens // self.config.page_size * self.config.page_size

    def rows(self, device_bytes: int, tokens: int) -> int:
        """Requests that fit the device beside the digests and dense layers of ``tokens``. The padding row is not counted.

        Raises:
            Refusal: the device has no room for one request and the padding row.
        """
        left = device_bytes - self.staging_bytes - tokens * self.device_bytes_per_token
        rows = int(left // self.row_bytes) - 1
        if rows < 1:
            flag = "budget" if self.config.cache_tokens == self.config.budget_tokens else "device-cache"
            raise Refusal(
                f"--freekv-{flag} {self.config.cache_tokens}: one request takes {self.row_bytes / GIB:.2f} GiB of device memory, "
                f"expected room for two, but {max(left, 0) / GIB:.2f} GiB are left beside {self.staging_bytes / GIB:.2f} GiB of prefix "
                f"staging; lower --freekv-{flag} or --context-length, or raise --mem-fraction-static"
            )
        return rows
