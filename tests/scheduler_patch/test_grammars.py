"""Masks and grammars of llguidance, by hand."""

import pytest
import torch
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
