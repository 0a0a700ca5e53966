"""Masks and grammars of llguidance, by hand."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from sglang_freekv.scheduler_patch import grammars


@pytest.mark.parametrize("vocabulary, masked", [(70, 70), (96, 96), (96, 64), (40, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_bans_what_its_bits_do_not_allow(vocabulary, masked, dtype):
    generator = torch.Generator().manual_seed(0)
    mask = torch.randint(-(2**31), 2**31 - 1, (3, masked // 32 + (masked % 32 > 0)), dtype=torch.int32, generator=generator)
    logits = torch.randn(3, vocabulary, generator=generator).to(dtype)
    expected = logits.tolist()
    for row, words in zip(expected, mask.tolist()):
        for token in range(vocabulary):
            if token >= 32 * len(words) or not words[token // 32] >> token % 32 & 1:
                row[token] = float("-inf")
    grammars.apply_mask(logits, mask)
    assert logits.tolist() == expected


@pytest.mark.parametrize("strict", [False, True])
def test_a_tokenizer_that_cannot_be_read_leaves_structured_output_off(strict, caplog):
    """WordLevel without a decoder: llguidance does not know how its tokens become text."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")), eos_token="b")
    args = SimpleNamespace(grammar_backend="llguidance", enable_strict_thinking=strict)

    def make(server_args):
        return GuidanceBackend(tokenizer, n_vocab=2, eos_token_ids={1})

    if strict:
        with pytest.raises(ValueError, match="decoder"):
            grammars.create_backend(make, args)
    else:
        assert grammars.create_backend(make, args) is None
        assert "Structured output is off, because llguidance cannot read this tokenizer (can't determine decoder" in caplog.text
