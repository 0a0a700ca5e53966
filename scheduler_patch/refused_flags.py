# SPDX-License-Identifier: Apache-2.0
"""Options of SGLang that FreeKV does not serve, each with its reason and remedy. They are checked before anything loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from sglang_freekv import releases
from sglang_freekv.config import BACKEND_NAME, SGLANG_FP8, Refusal, typed

OFF = "or use --kv-retrieval none"
ONE_RANK = f"it spreads the tokens of a request over ranks, and FreeKV selects among all of them on one; use --tp-size, {OFF}"
OWN_BACKEND = "only FreeKV's own attention backend reads the retrieved pages; leave it out"
NO_COMPILE = "FreeKV's decode graph is captured, not compiled; leave it out"
BREAKABLE_PREFILL = "FreeKV streams prefixes between the captured parts of a prefill, so no graph can hold its attention; "
GRAPH_FLAGS = "--cuda-graph-backend-decode, --cuda-graph-bs-decode or --cuda-graph-max-bs-decode"
ONE_GRAPH = "FreeKV's decode step is one full graph, or none; use --cuda-graph-backend-decode full or disabled"
ON_HOST = f"it reads or moves KV on the GPU, and FreeKV's is in host memory; leave it out, {OFF}"
NO_DECODE = "nothing is decoded, so there is nothing to retrieve; use --kv-retrieval none"
ONE_BATCH = "it runs two batches at once, and recall is ordered for one; leave it out"
PADDED = "with it SGLang pads a prefill to a multiple of --tp-size tokens, and FreeKV stores no padding; leave it out, " + OFF
OWN_POOLS = "it lays out KV that FreeKV keeps in its own pools; leave it out"
NO_DP_ATTENTION = f"not supported so far; use --tp-size, or --dp-size without it, {OFF}"
NO_PROOF = "it skips SGLang's warm-up, whose request proves that FreeKV's hooks are called; leave it out, " + OFF
ONE_STATE = "it keeps states of linear attention in a way that has not been tested; leave it out"
ONE_KERNEL = f"it computes whole steps, and their attention reads KV on the GPU; leave it out, {OFF}"

COUNTS = "context_length", "nnodes", "max_running_requests"  # SGLang accepts numbers below 1 for them, and dies later or takes 1


class Flag(NamedTuple):
    """An option of SGLang, which some releases may lack; the values that FreeKV works with; the reason and remedy for all others."""

    name: str
    allowed: tuple
    otherwise: str


FLAGS: tuple[Flag, ...] = (
    Flag("device", ("cuda", "cpu"), f"FreeKV runs on cuda and cpu; use one of them, {OFF}"),
    Flag("attention_backend", (None, BACKEND_NAME), OWN_BACKEND),
    Flag("prefill_attention_backend", (None, BACKEND_NAME), OWN_BACKEND),
    Flag("decode_attention_backend", (None, BACKEND_NAME), OWN_BACKEND),
    Flag("enable_lean_attention", (None, False), OWN_BACKEND),
    Flag("enable_nvidia_megakernel", (False,), ONE_KERNEL),
    Flag("enable_amd_monokernel", (False,), ONE_KERNEL),
    Flag(
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16", *SGLANG_FP8),
        "FreeKV stores KV in the model's type or in 8 bits; use --kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2, or auto with --freekv-kv-dtype int8",
    ),
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
    Flag("cuda_graph_backend_prefill", (None, "breakable", "disabled"), BREAKABLE_PREFILL + "use breakable or disabled"),
    Flag("cuda_graph_prefill_max_context", (None,), BREAKABLE_PREFILL + "leave it out"),
    Flag("cuda_graph_config", (None, {}), f"FreeKV chooses the graphs itself; use {GRAPH_FLAGS}"),
    Flag("enable_unified_memory", (False,), OWN_POOLS),
    Flag("enable_page_major_kv_layout", (False,), OWN_POOLS),
    Flag("disable_hybrid_swa_memory", (False,), f"it keeps all tokens of window layers on the GPU; leave it out, {OFF}"),
    Flag("enable_linear_replayssm", (False,), ONE_STATE),
    Flag("enable_linear_replayssm_spec", (False,), ONE_STATE),
    Flag("enable_int8_mamba_checkpoint", (False,), ONE_STATE),
    Flag("enable_mamba_cache_stochastic_rounding", (False,), ONE_STATE),
    Flag(
        "enable_paged_experts", (False,), f"it takes host memory that FreeKV does not count, and the link of recalls; leave it out, {OFF}"
    ),
    Flag(
        "startup_weight_load_mode", ("serial",), "FreeKV's graphs have not been tested when captured before weights are there; leave it out"
    ),
    Flag("enable_memory_saver", (False,), f"releasing memory would not release FreeKV's pools; leave it out, {OFF}"),
    Flag("enable_streaming_session", (False,), "it keeps the row of a finished request, which FreeKV hands on; leave it out"),
    Flag("language_model_only", (False,), f"text parts of models that read images have not been tested; use a text-only checkpoint, {OFF}"),
    Flag("language_only", (False,), f"images that other servers have read have not been tested; leave it out, {OFF}"),
    Flag("is_embedding", (False,), NO_DECODE),
    Flag("encoder_only", (False,), NO_DECODE),
    Flag("enable_mis", (False,), NO_DECODE),
    Flag("prefill_only_disable_kv_cache", (False,), NO_DECODE),
    Flag("dllm_algorithm", (None,), "it decodes blocks of tokens, and FreeKV retrieves pages for one token; use --kv-retrieval none"),
    Flag("enable_deterministic_inference", (False,), f"it needs an attention backend of SGLang's choice; leave it out, {OFF}"),
    Flag("rl_on_policy_target", (None,), f"it needs an attention backend of SGLang's choice; leave it out, {OFF}"),
    Flag("smg_grpc_mode", (False,), f"SGLang loads no plugins in that mode; leave it out, {OFF}"),
    Flag("grpc_mode", (False,), f"SGLang loads no plugins in that mode; leave it out, {OFF}"),
    Flag("skip_server_warmup", (False,), NO_PROOF),
    Flag("debug_tensor_dump_output_folder", (None,), NO_PROOF),
    Flag("msprobe_dump_config", (None,), NO_PROOF),
    Flag("use_ray", (False,), f"SGLang loads no plugins in Ray actors; leave it out, {OFF}"),
)
if not releases.has("worker app"):
    FLAGS += (Flag("tokenizer_worker_num", (1,), "this release loads no plugins in further tokenizer workers; leave it out"),)


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
