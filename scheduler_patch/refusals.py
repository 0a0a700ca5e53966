# SPDX-License-Identifier: Apache-2.0
"""Options and models that FreeKV does not serve, each with its reason and remedy. All are checked before anything loads."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, is_minimax_sparse

from sglang_freekv.config import BACKEND_NAME, GIB, FreeKVConfig, Refusal, typed
from sglang_freekv.memory_pool import host_memory
from sglang_freekv.memory_pool.sizing import Sizing
from sglang_freekv.scheduler_patch.layer_kinds import has_window, layer_table
from sglang_freekv.scheduler_patch.model_kv import kv_shape

OFF = "or use --kv-retrieval none"
ONE_RANK = f"it spreads the tokens of a request over ranks, and FreeKV selects among all of them on one; use --tp-size, {OFF}"
OWN_BACKEND = "only FreeKV's own attention backend reads the retrieved pages; leave it out"
NO_COMPILE = "FreeKV's decode graph is captured, not compiled; leave it out"
EAGER_PREFILL = "FreeKV streams prefixes beside an eager prefill; leave it out"
GRAPH_FLAGS = "--cuda-graph-backend-decode, --cuda-graph-bs-decode or --cuda-graph-max-bs-decode"
ONE_GRAPH = "FreeKV's decode step is one full graph, or none; use --cuda-graph-backend-decode full or disabled"
ON_HOST = f"it reads or moves KV on the GPU, and FreeKV's is in host memory; leave it out, {OFF}"
NO_DECODE = "nothing is decoded, so there is nothing to retrieve; use --kv-retrieval none"
ONE_BATCH = "it runs two batches at once, and recall is ordered for one; leave it out"
PADDED = "with it SGLang pads a prefill to a multiple of --tp-size tokens, and FreeKV stores no padding; leave it out, " + OFF
NOT_MIXED = "full layers beside others are not served yet"
OWN_POOLS = "it lays out KV that FreeKV keeps in its own pools; leave it out"
NO_DP_ATTENTION = f"not supported so far; use --tp-size, or --dp-size without it, {OFF}"
ONE_KERNEL = f"it computes whole steps, and their attention reads KV on the GPU; leave it out, {OFF}"


LEAST_PAGES = 4
COUNTS = "context_length", "nnodes"  # SGLang accepts numbers below 1 for them, and dies later


class Flag(NamedTuple):
    """An option of SGLang, which some releases may lack; the values that FreeKV works with; the reason and remedy for all others."""

    name: str
    allowed: tuple
    otherwise: str


class Rule(NamedTuple):
    """A property that FreeKV does not serve: ``applies`` is its test, and ``message`` the reason, a format string."""

    applies: Callable[..., Any]
    message: str


FLAGS = (
    Flag("device", ("cuda", "cpu"), f"FreeKV runs on cuda and cpu; use one of them, {OFF}"),
    Flag("attention_backend", (None, BACKEND_NAME), OWN_BACKEND),
    Flag("prefill_attention_backend", (None, BACKEND_NAME), OWN_BACKEND),
    Flag("decode_attention_backend", (None, BACKEND_NAME), OWN_BACKEND),
    Flag("enable_lean_attention", (None, False), OWN_BACKEND),
    Flag("enable_nvidia_megakernel", (False,), ONE_KERNEL),
    Flag("enable_amd_monokernel", (False,), ONE_KERNEL),
    Flag("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "FreeKV does not quantise KV so far; use --kv-cache-dtype auto"),
    Flag("speculative_algorithm", (None,), f"it verifies several tokens at once, and FreeKV retrieves pages for one; leave it out, {OFF}"),
    Flag("disaggregation_mode", ("null",), ON_HOST),
    Flag("disaggregation_decode_host_receive_threshold", (1,), ON_HOST),
    Flag("enable_pd_role_switch", (False,), ON_HOST),
    Flag("enable_hierarchical_cache", (False,), ON_HOST),
    Flag("enable_lmcache", (False,), ON_HOST),
    Flag("enable_flexkv", (False,), ON_HOST),
    Flag("enable_unified_cache_external_linker", (False,), ON_HOST),
    Flag("radix_cache_backend", (None,), ON_HOST),
    Flag("kv_canary", ("none",), ON_HOST),
    Flag("enable_hisparse", (False,), f"it retrieves KV itself, for natively sparse models; leave it out, {OFF}"),
    Flag("enable_mixed_chunk", (False,), "prefill and decode read KV from different places and share no batch; leave it out"),
    Flag("pp_size", (1,), f"pipeline parallelism is not supported so far; use --tp-size, {OFF}"),
    Flag("enable_dp_attention", (False,), NO_DP_ATTENTION),
    Flag("attn_dp_size", (1,), NO_DP_ATTENTION),
    Flag("attn_cp_size", (1,), ONE_RANK),
    Flag("dcp_size", (1,), ONE_RANK),
    Flag("dwdp_size", (1,), f"not supported so far; use --tp-size, {OFF}"),
    Flag("enable_prefill_cp", (False,), ONE_RANK),
    Flag("enable_prefill_context_parallel", (False,), ONE_RANK),
    Flag("enable_dsa_prefill_context_parallel", (False,), ONE_RANK),
    Flag("enable_kv_cache_sharding", (False,), ONE_RANK),
    Flag("enable_layernorm_sp", (False,), PADDED),
    Flag("enable_two_batch_overlap", (False,), ONE_BATCH),
    Flag("enable_pdmux", (False,), ONE_BATCH),
    Flag("enable_torch_compile", (False,), NO_COMPILE),
    Flag("cuda_graph_backend_decode", (None, "full", "disabled"), ONE_GRAPH),
    Flag("debug_cuda_graph", (False,), ONE_GRAPH),
    Flag("cuda_graph_backend_prefill", (None, "disabled"), EAGER_PREFILL),
    Flag("cuda_graph_config", (None, {}), f"FreeKV chooses the graphs itself; use {GRAPH_FLAGS}"),
    Flag("enable_unified_memory", (False,), OWN_POOLS),
    Flag("enable_page_major_kv_layout", (False,), OWN_POOLS),
    Flag(
        "enable_paged_experts",
        (False,),
        f"it takes host memory that FreeKV does not count, and loads experts over the link that recall uses; leave it out, {OFF}",
    ),
    Flag(
        "startup_weight_load_mode",
        ("serial",),
        "with it graphs are captured before the weights are there, which has not been tested with KV retrieval; leave it out",
    ),
    Flag("enable_memory_saver", (False,), f"releasing memory would not release FreeKV's pools; leave it out, {OFF}"),
    Flag("enable_streaming_session", (False,), "it keeps the row of a finished request, which FreeKV hands on; leave it out"),
    Flag(
        "language_model_only",
        (False,),
        f"the text part of a model that reads images has not been tested with KV retrieval; use a text-only checkpoint, {OFF}",
    ),
    Flag("is_embedding", (False,), NO_DECODE),
    Flag("encoder_only", (False,), NO_DECODE),
    Flag("enable_mis", (False,), NO_DECODE),
    Flag("prefill_only_disable_kv_cache", (False,), NO_DECODE),
    Flag("dllm_algorithm", (None,), "it decodes blocks of tokens, and FreeKV retrieves pages for one token; use --kv-retrieval none"),
    Flag("enable_deterministic_inference", (False,), f"it needs an attention backend of SGLang's choice; leave it out, {OFF}"),
    Flag("rl_on_policy_target", (None,), f"it needs an attention backend of SGLang's choice; leave it out, {OFF}"),
    Flag("tokenizer_worker_num", (1,), "SGLang loads no plugins in further tokenizer workers; leave it out"),
    Flag("smg_grpc_mode", (False,), f"SGLang loads no plugins in that mode; leave it out, {OFF}"),
    Flag("grpc_mode", (False,), f"SGLang loads no plugins in that mode; leave it out, {OFF}"),
    Flag("use_ray", (False,), f"SGLang loads no plugins in Ray actors; leave it out, {OFF}"),
)

# m is SGLang's ModelConfig, a the model's LayerTable
MODEL_RULES = (
    Rule(lambda m, a: m.attention_arch == AttentionArch.MLA, "its latent attention (MLA) has no kv heads to retrieve pages for"),
    Rule(lambda m, a: is_minimax_sparse(m.hf_config), "it is natively sparse and selects its own KV"),
    Rule(lambda m, a: getattr(m, "compress_ratios", None), "it keeps KV that is compressed over tokens, and FreeKV retrieves whole pages"),
    Rule(
        lambda m, a: mambaish_config(m) and a.full,
        "it mixes full attention with Mamba, convolution or linear attention layers, and " + NOT_MIXED,
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
        lambda m, a: has_window(m) and a.near and a.full,
        "it mixes {a.full} full attention layers with {a.near} that attend to a sliding window of {m.sliding_window_size} tokens, and "
        + NOT_MIXED,
    ),
    Rule(
        lambda m, a: has_window(m) and a.near and not a.full,
        "it attends to a sliding window of {m.sliding_window_size} tokens and has nothing far to retrieve",
    ),
    Rule(lambda m, a: m.is_hybrid_swa and not a.near, "SGLang keeps its KV in two pools, one of windowed layers, and FreeKV in one"),
    Rule(lambda m, a: m.has_attention_sinks, "it has learned attention sinks, which FreeKV does not add"),
    Rule(lambda m, a: getattr(m.hf_text_config, "attn_logit_softcapping", None), "it caps attention logits, and FreeKV does not"),
    Rule(lambda m, a: getattr(m.hf_config, "dual_chunk_attention_config", None), "its dual chunk attention needs its own backend"),
    Rule(
        lambda m, a: m.has_asymmetric_kv and m.attention_arch != AttentionArch.MLA,
        "its keys and values differ in width ({m.head_dim} and {m.v_head_dim})",
    ),
    Rule(
        lambda m, a: m.is_multimodal,
        "it reads images or sound, which has not been tested with KV retrieval (text-only checkpoints are served)",
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
        lambda s, m, c: s.device == "cpu" and s.grammar_backend == "xgrammar",
        "--grammar-backend xgrammar: SGLang 0.5.17 masks logits with it on GPUs only; use --grammar-backend llguidance, or leave it out",
    ),
    Rule(
        lambda s, m, c: s.kv_cache_dtype in ("bf16", "bfloat16") and m.dtype != torch.bfloat16,
        "--kv-cache-dtype {s.kv_cache_dtype}: the model runs in another type, and FreeKV keeps KV in the model's; "
        "use --kv-cache-dtype auto, or --dtype bfloat16 with it",
    ),
    Rule(
        lambda s, m, c: s.kv_cache_dtype == "auto" and _fp8_checkpoint(m),
        "--kv-cache-dtype auto: this checkpoint asks for fp8, and FreeKV does not quantise KV so far; use --kv-cache-dtype bf16",
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
        lambda s, m, c: s.page_size != c.page_size,
        "--page-size {c.page_size}: SGLang insists on {s.page_size} here; use --page-size {s.page_size}, " + OFF,
    ),
    Rule(
        lambda s, m, c: c.page_size == 1,
        "--page-size 1: a page of one token has nothing to summarise; use --page-size 32",
    ),
    Rule(
        lambda s, m, c: s.chunked_prefill_size > 0 and s.chunked_prefill_size % c.page_size,
        "--chunked-prefill-size {s.chunked_prefill_size}: expected a multiple of --page-size {c.page_size}; "
        "use --chunked-prefill-size {chunk}",
    ),
    Rule(
        lambda s, m, c: max(c.dense_layers, default=0) >= m.num_attention_layers,
        "--freekv-dense-layers {dense}: expected layers of this model, which are 0 to {last}; use numbers among them",
    ),
    Rule(
        lambda s, m, c: len(c.dense_layers) == m.num_attention_layers,
        "--freekv-dense-layers {dense}: expected at least one layer left to compress; name fewer, " + OFF,
    ),
    Rule(
        lambda s, m, c: s.device == "cpu" and s.enable_lora,
        "--enable-lora: SGLang 0.5.17 pins memory for adapters, which takes a GPU; leave it and --lora-paths out, or use --device cuda",
    ),
    Rule(
        lambda s, m, c: s.device == "cpu" and s.tp_size > 1,
        "--tp-size {s.tp_size}: SGLang 0.5.17 starts one rank only with --device cpu; leave it out, or use --device cuda",
    ),
)


def refuse_flags(asked: SimpleNamespace) -> None:
    """Raise the Refusal of the first option that FreeKV does not work with.

    Args:
        asked: all options of the installed ServerArgs: the user's, else SGLang's defaults.
    """
    for name, allowed, otherwise in FLAGS:
        value = getattr(asked, name, allowed[0])
        if value not in allowed:
            raise Refusal(f"{typed(name)}{'' if value is True else f' {value}'}: {otherwise}")
    for name in COUNTS:
        if (value := getattr(asked, name)) is not None and value < 1:
            raise Refusal(f"{typed(name)} {value}: expected at least 1; leave it out")


def refuse_model(model, method: str = "freekv") -> None:
    """Raise one Refusal that names all properties of ``model``, SGLang's ModelConfig, that FreeKV does not serve."""
    layers = layer_table(model)
    reasons = [rule.message.format(m=model, a=layers) for rule in MODEL_RULES if rule.applies(model, layers)]
    name = model.hf_config.architectures[0]
    if reasons:
        raise Refusal(f"--kv-retrieval {method} does not serve {name}: {'; '.join(reasons)}; use --kv-retrieval none")


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
        "last": model.num_attention_layers - 1,
        "pages": LEAST_PAGES,
        "least": LEAST_PAGES * config.page_size,
    }
    for rule in RESOLVED_RULES:
        if rule.applies(settings, model, config):
            raise Refusal(rule.message.format(s=settings, m=model, c=config, **words))


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


def _backends(settings) -> tuple[str, str]:
    """Names of the attention backends of prefill and decoding."""
    one = settings.attention_backend
    return settings.prefill_attention_backend or one, settings.decode_attention_backend or one


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
