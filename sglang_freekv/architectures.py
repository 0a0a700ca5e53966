# SPDX-License-Identifier: Apache-2.0
"""Model architectures that a test has run."""

from __future__ import annotations

TESTED_ARCHITECTURES = frozenset(
    {
        "Cohere2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "LlamaForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "Mistral3ForConditionalGeneration",
        "Olmo2ForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "SeedOssForCausalLM",
    }
)
"""Names from ``architectures`` in config.json. tests/e2e/test_families.py and test_vision.py compare the tokens of these models with the
oracle's."""
TESTED_WITH_IMAGES = frozenset(name for name in TESTED_ARCHITECTURES if name.endswith("ForConditionalGeneration"))
"""Those of them that read images."""
TESTED_WITH_WINDOWS = frozenset(
    {
        "Cohere2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GptOssForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "Olmo2ForCausalLM",
    }
)
"""Those of them with full and sliding-window layers in turns. OLMo 2 has none; SGLang has one class for it and OLMo 3."""
WINDOWS_ON_BOTH_RELEASES = frozenset({"GptOssForCausalLM"})
"""Those of them whose windows have been tested with SGLang 0.5.17, too."""
