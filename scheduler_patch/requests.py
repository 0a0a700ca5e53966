"""Requests that SGLang would pass on to the model and die of."""

from __future__ import annotations


def refuse_unknown_tokens(_, manager, obj, input_ids) -> None:
    """AFTER SGLang has validated a request: token ids outside the vocabulary would end the scheduler in the embedding layer."""
    if not input_ids:
        return
    vocabulary = manager.model_config.vocab_size
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"input_ids: token id {wrong} is out of range, expected 0 to {vocabulary - 1}; check the tokenizer")
