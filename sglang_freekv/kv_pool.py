# SPDX-License-Identifier: Apache-2.0
"""FreeKVPool: the KV pool that SGLang sees. Its KV indices are places in the host pool: index // page_size is the host page."""

from __future__ import annotations

import logging

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.utils.common import is_hopper_with_cuda_12_3

from sglang_freekv import kernels
from sglang_freekv.config import GIB, FreeKVConfig
from sglang_freekv.counts import RetrievalCounts
from sglang_freekv.engine import Recall
from sglang_freekv.extend_plan import ExtendPlanner
from sglang_freekv.kernels.coded_extend import CodedExtend
from sglang_freekv.kernels.extend import ExtendAttention, FlashInferExtend, ReferenceExtend
from sglang_freekv.kernels.flash_attention import FlashAttentionExtend, is_computed
from sglang_freekv.layers import LayerKind
from sglang_freekv.memory_pool.copy_engine import CopyEngineRecall
from sglang_freekv.memory_pool.recall_clock import RecallTimes
from sglang_freekv.memory_pool.sizing import KVShape, Sizing
from sglang_freekv.memory_pool.store import Store
from sglang_freekv.memory_pool.transfer import Streams
from sglang_freekv.policy import POLICIES
from sglang_freekv.retrieval import Retrieval

logger = logging.getLogger(__name__)

EXTEND_WORKSPACE_BYTES = 512 << 20  # SGLang's own size for models with few kv heads


def pool_of(kv_cache) -> FreeKVPool:
    """The FreeKVPool of what SGLang calls its KV cache: that itself, or what a pool of several kinds of layers has for its full ones."""
    return getattr(kv_cache, "full_kv_pool", kv_cache)


def full_allocator(allocator):
    """The page allocator of host pages: ``allocator``, which SGLang has, or what hands out those of full layers within it."""
    return getattr(allocator, "full_attn_allocator", allocator)


class FreeKVPool(MHATokenToKVPool):
    """Stock buffers on the device for dense layers, and a ``Retrieval`` engine for retrieval layers.

    Args:
        config: the user's settings.
        shape: KV of this rank.
        size: tokens of the host pool, which SGLang's allocator hands out.
        num_rows: running requests that the device cache holds.
        staging_tokens: tokens of context that one extend batch may have.
        device: of the pools on the GPU.
        num_frames: N, pages that the device cache holds; None is the slots of all rows.

    Raises:
        RuntimeError: the system does not give the host memory.
    """

    def __init__(
        self,
        config: FreeKVConfig,
        shape: KVShape,
        size: int,
        num_rows: int,
        staging_tokens: int,
        device: str,
        *,
        num_frames: int | None = None,
    ) -> None:
        self.config, self.shape, self.num_rows, self.staging_tokens = config, shape, num_rows, staging_tokens
        self.num_frames = num_frames
        self.owners: dict[int, tuple] = {}  # of each row, as of its last extend: the request, and the generation of the row
        self.retrieval_index = shape.layers.retrieval_index
        self.heads = shape.retrieval_layers * shape.kv_heads  # kv heads that every decode step may correct
        self.totals, self.recall_times = RetrievalCounts(), RecallTimes()
        super().__init__(
            size=size,
            page_size=config.page_size,
            dtype=shape.format.stock,
            head_num=shape.kv_heads,
            head_dim=shape.head_dim,
            layer_num=len(shape.layers.kinds),
            device=device,
            enable_memory_saver=False,
        )
        logger.info(self.activation_line())

    def _create_buffers(self) -> None:
        """SGLang's allocation hook. Dense layers get full buffers. Retrieval layers get none, and live in the store, which is built here, too."""
        tokens = {LayerKind.DENSE: self.size + self.page_size}
        buffers = [
            [
                torch.zeros((tokens.get(kind, 0), self.head_num, width), dtype=self.store_dtype, device=self.device)
                for kind in self.shape.layers.kinds
            ]
            for width in (self.head_dim, self.v_head_dim)
        ]
        self.k_buffer, self.v_buffer = buffers
        self.k_scale_buffer = self.v_scale_buffer = self.dq_k_buffer = self.dq_v_buffer = None
        self._init_data_ptrs_and_strides()
        policy = POLICIES[self.config.method](self.config)
        streams = Streams.make(self.device)
        sizes = self.size, self.num_rows, self.staging_tokens
        where = self.device, streams.transfers
        frames, resident = self.num_frames, self.config.is_resident
        self.store = Store.build(self.config, self.shape, *sizes, *where, num_frames=frames, resident=resident)
        self.planner = ExtendPlanner(streams.transfers, self.page_size)
        recall: Recall = kernels.recall_pages
        if self.config.recall == "copy-engine":
            recall = CopyEngineRecall((2, self.page_size, self.head_dim), self.shape.format.storage, self.device)
        attention = plain = self._extend_attention()
        self.scratch_bytes = 0
        if self.shape.format.is_coded:
            scratch = self.staging_tokens, self.head_num, self.head_dim
            attention = coded = CodedExtend(plain, scratch, self.shape.format.compute, self.page_size, self.device)
            self.scratch_bytes = coded.num_bytes
        self.retrieval = Retrieval(self.config, policy, self.store, streams, recall, attention)

    def _extend_attention(self) -> ExtendAttention:
        """On Hopper FlashAttention 3, as in stock SGLang. FlashInfer on other GPUs, and for heads that the first does not take."""
        compute = self.shape.format.compute
        if torch.device(self.device).type != "cuda":
            return ReferenceExtend()
        if is_hopper_with_cuda_12_3() and is_computed(self.head_dim, compute):
            return FlashAttentionExtend(self.page_size, self.device)
        heads = self.shape.query_heads, self.head_num, self.head_dim
        return FlashInferExtend(*heads, compute, self.page_size, self.device, EXTEND_WORKSPACE_BYTES)

    def _dense_layer(self, layer_id: int) -> int:
        if layer_id in self.retrieval_index:
            raise RuntimeError(
                f"layer {layer_id} is a retrieval layer: its KV is in host memory and has no device buffer, expected one of the "
                f"dense layers {self.shape.layers.numbers(LayerKind.DENSE)}; the feature that asked for it is not supported under --kv-retrieval"
            )
        return layer_id

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return super().get_key_buffer(self._dense_layer(layer_id))

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return super().get_value_buffer(self._dense_layer(layer_id))

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, *args, **kwargs) -> None:
        self._dense_layer(layer.layer_id)
        super().set_kv_buffer(layer, loc_info, cache_k, cache_v, *args, **kwargs)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and of values, on the device and on the host together. Digests, checksums and tables of frames count as keys."""
        dense = sum(buffer.nbytes for buffer in (*self.k_buffer, *self.v_buffer))
        store = self.store
        half = (dense + store.host.num_bytes + store.cache.num_bytes) // 2
        return half + store.digests.num_bytes + store.canary_bytes + store.frames.num_bytes, half

    @property
    def longest_requests(self) -> int:
        """How many requests of the longest context may run at once."""
        sizing = Sizing(self.config, self.shape, self.staging_tokens)
        return sizing.admitted(self.store.frames.num_frames, self.num_rows)

    def describe(self) -> dict:
        """The settings in force, and the sizes of all pools in tokens and bytes."""
        by_layer = self.config.tau_by_layer
        return {
            "method": self.config.method,
            "preset": self.config.preset,
            "preset_set": list(self.config.preset_set),
            "budget_tokens": self.config.budget_tokens,
            "sink_tokens": self.config.sink_tokens,
            "window_tokens": self.config.window_tokens,
            "device_cache_tokens": self.config.cache_tokens,
            "dense_below_tokens": self.config.dense_below_tokens,
            "recall": self.config.recall,
            "host_layout": self.config.host_layout,
            "kv_dtype": self.config.kv_dtype,
            "stored_dtype": str(self.shape.format.storage).removeprefix("torch."),
            "canary": self.config.canary,
            "recall_timing": self.config.recall_timing,
            "tau": self.config.tau if by_layer is None else list(by_layer.of_retrieval(self.config.dense_layers)),
            "tau_by_layer": by_layer and by_layer.file,
            "digest": self.config.digest,
            "pooling": self.config.pooling,
            "hysteresis": self.config.hysteresis,
            "selection": self.config.selection,
            "page_size": self.page_size,
            "dense_layers": self.shape.layers.numbers(LayerKind.DENSE),
            "retrieval_layers": len(self.retrieval_index),
            "host_tokens": self.size,
            "host_token_bytes": Sizing(self.config, self.shape, self.staging_tokens).host_bytes_per_token,
            "host_bytes": self.store.host.num_bytes,
            "digest_bytes": self.store.digests.num_bytes,
            "canary_bytes": self.store.canary_bytes,
            "device_rows": self.num_rows,
            "longest_requests": self.longest_requests,
            "device_cache_bytes": self.store.cache.num_bytes + self.store.frames.num_bytes,
            "frame_tokens": self.store.frames.num_frames * self.page_size,
            "staging_tokens": self.store.staging.tokens,
            "staging_bytes": self.store.staging.num_bytes + self.scratch_bytes,
            "dense_bytes": sum(buffer.nbytes for buffer in (*self.k_buffer, *self.v_buffer)),
        }

    def activation_line(self) -> str:
        """The log line that says that retrieval is on, with its settings and sizes."""
        facts, config = self.describe(), self.config
        threshold = "no tau, every kv head is corrected" if config.tau is None else f"tau {config.tau:g}"
        if config.tau_by_layer is not None:
            threshold = f"tau {min(facts['tau']):g} to {max(facts['tau']):g} by layer ({config.tau_by_layer.file})"
        gib = {name: f"{facts[name] / GIB:.2f} GiB" for name in facts if name.endswith("_bytes")}
        return (
            f"KV retrieval is on: {config.method} on {torch.device(self.device).type}, budget {config.budget_tokens} tokens = sink {config.sink_tokens} + "
            f"selected {config.pages.selected * self.page_size} + window {config.window_tokens}, pages of {self.page_size}, "
            f"{threshold}, {config.digest} digests, {config.pooling} pooling; host pool {gib['host_bytes']} for {self.size} tokens; "
            f"device cache {gib['device_cache_bytes']} for {facts['frame_tokens']} tokens, {config.cache_tokens} of a request if room is short; "
            f"rows for {self.num_rows} requests, {self.longest_requests} of the longest context; "
            f"prefix staging {gib['staging_bytes']} for contexts of {self.staging_tokens} tokens; "
            f"digests {gib['digest_bytes']}; dense layers {facts['dense_layers']} {gib['dense_bytes']}"
            + (f"; KV in {config.kv_dtype}{' with scales' if config.has_scales else ''}" if config.is_coded else "")
            + (f"; hysteresis {config.hysteresis:g}" if config.hysteresis else "")
            + ("; selection on turn" if config.selects_on_turn else "")
            + (f"; canary {config.canary}" if config.canary != "off" else "")
            + (f"; preset {config.preset} has set {config.told_preset}" if config.preset is not None else "")
        )

    def held_pages(self, allocator) -> torch.Tensor:
        """``[N]`` ascending host pages that SGLang's page allocator has handed out. All are full while no request runs.

        SGLang holds freed pages back from ``free_pages`` for PD disaggregation only, which is refused.
        """
        held = torch.ones(allocator.num_pages + 1, dtype=torch.bool)
        held[0] = False
        held[allocator.free_pages.cpu()] = False
        return held.nonzero().squeeze(1)
