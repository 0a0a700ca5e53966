# SPDX-License-Identifier: Apache-2.0
"""Model architectures that a test has run."""

from __future__ import annotations

TESTED_ARCHITECTURES = frozenset(
    {
        "Glm4MoeForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "SeedOssForCausalLM",
    }
)
"""Names from ``architectures`` in config.json. tests/e2e/test_families.py compares the tokens of these models with the oracle's."""
