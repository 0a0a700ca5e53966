# SPDX-License-Identifier: Apache-2.0
"""Structured output with llguidance, the grammar backend of servers on a CPU."""

from __future__ import annotations

import json
import logging

import torch
from sglang.srt.constrained.llguidance_backend import GuidanceBackend, grammar_from

logger = logging.getLogger(__name__)


def create_backend(original, server_args, *args, **kwargs):
    """AROUND the making of the grammar backend: llguidance does not read every tokenizer. Requests for structured output are then refused.

    So does SGLang with xgrammar, its default on a GPU.
    """
    try:
        return original(server_args, *args, **kwargs)
    except ValueError as error:
        if getattr(server_args, "enable_strict_thinking", False):
            raise
        logger.warning("Structured output is off, because %s cannot read this tokenizer (%s)", server_args.grammar_backend, error)
        return None


def apply_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """REPLACE the masking of logits by llguidance, which ``torch.compile`` would build while the scheduler waits.

    Args:
        logits: ``[B, V]`` of any floating dtype. Logits of tokens that the grammar does not allow become -inf, in place.
        vocab_mask: ``[B, W]`` int32, one bit for each token.
    """
    bits = (vocab_mask[..., None] >> torch.arange(32, dtype=torch.int32)) & 1
    allowed = bits.flatten(-2)[..., : logits.shape[-1]].bool()
    logits[..., : allowed.shape[-1]].masked_fill_(~allowed, float("-inf"))
    logits[..., allowed.shape[-1] :] = float("-inf")


def tool_schema(schema: dict, tool) -> dict:
    """AFTER SGLang has made the JSON schema of a tool call: require an object. A schema without a type would allow any value."""
    return schema | {"type": "object", "additionalProperties": False}


def required_tags(original, backend: GuidanceBackend, key_string: str):
    """AROUND the grammar of structural tags: if at least one tag is required, allow tags only, and no text between them."""
    tags = json.loads(key_string)
    if not tags.get("at_least_one"):
        return original(backend, key_string)
    calls = (f"{json.dumps(tag['begin'])} %json {json.dumps(tag['schema'])} {json.dumps(tag['end'])}" for tag in tags["structures"])
    return backend._from_serialized(grammar_from("lark", f"start: ({' | '.join(calls)})+"))
