# SPDX-License-Identifier: Apache-2.0
"""Served: whether FreeKV serves a model, by the server's own rules over what config.json tells."""

from __future__ import annotations

from types import SimpleNamespace

from sglang_freekv.config import BACKEND_NAME, FreeKVConfig
from sglang_freekv.launch.model import WINDOWS, Model, quiet

OPTIONAL_WINDOW = ("qwen2", "qwen3")  # a window is off unless use_sliding_window says otherwise
DEFAULT_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}  # of transformers, where the file has no such key
CHUNK_TOKENS = 8192  # of prefill, SGLang's default on most GPUs
RECURRENT = ("mamba", "linear", "conv", "recurrent")  # in the name of a layer's type
RECURRENT_MODELS = (
    "bailing_hybrid", "falcon_h1", "jamba", "jet_nemotron", "jet_vlm", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2",
    "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next", "zaya",
)  # fmt: skip


def refuse_model(model: Model, context_len: int) -> None:
    """Ask the server's own rules about the model.

    Args:
        context_len: tokens of the longest request.

    Raises:
        Refusal: as a server with ``--kv-retrieval freekv`` refuses it.
    """
    with quiet():
        from sglang_freekv.scheduler_patch import refusals
    refusals.refuse_model(_as_sglang_sees_it(model, context_len))


def refuse_settings(model: Model, config: FreeKVConfig) -> None:
    """Ask the server's own rules about settings that depend on the model.

    Raises:
        Refusal: as a server refuses them, or a key of the model's config is missing.
    """
    with quiet():
        from sglang_freekv.scheduler_patch import refusals
    view = _as_sglang_sees_it(model, model.max_context)
    view.num_attention_layers = model.num_layers
    arguments = SimpleNamespace(
        max_total_tokens=None,
        device="cuda",
        grammar_backend=None,
        kv_cache_dtype="auto",
        tp_size=1,
        page_size=config.page_size,
        chunked_prefill_size=CHUNK_TOKENS,
        get_attention_backends=lambda: (BACKEND_NAME,),
        get_model_config=lambda: view,
    )
    refusals.refuse_resolved(arguments, config)


def _as_sglang_sees_it(model: Model, context_len: int) -> SimpleNamespace:
    """What the rules of refusals ask of SGLang's ModelConfig."""
    with quiet():
        from sglang.srt.configs import model_config as sglang
    text, names = model.text, model.config["architectures"]
    mla = text.get("kv_lora_rank") is not None and text.get("use_mla", True)
    head_dim = 0 if mla else text.get("head_dim") or (text.get("hidden_size") or 0) // (text.get("num_attention_heads") or 1)
    value_dim = 0 if mla else text.get("v_head_dim") or head_dim
    window_dim = text.get("swa_head_dim") or head_dim
    quantization = model.config.get("quantization_config") or {}
    return SimpleNamespace(
        hf_config=SimpleNamespace(**model.config, get_text_config=lambda: None),
        hf_text_config=SimpleNamespace(**text),
        linear_attn_registry_result=(None, True) if _is_recurrent(model) else None,
        is_draft_model=False,
        attention_arch=sglang.AttentionArch.MLA if mla else sglang.AttentionArch.MHA,
        is_encoder_decoder=sglang.is_encoder_decoder_model(names) or bool(model.config.get("is_encoder_decoder")),
        is_hybrid_swa=sglang.is_hybrid_swa_model(names, SimpleNamespace(**text)),
        is_generation=sglang.is_generation_model(names),
        attention_chunk_size=text.get("attention_chunk_size"),
        sliding_window_size=_sliding_window(model),
        context_len=context_len,
        has_attention_sinks=any(text.get(f"add_{kind}_attention_sink_bias") for kind in ("swa", "full")),
        has_asymmetric_kv=head_dim != value_dim or (text.get("swa_v_head_dim") or window_dim) != window_dim,
        head_dim=head_dim,
        v_head_dim=value_dim,
        dtype=model.dtype,
        quantization=quantization.get("quant_method"),
        _parse_quant_hf_config=lambda: quantization,
    )


def _sliding_window(model: Model) -> int | None:
    text, kind = model.text, str(model.text.get("model_type", ""))
    if kind.startswith(OPTIONAL_WINDOW) and not text.get("use_sliding_window"):
        return None
    if not any(key in text for key in WINDOWS):
        return DEFAULT_WINDOW.get(kind)
    return next((text[key] for key in WINDOWS if text.get(key) is not None), None)


def _is_recurrent(model: Model) -> bool:
    types = " ".join(map(str, model.text.get("layer_types") or ()))
    kinds = (model.config.get("model_type"), model.text.get("model_type"))
    return any(word in types for word in RECURRENT) or any(kind in RECURRENT_MODELS for kind in kinds)
