# SPDX-License-Identifier: Apache-2.0
"""Has SGLang keep the KV of window layers apart, for models that it serves with one pool, in which all layers keep all tokens."""

from __future__ import annotations

ONE_POOL = frozenset(  # the last is SGLang's name for OLMo 3, too
    {"Cohere2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Olmo2ForCausalLM"}
)


def keep_windows_apart(model) -> None:
    """BEFORE SGLang's ModelConfig tells window layers from full ones: say which are which, as configs of other models do."""
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or []
    if model.hf_config.architectures[0] in ONE_POOL and {"sliding_attention", "full_attention"} <= set(kinds):
        text.is_hybrid_swa, text.hybrid_layer_pattern = True, [int(kind == "sliding_attention") for kind in kinds]
        model.disable_hybrid_swa_memory = False  # SGLang sets it for these models


def tell_again(model) -> None:
    """The same for a ModelConfig that was made without the hook: in the launcher, where flags become known later, and in the doctor."""
    if model.hf_config.architectures[0] in ONE_POOL:
        keep_windows_apart(model)
        model._derive_hybrid_model()
