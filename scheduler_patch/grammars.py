# SPDX-License-Identifier: Apache-2.0
"""Structured output with llguidance, the grammar backend of servers on a CPU."""

from __future__ import annotations

import json

import torch
from sglang.srt.constrained.llguidance_backend import GuidanceBackend, grammar_from


def apply_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """In the place of llguidance's own, which ``torch.compile`` builds while the scheduler waits.

    Args:
        logits: [B, V] of any type; those of tokens that a grammar does not allow become -inf.
        vocab_mask: [B, W] int32, a bit for each token.
    """
    bits = (vocab_mask[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    allowed = bits.flatten(-2)[..., : logits.shape[-1]].bool()
    logits[..., : allowed.shape[-1]].masked_fill_(~allowed, float("-inf"))
    logits[..., allowed.shape[-1] :] = float("-inf")


def tool_schema(schema: dict, tool) -> dict:
    """AFTER SGLang makes the JSON schema of a call: by the standard one without a type allows what is no object at all."""
    return schema | {"type": "object", "additionalProperties": False}


def required_tags(original, backend: GuidanceBackend, key_string: str):
    """AROUND: a grammar of structural tags of which one at least is required begins with one, and has no text between them."""
    tags = json.loads(key_string)
    if not tags.get("at_least_one"):
        return original(backend, key_string)
    calls = (f"{json.dumps(tag['begin'])} %json {json.dumps(tag['schema'])} {json.dumps(tag['end'])}" for tag in tags["structures"])
    return backend._from_serialized(grammar_from("lark", f"start: ({' | '.join(calls)})+"))
