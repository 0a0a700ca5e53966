# SPDX-License-Identifier: Apache-2.0
"""Models and settings that FreeKV does not serve, each with its reason and remedy. All are checked before anything loads."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, is_minimax_sparse
from sglang.srt.environ import envs

from sglang_freekv import releases
from sglang_freekv.architectures import TESTED_WITH_IMAGES, TESTED_WITH_WINDOWS, WINDOWS_ON_BOTH_RELEASES
from sglang_freekv.config import BACKEND_NAME, GIB, MOST_PAGES, ROTATED_TOGETHER, SGLANG_FP8, WORD_CODES, FreeKVConfig, Refusal
from sglang_freekv.layers import LayerKind
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.memory_pool.sizing import Sizing
from sglang_freekv.memory_pool.window_kv import SLIDE
from sglang_freekv.scheduler_patch import cpu
from sglang_freekv.scheduler_patch.layer_kinds import gated_delta_nets, has_window, layer_table
from sglang_freekv.scheduler_patch.model_kv import kv_shape
from sglang_freekv.scheduler_patch.refused_flags import OFF, PADDED

LEAST_PAGES = 4
SEEING = sorted(name.removesuffix("ForConditionalGeneration") for name in TESTED_WITH_IMAGES)
NOT_MIXED = "this mix is not served so far"


class Rule(NamedTuple):
    """A property that FreeKV does not serve: ``applies`` is its test, and ``message`` the reason, a format string."""

    applies: Callable[..., Any]
    message: str


# m is SGLang's ModelConfig, a the model's LayerTable
MODEL_RULES = (
    Rule(lambda m, a: m.attention_arch == AttentionArch.MLA, "its latent attention (MLA) has no kv heads to retrieve pages for"),
    Rule(lambda m, a: is_minimax_sparse(m.hf_config), "it is natively sparse and selects its own KV"),
    Rule(lambda m, a: getattr(m, "compress_ratios", None), "it keeps KV that is compressed over tokens, and FreeKV retrieves whole pages"),
    Rule(
        lambda m, a: mambaish_config(m) and not gated_delta_nets(m) and a.full,
        "it mixes full attention with Mamba, convolution or linear attention layers, and " + NOT_MIXED,
    ),
    Rule(
        lambda m, a: gated_delta_nets(m) and not releases.has("tree paths"),
        "its gated delta nets have been tested with SGLang 0.5.23 alone",
    ),
    Rule(
        lambda m, a: mambaish_config(m) and not a.full,
        "it has Mamba, convolution or linear attention layers alone, whose state is not paged KV",
    ),
    Rule(lambda m, a: m.is_encoder_decoder, "it has cross attention, and FreeKV retrieves for self attention"),
    Rule(
        lambda m, a: m.attention_chunk_size and a.near and a.full,
        "it mixes {a.full} full attention layers with {a.near} that attend to chunks of {m.attention_chunk_size} tokens, and " + NOT_MIXED,
    ),
    Rule(
        lambda m, a: m.attention_chunk_size and a.near and not a.full,
        "it attends to chunks of {m.attention_chunk_size} tokens and has nothing far to retrieve",
    ),
    Rule(
        lambda m, a: has_window(m) and a.near and a.full and not _tested_with_windows(m),
        "it mixes {a.full} full attention layers with {a.near} that attend to a sliding window of {m.sliding_window_size} tokens, and "
        + NOT_MIXED,
    ),
    Rule(
        lambda m, a: _tested_with_windows(m) and not (releases.has("tree paths") or _architecture(m) in WINDOWS_ON_BOTH_RELEASES),
        "its sliding-window layers have been tested with SGLang 0.5.23 alone",
    ),
    Rule(
        lambda m, a: has_window(m) and a.near and not a.full,
        "it attends to a sliding window of {m.sliding_window_size} tokens and has nothing far to retrieve",
    ),
    Rule(
        lambda m, a: m.is_hybrid_swa and not a.near,
        "SGLang keeps its KV in two pools, one for window layers, and its config names no such layer",
    ),
    Rule(
        lambda m, a: m.has_attention_sinks and not _tested_with_windows(m),
        "it has learned attention sinks, and no server has been tested with them",
    ),
    Rule(lambda m, a: getattr(m.hf_text_config, "attn_logit_softcapping", None), "it caps attention logits, and FreeKV does not"),
    Rule(lambda m, a: getattr(m.hf_config, "dual_chunk_attention_config", None), "its dual chunk attention needs its own backend"),
    Rule(
        lambda m, a: m.has_asymmetric_kv and m.attention_arch != AttentionArch.MLA,
        "its keys and values differ in width ({m.head_dim} and {m.v_head_dim})",
    ),
    Rule(
        lambda m, a: m.is_multimodal and _architecture(m) not in TESTED_WITH_IMAGES,
        f"it reads images or sound, and of such models only {', '.join(SEEING)} have been tested with KV retrieval",
    ),
    Rule(
        lambda m, a: m.is_multimodal and _architecture(m) in TESTED_WITH_IMAGES and not releases.has("tree paths"),
        "it reads images, and has been tested with SGLang 0.5.23 alone",
    ),
    Rule(lambda m, a: not m.is_generation, "it does not generate text, so there is nothing to retrieve"),
)

# s is the resolved ServerArgs, m its ModelConfig, c the FreeKVConfig
RESOLVED_RULES = (
    Rule(
        lambda s, m, c: s.max_total_tokens is not None and s.max_total_tokens < LEAST_PAGES * c.page_size,
        "--max-total-tokens {s.max_total_tokens}: expected at least {least}, {pages} pages of --page-size {c.page_size}; "
        "use --max-total-tokens {least} or more, or leave it out",
    ),
    Rule(
        lambda s, m, c: s.mem_fraction_static is not None and s.mem_fraction_static <= 0,
        "--mem-fraction-static {s.mem_fraction_static:g}: expected more than 0, and SGLang reckons less where prefills are large for the memory; "
        "use --chunked-prefill-size 4096 or less, or a share above 0",
    ),
    Rule(
        lambda s, m, c: s.device == "cpu" and s.grammar_backend == "xgrammar",
        "--grammar-backend xgrammar: only llguidance has been tested with --device cpu; use --grammar-backend llguidance, or leave it out",
    ),
    Rule(
        lambda s, m, c: s.kv_cache_dtype in ("bf16", "bfloat16") and m.dtype != torch.bfloat16,
        "--kv-cache-dtype {s.kv_cache_dtype}: the model runs in another type, and FreeKV computes in the model's; "
        "use --kv-cache-dtype auto, or --dtype bfloat16 with it",
    ),
    Rule(
        lambda s, m, c: s.kv_cache_dtype == "auto" and _fp8_checkpoint(m),
        "--kv-cache-dtype auto: this checkpoint asks for fp8, and FreeKV expects that flag to name what it stores; use --kv-cache-dtype fp8_e4m3, "
        "or bf16, with --freekv-kv-dtype int8 for other codes of 8 bits",
    ),
    Rule(
        lambda s, m, c: s.device == "cpu" and c.kv_dtype == "fp8_e5m2",
        "--kv-cache-dtype fp8_e5m2: SGLang does not serve it with --device cpu; use --kv-cache-dtype fp8_e4m3 or auto",
    ),
    Rule(
        lambda s, m, c: s.device == "cuda" and c.kv_dtype == "fp8_e4m3" and _lacks_e4m3(s),
        "--kv-cache-dtype fp8_e4m3: expected a GPU of compute capability 8.9 or more, which converts these floats, found one of less; use "
        "--kv-cache-dtype auto, with --freekv-kv-dtype int8 for 8 bits",
    ),
    Rule(
        lambda s, m, c: c.kv_dtype in SGLANG_FP8 and getattr(s, "quantization_param_path", None) is not None,
        "--quantization-param-path: expected none, because SGLang divides KV by these scales and its attention does not multiply by them; use "
        "a checkpoint that has the scales, or leave it out",
    ),
    Rule(
        lambda s, m, c: c.kv_dtype in SGLANG_FP8 and m.head_dim % WORD_CODES,
        "--kv-cache-dtype {c.kv_dtype}: expected a head_dim of a multiple of 4, because codes are read in words of four, but the model's is "
        "{m.head_dim}; use --kv-cache-dtype auto",
    ),
    Rule(
        lambda s, m, c: c.is_rotated and m.head_dim % ROTATED_TOGETHER,
        "--freekv-kv-dtype {c.kv_dtype}: expected a head_dim of a multiple of 8, because keys are rotated in blocks of 8 dimensions or more, but "
        "the model's is {m.head_dim}; leave it out",
    ),
    Rule(
        lambda s, m, c: s.tp_size > 1 and s.moe_a2a_backend != "none",
        "--moe-a2a-backend {s.moe_a2a_backend}: " + PADDED,
    ),
    Rule(
        lambda s, m, c: s.tp_size > 1 and s.moe_dense_tp_size is not None,
        "--moe-dense-tp-size {s.moe_dense_tp_size}: " + PADDED,
    ),
    Rule(
        lambda s, m, c: set(_backends(s)) != {BACKEND_NAME},
        "--kv-retrieval {c.method}: SGLang insists on the attention backends {backends} here; use --kv-retrieval none",
    ),
    Rule(
        lambda s, m, c: s.cuda_graph_config and s.cuda_graph_config.prefill.backend not in ("breakable", "disabled"),  # the doctor has none
        "--kv-retrieval {c.method}: SGLang chooses --cuda-graph-backend-prefill {s.cuda_graph_config.prefill.backend} here, and FreeKV's "
        "prefill cannot be captured so; use --cuda-graph-backend-prefill disabled",
    ),
    Rule(
        lambda s, m, c: m.is_hybrid_swa and c.canary != "off" and not releases.has("tree paths"),
        "--freekv-canary {c.canary}: with window layers it has been tested with SGLang 0.5.23 alone; use --freekv-canary off",
    ),
    Rule(
        lambda s, m, c: m.is_hybrid_swa and envs.SGLANG_SWA_EVICTION_INTERVAL.get() > SLIDE,
        "SGLANG_SWA_EVICTION_INTERVAL: expected at most {slide}, for which the pool of window layers has room; unset it",
    ),
    Rule(
        lambda s, m, c: s.page_size != c.page_size,
        "--page-size {c.page_size}: SGLang insists on {s.page_size} here; use --page-size {s.page_size}, " + OFF,
    ),
    Rule(
        lambda s, m, c: _is_on("SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH: expected unset or 0, because every decode step begins with work that depends on the host; unset it",
    ),
    Rule(
        lambda s, m, c: _is_on("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: expected unset or 0, because graphs that are captured read pools which cannot grow behind them; "
        "unset it",
    ),
    Rule(
        lambda s, m, c: -(-m.context_len // c.page_size) > MOST_PAGES,
        "--page-size {c.page_size}: expected at most {most_pages} pages in the longest context, and {m.context_len} tokens are more; use a larger "
        "--page-size, or a shorter --context-length",
    ),
    Rule(
        lambda s, m, c: c.page_size == 1,
        "--page-size 1: a page of one token has nothing to summarise; use --page-size 8, or leave it out",
    ),
    Rule(
        lambda s, m, c: s.chunked_prefill_size > 0 and s.chunked_prefill_size % c.page_size,
        "--chunked-prefill-size {s.chunked_prefill_size}: expected a multiple of --page-size {c.page_size}; "
        "use --chunked-prefill-size {chunk}",
    ),
    Rule(
        lambda s, m, c: not set(c.dense_layers) <= {0, *_full_layers(m)},  # 0 is the default, and a model may begin with another kind
        "--freekv-dense-layers {dense}: expected layers of this model that attend to the whole context, which are {full}; use numbers among "
        "them",
    ),
    Rule(
        lambda s, m, c: set(c.dense_layers) >= set(_full_layers(m)),
        "--freekv-dense-layers {dense}: expected at least one layer left to compress; name fewer, " + OFF,
    ),
    Rule(
        # paths alone turn it on, but later
        lambda s, m, c: s.device == "cpu" and (s.enable_lora or (s.lora_paths and s.enable_lora is not False)),
        "{lora}: SGLang pins memory for adapters, which takes a GPU; leave --enable-lora and --lora-paths out, or use --device cuda",
    ),
    Rule(
        lambda s, m, c: s.device == "cpu" and s.tp_size * s.dp_size > cpu.most_ranks(),
        "{ranks}: with --device cpu SGLang starts a rank for each NUMA node, or for each list of cores in "
        "SGLANG_CPU_OMP_THREADS_BIND, and has fewer; use that variable, with '0-3|4-7' for two ranks of four cores",
    ),
)


def refuse_model(model, method: str = "freekv") -> None:
    """Raise one Refusal that names all properties of ``model``, SGLang's ModelConfig, that FreeKV does not serve."""
    layers = layer_table(model)
    reasons = [rule.message.format(m=model, a=layers) for rule in MODEL_RULES if rule.applies(model, layers)]
    if reasons:
        raise Refusal(f"--kv-retrieval {method} does not serve {_architecture(model)}: {'; '.join(reasons)}; use --kv-retrieval none")


def refuse_resolved(settings, model, config: FreeKVConfig) -> None:
    """Raise the Refusal of the first option that does not suit the model or the defaults that SGLang has filled in.

    Args:
        settings: SGLang's resolved options, as attributes.
        model: SGLang's ModelConfig.
        config: of FreeKV.
    """
    words = {
        "backends": " and ".join(map(str, _backends(settings))),
        "chunk": max(1, settings.chunked_prefill_size // config.page_size) * config.page_size,
        "dense": ",".join(map(str, config.dense_layers)),
        "full": _ranges(_full_layers(model)),
        "lora": "--enable-lora" if settings.enable_lora else "--lora-paths",
        "pages": LEAST_PAGES,
        "ranks": " ".join(f"--{name}-size {count}" for name, count in (("tp", settings.tp_size), ("dp", settings.dp_size)) if count > 1),
        "most_pages": MOST_PAGES,
        "slide": SLIDE,
        "least": LEAST_PAGES * config.page_size,
    }
    for rule in RESOLVED_RULES:
        if rule.applies(settings, model, config):
            raise Refusal(rule.message.format(s=settings, m=model, c=config, **words))
    if config.tau_by_layer is not None:
        full = _full_layers(model)
        retrieval = [layer for layer in full if layer not in config.dense_layers]
        config.tau_by_layer.expect_model(_architecture(model), model.num_attention_layers, retrieval, full)


def refuse_host_memory(gib: float, ranks_on_node: int, room: host_memory.Room) -> None:
    """Raise a Refusal if ``ranks_on_node`` ranks of ``gib`` GiB each do not fit into ``room``, this machine's free memory."""
    if gib * ranks_on_node * GIB <= room.num_bytes:
        return
    share = room.num_bytes / ranks_on_node
    enough = share >= host_memory.LEAST_BYTES
    advice = f"; use {floor(share / GIB * 100) / 100:g} or less" if enough else ", too little for a host pool; use --kv-retrieval none"
    raise Refusal(
        f"--freekv-host-memory {gib:g}: {ranks_on_node} rank(s) on this machine take {gib * ranks_on_node:g} GiB, expected "
        f"at most the {room.num_bytes / GIB:.2f} GiB that {room.bound} has left{advice}, or {room.remedy}"
    )


def refuse_small_pool(settings, model, config: FreeKVConfig) -> None:
    """Raise a Refusal if a rank's host memory holds fewer than ``LEAST_PAGES`` pages of the model's KV."""
    shape = kv_shape(model, config, model.num_attention_layers, settings.tp_size)
    least = LEAST_PAGES * config.page_size * Sizing(config, shape, model.context_len).host_bytes_per_token
    if config.host_memory_gib * GIB < least:
        gib = ceil(least / GIB * 10_000) / 10_000
        raise Refusal(
            f"--freekv-host-memory {config.host_memory_gib:g}: expected at least {gib:g} GiB, {LEAST_PAGES} pages of --page-size "
            f"{config.page_size} of this model's KV; use {gib:g} or more"
        )


def _architecture(model) -> str:
    """SGLang's class of the model."""
    return model.hf_config.architectures[0]


def _tested_with_windows(model) -> bool:
    """Whether this class has been tested with window layers beside full ones, with its learned sinks if it has any."""
    return _architecture(model) in TESTED_WITH_WINDOWS and model.is_hybrid_swa


def _full_layers(model) -> list[int]:
    """Numbers of the layers that attend to the whole context."""
    return layer_table(model).numbers(LayerKind.RETRIEVAL)


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as words: all from one to the last as a range, else one by one."""
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _backends(settings) -> tuple[str, str]:
    """Names of the attention backends of prefill and decoding."""
    one = settings.attention_backend
    return settings.prefill_attention_backend or one, settings.decode_attention_backend or one


def _is_on(name: str) -> bool:
    """Whether an environment variable of SGLang's is on; False where the release does not know it."""
    return getattr(envs, name).get() if hasattr(envs, name) else False


def _lacks_e4m3(settings) -> bool:
    """Whether the GPU is older than those that Triton makes floats of this type for: this machine's, or that of a plan, if it is known."""
    if hasattr(settings, "gpu_capability"):
        return (settings.gpu_capability or (8, 9)) < (8, 9)
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)


def _fp8_checkpoint(model) -> bool:
    """Whether `--kv-cache-dtype auto` means fp8, which a ModelOpt checkpoint can ask for."""
    if "modelopt" not in (model.quantization or ""):
        return False
    quantization = model._parse_quant_hf_config() or {}
    section = quantization.get("quantization", quantization)
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return str(section.get("kv_cache_quant_algo")).upper() == "FP8"
