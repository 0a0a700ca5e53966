# SPDX-License-Identifier: Apache-2.0
"""Architectures of models that a test has run."""

from __future__ import annotations

TESTED_ARCHITECTURES = frozenset(
    {"GraniteForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
)
"""Names in the ``architectures`` of config.json whose tokens tests/e2e/test_families.py compares with the oracle's."""
