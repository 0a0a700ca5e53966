# SPDX-License-Identifier: Apache-2.0
"""Sizing and construction of the KV pool."""

from __future__ import annotations

import zlib

import torch
from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import get_parallel

from sglang_freekv.config import GIB, FreeKVConfig, Refusal
from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape, Sizing
from sglang_freekv.scheduler_patch.arguments import config_of, resolved
from sglang_freekv.scheduler_patch.model_kv import kv_shape
from sglang_freekv.scheduler_patch.refusals import LEAST_PAGES
from sglang_freekv.scheduler_patch.state_slots import StateSlots
from sglang_freekv.windowed_pool import WindowedPool


def resolve_memory_pool_config(original, configurator: KVCacheConfigurator, pre_model_load_memory: int) -> MemoryPoolConfig:
    """AROUND the sizing of the pools: derive tokens from host bytes and rows from device bytes, the same on every rank.

    Args:
        pre_model_load_memory: GiB that the device had free before the model loaded.

    Raises:
        Refusal: the checkpoint asks for another KV dtype, or host or device memory is too small.
    """
    config, settings = config_of(configurator.server_args), resolved(configurator.server_args)
    found, expected = configurator.kv_cache_dtype, KVFormat.of(config.kv_dtype, configurator.model_config.dtype).stock
    if found != expected:  # a checkpoint may ask for it in a file that SGLang has not read before
        raise Refusal(
            f"--kv-cache-dtype {settings.kv_cache_dtype}: SGLang takes {_typed(found)} for this checkpoint, expected {_typed(expected)}, which "
            "FreeKV stores by that flag; use --kv-cache-dtype fp8_e4m3 or bf16, or --kv-retrieval none"
        )
    expect_one_file(config)
    sizing = _sizing(configurator)
    host_bytes, device_bytes = _budgets(configurator, config, pre_model_load_memory)
    tokens = sizing.tokens(host_bytes, device_bytes, settings.max_running_requests)
    tokens = _agree(configurator._apply_token_constraints(tokens)) // config.page_size * config.page_size
    if tokens < LEAST_PAGES * config.page_size:
        sizing.rows(device_bytes, tokens=0)  # raises its own Refusal if the device is too small
        raise Refusal(
            f"--freekv-host-memory {config.host_memory_gib:g}: it holds {tokens} tokens, expected at least {LEAST_PAGES} pages of "
            f"{config.page_size}; raise it, or --mem-fraction-static if device memory is short"
        )
    rows = min(configurator.resolve_max_num_reqs(tokens), _agree(sizing.rows(device_bytes, tokens)))
    # the configurator has __slots__, and none for this
    configurator.model_config.freekv_frames = _agree(sizing.frames(device_bytes, tokens, rows))
    by_kind = {}  # of layers: SGLang asks for both numbers if it has two pools
    if sizing.window_kv is not None:
        by_kind = {"full_max_total_num_tokens": tokens, "swa_max_total_num_tokens": sizing.window_kv.tokens(rows)}
    return MemoryPoolConfig(
        max_total_num_tokens=tokens, max_running_requests=rows, mem_fraction_static=settings.mem_fraction_static, **by_kind
    )  # fmt: skip


def build_kv_pool(original, configurator: KVCacheConfigurator, *, sizes, is_dsa_model, is_dsv4_model, req_to_token_pool):
    """AROUND the making of the KV pool: make a FreeKVPool, with a row for every request that SGLang may run.

    If some layers have linear attention or a sliding window, SGLang expects a pool that wraps it: one that knows the states beside the
    requests' rows, or one that has the KV of window layers.
    """
    pool = FreeKVPool(
        config=config_of(configurator.server_args),
        shape=_kv_shape(configurator),
        size=sizes.max_total_num_tokens,
        num_rows=req_to_token_pool.size,
        staging_tokens=configurator.model_config.context_len,
        device=configurator.device,
        num_frames=configurator.model_config.freekv_frames,
    )
    if pool.shape.layers.near:
        return WindowedPool(pool, sizes.swa_max_total_num_tokens)
    if configurator.mambaish_config is None:
        return pool
    return beside_states(pool, configurator.mambaish_config.full_attention_layer_ids, req_to_token_pool.mamba_pool)


def beside_states(pool: FreeKVPool, full_layers: list[int], states) -> HybridLinearKVPool:
    """SGLang's pool for full and linear layers, with ``pool`` for the full ones, whose layers keep the model's numbers in it."""
    wrapped = HybridLinearKVPool(
        size=pool.size, dtype=pool.dtype, page_size=pool.page_size, head_num=pool.head_num, head_dim=pool.head_dim,
        full_attention_layer_ids=full_layers, device=pool.device, mamba_pool=states, full_kv_pool=pool,
    )  # fmt: skip
    wrapped.full_attention_layer_id_mapping = {layer: layer for layer in full_layers}
    return wrapped


def store_kv_apart(forward_batch) -> bool:
    """REPLACE the question whether the rotary embedding's kernel may write KV to the pool: retrieval layers have no buffer there."""
    return False


def expect_one_file(config: FreeKVConfig) -> None:
    """Raise a Refusal on every rank if two of them have other thresholds, because each machine reads its own file."""
    file = "that is not given here" if config.tau_by_layer is None else config.tau_by_layer.file
    digest = 0 if config.tau_by_layer is None else zlib.crc32(repr(config.tau_by_layer.taus).encode())
    least, most = _agree(digest), -_agree(-digest)
    if least != most:
        raise Refusal(
            f"--freekv-tau-by-layer {file}: expected the same thresholds on all ranks, found those with checksums {least:08x} and "
            f"{most:08x}; copy one file to all machines"
        )


def _kv_shape(configurator: KVCacheConfigurator) -> KVShape:
    layers = configurator.layer_info.num_effective_layers
    return kv_shape(configurator.model_config, config_of(configurator.server_args), layers, get_parallel().attn_tp_size)


def _sizing(configurator: KVCacheConfigurator) -> Sizing:
    config, chunk = config_of(configurator.server_args), resolved(configurator.server_args).chunked_prefill_size
    return Sizing(config, _kv_shape(configurator), configurator.model_config.context_len, chunk or 0)


def _budgets(configurator: KVCacheConfigurator, config: FreeKVConfig, pre_model_load_memory: int) -> tuple[int, int]:
    """Host and device bytes of this rank.

    On a CPU both are the same memory, so the device gets a share of the available rest. Resident pages are in that share, too.
    """
    host_bytes, rows = int(config.host_memory_gib * GIB), resolved(configurator.server_args).max_running_requests
    slots = None if configurator.mambaish_config is None else StateSlots.before(configurator)
    device_bytes = configurator._profile_available_bytes(pre_model_load_memory)
    if slots is not None:
        device_bytes += slots.spare(rows)
    if configurator.device == "cpu":
        args = resolved(configurator.server_args)
        ranks = max(1, args.tp_size * args.dp_size // args.nnodes)
        device_bytes = min(device_bytes, host_memory.default_host_pool_bytes(host_memory.available_bytes(), ranks, "cpu"))
    return host_bytes, device_bytes


def _typed(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _agree(value: int) -> int:
    """The minimum of ``value`` over all ranks, which share tokens and rows."""
    world = get_world_group()
    if world.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=world.cpu_group)
    return int(tensor)
