# SPDX-License-Identifier: Apache-2.0
"""Models with gated delta nets: full attention in some layers, and a recurrent state in the others, which the prefix cache keeps, too."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape, mamba2_state_dtype
from sglang.srt.utils import is_blackwell

from sglang_freekv.config import FreeKVConfig, Refusal, typed
from sglang_freekv.memory_pool.sizing import SLOTS_OF_REQUEST
from sglang_freekv.scheduler_patch.layer_kinds import gated_delta_nets
from sglang_freekv.scheduler_patch.refusals import Rule

STATE_GRID = 64  # tokens between states that a prefill may leave: SGLang's FLA_CHUNK_SIZE
STRATEGIES = "auto", "extra_buffer"
KERNELS = "linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend"
UNASKED = dict.fromkeys(KERNELS) | {
    "mamba_radix_cache_strategy": "auto", "mamba_track_interval": 256, "mamba_full_memory_ratio": None, "max_mamba_cache_size": None,
    "disable_radix_cache": False, "disable_overlap_schedule": False,
}  # fmt: skip

# s has SGLang's options as typed, c is the FreeKVConfig
RULES = (
    Rule(
        lambda s, c: s.mamba_radix_cache_strategy not in STRATEGIES,
        "--mamba-radix-cache-strategy {s.mamba_radix_cache_strategy}: expected extra_buffer with this model, because the others keep states "
        "behind any token, or have not been tested; leave it out",
    ),
    Rule(
        lambda s, c: _other_kernels(s),
        "{kernels}: expected triton with this model, because no server has been tested with others; leave it out",
    ),
    Rule(
        lambda s, c: s.mamba_track_interval < 1,
        "--mamba-track-interval {s.mamba_track_interval}: expected at least {c.page_size}, a page; leave it out",
    ),
    Rule(
        lambda s, c: s.mamba_full_memory_ratio is not None and not 0 < s.mamba_full_memory_ratio < inf,
        "--mamba-full-memory-ratio {s.mamba_full_memory_ratio:g}: expected a number above 0, the memory for states over that for KV; leave it "
        "out",
    ),
    Rule(
        lambda s, c: (STATE_GRID % c.page_size and c.page_size % STATE_GRID) or s.mamba_track_interval % c.page_size,
        "--page-size {c.page_size}: expected a divisor of --mamba-track-interval {s.mamba_track_interval}, and one of {grid} or a multiple of "
        "it, because the prefix cache keeps states of linear attention at these tokens; use --page-size 8",
    ),
    Rule(
        lambda s, c: s.max_mamba_cache_size is not None and s.max_mamba_cache_size < _least_slots(s),
        "--max-mamba-cache-size {s.max_mamba_cache_size}: expected at least {slots}, which one request takes for its states of linear "
        "attention; use {slots} for each of --max-running-requests, or leave it out",
    ),
    Rule(
        lambda s, c: s.device == "cuda" and is_blackwell(),
        "--kv-retrieval {c.method}: SGLang takes only its own attention backends for this model on a Blackwell GPU; use --kv-retrieval none",
    ),
)


def refuse_states(asked, model, config: FreeKVConfig) -> None:
    """Raise the Refusal of the first option that does not suit a model with gated delta nets. Other models have none of these limits.

    Args:
        asked: SGLang's options as typed, as attributes, with the device. SGLang asserts on some of them when it resolves them.
    """
    if gated_delta_nets(model) is None:
        return
    settings = SimpleNamespace(device=asked.device, **{name: getattr(asked, name, value) for name, value in UNASKED.items()})
    words = {"kernels": " ".join(_other_kernels(settings)), "grid": STATE_GRID, "slots": _least_slots(settings)}
    for rule in RULES:
        if rule.applies(settings, config):
            raise Refusal(rule.message.format(s=settings, c=config, **words))


def slot_bytes(model, ranks: int) -> int:
    """Bytes of a slot for the states of one request, on one of ``ranks`` tensor-parallel ranks; 0 for a model without."""
    if (config := gated_delta_nets(model)) is None:
        return 0
    shape = Mamba2StateShape.create(
        tp_world_size=ranks, intermediate_size=config.linear_value_head_dim * config.linear_num_value_heads,
        n_groups=config.linear_num_key_heads, num_heads=config.linear_num_value_heads, head_dim=config.linear_value_head_dim,
        state_size=config.linear_key_head_dim, conv_kernel=config.linear_conv_kernel_dim,
    )  # fmt: skip
    return Mamba2CacheParams(shape=shape, layers=config.linear_layer_ids, dtype=mamba2_state_dtype(config)).mamba_cache_per_req


def _least_slots(settings: SimpleNamespace) -> int:
    """State slots that SGLang counts for a request: with a prefix cache two of them, or one, are what a step leaves behind."""
    if settings.disable_radix_cache:
        return 1
    return SLOTS_OF_REQUEST - 1 if settings.disable_overlap_schedule else SLOTS_OF_REQUEST


def _other_kernels(settings: SimpleNamespace) -> list[str]:
    """The first flag, and its value, that asks for other kernels of linear attention."""
    for name in KERNELS:
        if (value := getattr(settings, name)) not in (None, "triton"):
            return [typed(name), value]
    return []
