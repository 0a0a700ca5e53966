# SPDX-License-Identifier: Apache-2.0
"""Sizing: how many tokens fit the host, and how many requests fit the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from sglang_freekv.config import GIB, PART_PAGES, FreeKVConfig, Refusal
from sglang_freekv.layers import LayerKind, LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.window_kv import MAPPING_BYTES, WindowKV

FRAME_TABLE_BYTES = 24  # of the tables of frames: 8 for each frame, 12 for each host page, of which there are more
SLOTS_OF_REQUEST = 5  # for states, by SGLang's count: the running one, two that a step leaves behind, and two more
SHARES_OF_STATES = 2  # slots for states of linear attention: as many as requests may need at once, and as many for the prefix cache


@dataclass(frozen=True)
class KVShape:
    """The shape of one rank's KV.

    Args:
        layers: kind of each layer.
        kv_heads, query_heads, head_dim: shape of the attention on this rank.
        digest_shape: shape of the digest of one unit.
        format: types of KV.
        window: tokens that window layers see before a query's own, at most.
    """

    layers: LayerTable
    kv_heads: int
    query_heads: int
    head_dim: int
    digest_shape: tuple[int, ...]
    format: KVFormat
    window: int = 0

    @property
    def retrieval_layers(self) -> int:
        return self.layers.count(LayerKind.RETRIEVAL)

    @property
    def dense_layers(self) -> int:
        return self.layers.count(LayerKind.DENSE)

    @property
    def digest_elements(self) -> int:
        """Elements in the digest of one unit."""
        return prod(self.digest_shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of stored KV, without its share of a scale."""
        return self.format.storage.itemsize

    @property
    def retrieval_token_bytes(self) -> int:
        """Bytes of one token's keys and values in one retrieval layer, as they are stored, with their scales."""
        return 2 * self.kv_heads * (self.head_dim * self.element_bytes + self.format.vector_bytes)

    @property
    def dense_token_bytes(self) -> int:
        """Bytes of one token's keys and values in one dense layer, window layer, or layer of stock SGLang."""
        return 2 * self.kv_heads * self.head_dim * self.format.stock.itemsize

    @property
    def computed_token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer as attention computes with them."""
        return 2 * self.kv_heads * self.head_dim * self.format.compute.itemsize


@dataclass(frozen=True)
class Sizing:
    """Bytes that tokens and rows take on the host and on the device (DESIGN.md, section Memory).

    Args:
        config: budget, device cache, page size and canary.
        shape: KV of this rank.
        context_len: longest context, in tokens.
        chunk: tokens of a prefill at most. Below 1 there is no limit but the context.
    """

    config: FreeKVConfig
    shape: KVShape
    context_len: int
    chunk: int = 0

    @property
    def window_kv(self) -> WindowKV | None:
        """What SGLang's pool of window layers needs; None for a model without."""
        if not self.shape.layers.near:
            return None
        chunk = self.chunk if self.chunk > 0 else self.context_len
        return WindowKV(self.shape.window, self.shape.layers.near, chunk, self.config.page_size, self.shape.dense_token_bytes)

    @property
    def host_bytes_per_token(self) -> int:
        return self.shape.retrieval_layers * self.shape.retrieval_token_bytes

    @property
    def device_bytes_per_token(self) -> float:
        return self.dense_bytes_per_token + self.digest_bytes_per_token + (MAPPING_BYTES if self.shape.layers.near else 0)

    @property
    def dense_bytes_per_token(self) -> int:
        """KV of dense layers."""
        return self.shape.dense_layers * self.shape.dense_token_bytes

    @property
    def digest_bytes_per_token(self) -> float:
        """Digests of retrieval layers. With a canary each digest has a checksum beside it."""
        shape, checksum = self.shape, 4 if self.config.canary != "off" else 0
        digest = shape.digest_elements * shape.format.compute.itemsize + checksum
        return shape.retrieval_layers * shape.kv_heads * digest / self.config.page_size

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame: one page in all retrieval layers, and its places in the tables of frames."""
        return self.shape.retrieval_layers * self.config.page_size * self.shape.retrieval_token_bytes + FRAME_TABLE_BYTES

    @property
    def table_bytes(self) -> int:
        """Bytes of a row without frames: tables, previous queries, misses, SGLang's row of KV indices, scores, a plan's scratch, and KV of
        window layers."""
        shape, config = self.shape, self.config
        tables = 4 * shape.kv_heads * (config.cache_pages + config.attended_pages)
        misses = 12 * shape.kv_heads * min(config.attended_pages, config.cache_pages)
        queries = shape.query_heads * shape.head_dim * shape.format.compute.itemsize
        pages = self.context_len // config.page_size
        scores, notes = 4 * pages * shape.query_heads, 8 * shape.kv_heads * (pages + config.attended_pages)
        parts = -(-pages // PART_PAGES) if pages > PART_PAGES else 0
        finds = 8 * shape.kv_heads * parts * min(PART_PAGES, config.attended_pages)
        return shape.retrieval_layers * (tables + misses + queries) + scores + notes + finds + 4 * self.context_len + self.row_window_bytes

    @property
    def promised_frames(self) -> int:
        """Frames that a request of the longest context is promised, as by ``Lending``."""
        config = self.config
        return min(config.whole_pages, -(-self.context_len // config.page_size)) + 1 if config.is_resident else config.cache_pages

    @property
    def row_bytes(self) -> int:
        """Bytes of one request of the longest context."""
        return self.table_bytes + self.promised_frames * self.frame_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes of the padding row, which has its slots for ever."""
        return self.table_bytes + self.config.cache_pages * self.frame_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of the two staging buffers, each for the stored KV of one longest context, and of the scratch."""
        return 2 * self.context_len * self.shape.retrieval_token_bytes + self.scratch_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch to which an extend decodes the context of one layer; 0 if KV is stored as it is computed with."""
        return self.context_len * self.shape.computed_token_bytes if self.shape.format.is_coded else 0

    @property
    def row_window_bytes(self) -> int:
        """Bytes of window layers in a row."""
        return 0 if self.window_kv is None else self.window_kv.bytes_of(self.window_kv.row_tokens)

    @property
    def shared_window_bytes(self) -> int:
        """Bytes of window layers that belong to no row."""
        return 0 if self.window_kv is None else self.window_kv.bytes_of(self.window_kv.shared_tokens)

    def tokens(self, host_bytes: int, device_bytes: int, max_rows: int | None) -> int:
        """Tokens of the host pool: as many as the host holds, if their digests and dense layers leave half of the device to rows.

        Args:
            host_bytes, device_bytes: bytes available on each.
            max_rows: number of rows that the user asked for, or None. Tokens of their longest contexts may take more than half, as far as
                these rows leave it. What is cached beyond them may not, because it would take the room of resident pages.
        """
        room = device_bytes - self.staging_bytes - self.shared_window_bytes
        share = room / 2
        if max_rows is not None:
            contexts = max_rows * (self.context_len + self.config.page_size) * self.device_bytes_per_token
            share = max(share, min(contexts, room - self.padding_bytes - max_rows * self.row_bytes))
        tokens = min(host_bytes // self.host_bytes_per_token, int(share / self.device_bytes_per_token))
        return tokens // self.config.page_size * self.config.page_size

    def rows(self, device_bytes: int, tokens: int) -> int:
        """Requests that may run at once beside the digests and dense layers of ``tokens``. The padding row is not counted.

        They are up to twice as many as fit with the longest context, because a short request takes few frames.

        Raises:
            Refusal: the device has no room for one request and the padding row.
        """
        left = self._left(device_bytes, tokens) - self.padding_bytes
        longest = int(left // self.row_bytes)
        if longest < 1:
            flag, asked = self._flag_of_rows
            beside = also = ""
            if self.window_kv is not None:
                beside = f" and {self.shared_window_bytes / GIB:.2f} GiB of window layers for prefills"
                also = ", or --chunked-prefill-size"
            raise Refusal(
                f"--freekv-{flag} {asked}: one request takes {self.row_bytes / GIB:.2f} GiB of device memory, "
                f"expected room for it and for one of padding, but {max(left + self.padding_bytes, 0) / GIB:.2f} GiB are left beside "
                f"{self.staging_bytes / GIB:.2f} GiB of prefix staging{beside}; lower --freekv-{flag} or --context-length{also}, or raise "
                "--mem-fraction-static"
            )
        if not self.config.is_resident:
            return longest
        return min(2 * longest, int((left - self.promised_frames * self.frame_bytes) // self.table_bytes))

    def frames(self, device_bytes: int, tokens: int, rows: int) -> int:
        """N, the frames that fit the device beside the tables of ``rows`` and of the padding row.

        They are at most the slots of all rows, and as many resident pages as are asked for and as the host pool has.
        """
        config, page_size = self.config, self.config.page_size
        fitting = int((self._left(device_bytes, tokens) - (rows + 1) * self.table_bytes) // self.frame_bytes)
        resident = tokens // page_size
        if config.resident_memory_gib is not None:
            resident = min(resident, int(config.resident_memory_gib * GIB // self.frame_bytes))
        needed = config.cache_pages + self.promised_frames
        return min(fitting, max((rows + 1) * config.cache_pages + resident, needed))

    def longest_requests(self, device_bytes: int, tokens: int, rows: int) -> int:
        """How many of ``rows`` may run at once with the longest context, as ``Lending`` admits them."""
        return self.admitted(self.frames(device_bytes, tokens, rows), rows)

    def admitted(self, frames: int, rows: int) -> int:
        """How many of ``rows`` may run at once with the longest context, where there are so many ``frames``."""
        return min(rows, (frames - self.config.cache_pages) // self.promised_frames)

    @property
    def _flag_of_rows(self) -> tuple[str, int]:
        """The flag that decides how much a row takes, without ``--freekv-``, and its tokens."""
        config = self.config
        if self.promised_frames > config.cache_pages + 2:  # one in hand, and one for the last page
            return "dense-below", config.dense_below_tokens
        return ("budget" if config.cache_tokens == config.budget_tokens else "device-cache"), config.cache_tokens

    def _left(self, device_bytes: int, tokens: int) -> float:
        """Bytes that staging, digests, dense layers, and prefills of window layers leave to rows and frames."""
        return device_bytes - self.staging_bytes - self.shared_window_bytes - tokens * self.device_bytes_per_token
