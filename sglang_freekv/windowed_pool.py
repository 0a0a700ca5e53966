# SPDX-License-Identifier: Apache-2.0
"""WindowedPool: the KV pool of a model with full and sliding-window layers in turns, as SGLang's allocator and attention expect it."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.utils import maybe_init_custom_mem_pool

from sglang_freekv.config import GIB
from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.layers import LayerKind


class WindowedPool(SWAKVPool):
    """A FreeKVPool for full layers, and SGLang's pool on the device for window layers.

    SGLang's allocator hands out an index of each for every token. That of the former is in the requests' tables and names the host page.
    Full layers keep the model's numbers in their pool, and window layers are counted from 0.

    Args:
        pool: of the full layers.
        window_tokens: that the pool of the window layers holds.
    """

    def __init__(self, pool: FreeKVPool, window_tokens: int) -> None:
        layers = pool.shape.layers
        window = layers.numbers(LayerKind.WINDOW)
        self.full_kv_pool = pool
        self.swa_kv_pool = MHATokenToKVPool(
            size=window_tokens, page_size=pool.page_size, dtype=pool.dtype, head_num=pool.head_num, head_dim=pool.head_dim,
            layer_num=len(window), device=pool.device, enable_memory_saver=False,
        )  # fmt: skip
        self.size, self.size_swa, self.page_size = pool.size, window_tokens, pool.page_size
        self.dtype, self.head_num, self.head_dim, self.device = pool.dtype, pool.head_num, pool.head_dim, pool.device
        self.swa_layer_nums, self.full_layer_nums, self.layer_num = len(window), layers.full, len(layers.kinds)
        self.start_layer = window[0]  # of which SGLang's Triton asks how wide values are, and a retrieval layer has none there
        self.layer_transfer_counter = None
        self.enable_custom_mem_pool, self.custom_mem_pool, _ = maybe_init_custom_mem_pool(device=pool.device)
        self.dsa_kv_cache_store_fp8, self.kv_cache_dim, self.index_head_dim = False, None, None
        full = {layer: (layer, False) for layer, kind in enumerate(layers.kinds) if kind is not LayerKind.WINDOW}
        self.layers_mapping = full | {layer: (place, True) for place, layer in enumerate(window)}
        self.full_to_swa_index_mapping: torch.Tensor | None = None
        self.mem_usage = sum(self.get_kv_size_bytes()) / GIB

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, *args, **kwargs) -> None:
        _, is_window = self.layers_mapping[layer.layer_id]
        if is_window:
            super().set_kv_buffer(layer, loc_info, cache_k, cache_v, *args, **kwargs)
        else:
            self.full_kv_pool.set_kv_buffer(layer, loc_info, cache_k, cache_v, *args, **kwargs)
