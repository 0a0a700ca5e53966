# SPDX-License-Identifier: Apache-2.0
"""Attention of dense and window layers on a CPU, with learned sinks: SGLang's own knows no sinks, and reads no pool of window layers."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class WindowedAttention(TorchNativeAttnBackend):
    """Takes KV by the pool's own index of each layer, and ``sinks [Hq]``, which are logits without a value."""

    def forward_extend(self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool = True, *, sinks=None):
        return self._attend((q, k, v), layer, forward_batch, forward_batch.extend_seq_lens.tolist(), save_kv_cache, sinks)

    def forward_decode(self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool = True, *, sinks=None):
        return self._attend((q, k, v), layer, forward_batch, [1] * len(forward_batch.seq_lens), save_kv_cache, sinks)

    def _attend(self, qkv, layer, forward_batch, new, save_kv_cache, sinks) -> torch.Tensor:
        """``[T, Hq * D]`` attention of ``new`` tokens of each request, whose KV is stored before if ``save_kv_cache``."""
        (q, k, v), pool, window = qkv, self.token_to_kv_pool, layer.sliding_window_size
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        in_window_pool = self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        queries, outputs = q.view(-1, layer.tp_q_head_num, layer.head_dim).split(new), []
        for query, row, length in zip(queries, forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True):
            first = 0 if window is None or window < 0 else max(0, length - len(query) - window)
            slots = self.req_to_token_pool.req_to_token[row, first:length].long()
            if in_window_pool:
                slots = pool.translate_loc_from_full_to_swa(slots)
            outputs.append(attend(query, keys[slots], values[slots], layer.scaling, window, sinks))
        return torch.cat(outputs).view(q.shape[0], -1).to(q.dtype)


def attend(query, keys, values, scaling: float, window: int | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """``[T, Hq, D]`` causal attention of ``query [T, Hq, D]`` to ``keys`` and ``values [N, H, D]``, whose last T are the query's own.

    Args:
        window: tokens before its own that a query sees; None or -1 is all.
        sinks: ``[Hq]`` logits that take part without a value.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    logits = torch.einsum("thd,nhd->htn", query.float(), keys) * scaling
    places = torch.arange(len(keys))
    own = places[len(keys) - len(query) :, None]
    seen = places <= own
    if window is not None and window > -1:
        seen &= places >= own - window
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.float()[:, None, None].expand(-1, len(query), 1)), dim=-1)
    weights = logits.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("htn,nhd->thd", weights, values)
