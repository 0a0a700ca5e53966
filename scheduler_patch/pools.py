# SPDX-License-Identifier: Apache-2.0
"""Sizing and construction of the KV pool."""

from __future__ import annotations

import torch
from sglang.srt.distributed import get_world_group
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import get_parallel

from sglang_freekv.config import GIB, FreeKVConfig, Refusal
from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.memory_pool.sizing import KVShape, Sizing
from sglang_freekv.scheduler_patch.model_kv import kv_shape
from sglang_freekv.scheduler_patch.refusals import LEAST_PAGES


def resolve_memory_pool_config(original, configurator: KVCacheConfigurator, pre_model_load_memory: int) -> MemoryPoolConfig:
    """Tokens from host bytes, rows from device bytes, the same on every rank."""
    config, found, expected = configurator.server_args._freekv, configurator.kv_cache_dtype, configurator.model_config.dtype
    if found != expected:  # a checkpoint may say so in a file of its own, which SGLang reads here first
        raise Refusal(
            f"--kv-cache-dtype {configurator.server_args.kv_cache_dtype}: SGLang makes {_typed(found)} of it for this checkpoint, expected "
            f"{_typed(expected)}, the model's, for FreeKV does not quantise KV so far; use --kv-cache-dtype bf16, or --kv-retrieval none"
        )
    sizing = _sizing(configurator)
    host_bytes, device_bytes = _budgets(configurator, config, pre_model_load_memory)
    tokens = sizing.tokens(host_bytes, device_bytes, configurator.server_args.max_running_requests)
    tokens = _agree(configurator._apply_token_constraints(tokens)) // config.page_size * config.page_size
    if tokens < LEAST_PAGES * config.page_size:
        sizing.rows(device_bytes, tokens=0)  # if it is the device that is too small, that is what to tell
        raise Refusal(
            f"--freekv-host-memory {config.host_memory_gib:g}: it holds {tokens} tokens, expected at least {LEAST_PAGES} pages of "
            f"{config.page_size}; raise it, or --mem-fraction-static if the device is what is short"
        )
    rows = min(configurator.resolve_max_num_reqs(tokens), _agree(sizing.rows(device_bytes, tokens)))
    return MemoryPoolConfig(
        max_total_num_tokens=tokens,
        max_running_requests=rows,
        mem_fraction_static=configurator.server_args.mem_fraction_static,
    )


def build_kv_pool(original, configurator: KVCacheConfigurator, *, sizes, is_dsa_model, is_dsv4_model, req_to_token_pool) -> FreeKVPool:
    """The KV pool, with one device-cache row for every request that SGLang may run."""
    return FreeKVPool(
        config=configurator.server_args._freekv,
        shape=_kv_shape(configurator),
        size=sizes.max_total_num_tokens,
        num_rows=req_to_token_pool.size,
        staging_tokens=configurator.model_config.context_len,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
    )


def store_kv_apart(forward_batch) -> bool:
    """In the place of SGLang's question whether rotary embedding may write keys and values to the pool at once: a retrieval layer has
    no buffer on the device to write to."""
    return False


def _kv_shape(configurator: KVCacheConfigurator) -> KVShape:
    layers = configurator.layer_info.num_effective_layers
    return kv_shape(configurator.model_config, configurator.server_args._freekv, layers, get_parallel().attn_tp_size)


def _sizing(configurator: KVCacheConfigurator) -> Sizing:
    return Sizing(configurator.server_args._freekv, _kv_shape(configurator), configurator.model_config.context_len)


def _budgets(configurator: KVCacheConfigurator, config: FreeKVConfig, pre_model_load_memory: int) -> tuple[int, int]:
    """Host and device bytes of this rank. On a CPU both are the same memory, so the device side gets a share of what is left."""
    host_bytes = int(config.host_memory_gib * GIB)
    device_bytes = configurator._profile_available_bytes(pre_model_load_memory)
    if configurator.device == "cpu":
        args = configurator.server_args
        ranks = max(1, args.tp_size * args.dp_size // args.nnodes)
        device_bytes = min(device_bytes, host_memory.default_host_pool_bytes(host_memory.available_bytes(), ranks, "cpu"))
    return host_bytes, device_bytes


def _typed(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _agree(value: int) -> int:
    """The minimum over ranks: token slots and rows mean the same on all of them."""
    world = get_world_group()
    if world.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=world.cpu_group)
    return int(tensor)
