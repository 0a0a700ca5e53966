"""KV in 8 bits in the offline harness: against transformers with a cache that codes what it is given, by definition."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from benchmarks.accuracy import coded, run
from benchmarks.accuracy.coded import Coded, kv_dtypes_of, stored
from benchmarks.accuracy.forced import Texts
from benchmarks.accuracy.mass import Watched
from benchmarks.accuracy.method import Budget
from benchmarks.accuracy.methods.freekv import FreeKV
from benchmarks.accuracy.methods.full import Full
from benchmarks.accuracy.model import OfflineModel

LAYERS, HEAD_DIM, TOKENS, STEPS = 3, 24, 96, 8
BUDGET = Budget(64, sink=16, window=32, page=16)


def by_hand(numbers: torch.Tensor) -> torch.Tensor:
    scales = (numbers.abs().amax(-1, keepdim=True) / 127).half().float()
    return (numbers / scales).round().clamp(-127, 127) * scales


def rotation() -> torch.Tensor:
    """Three blocks of 8, each an orthonormal Hadamard matrix."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    return torch.block_diag(*[torch.kron(torch.kron(two, two), two) / 8**0.5] * 3)


class CodingCache(DynamicCache):
    """Keeps and gives what codes leave of keys and values, in some layers."""

    def __init__(self, layers) -> None:
        super().__init__()
        self.coded = layers

    def update(self, keys, values, layer, *more, **named):
        if layer in self.coded:
            keys, values = by_hand(keys @ rotation()) @ rotation().T, by_hand(values)
        return super().update(keys, values, layer, *more, **named)


@pytest.fixture(scope="module")
def model() -> OfflineModel:
    """Its keys have a bias, so that one dimension has most of their length."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": LAYERS, "max_position_embeddings": 128}
    config = AutoConfig.for_model("qwen2", num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD_DIM, **shape)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.3))
        for layer in made.model.layers:
            layer.self_attn.k_proj.bias[3] += 20
    return OfflineModel(made)


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    return torch.randint(64, (2, TOKENS + 1), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def whole(model: OfflineModel, token_ids: torch.Tensor, layers) -> torch.Tensor:
    """``[B, STEPS, V]`` of the last steps, all tokens at once."""
    return model.model(token_ids[:, :-1], past_key_values=CodingCache(layers)).logits[:, -STEPS:]


def followed(model: OfflineModel, token_ids: torch.Tensor, dense_layers: int) -> tuple[torch.Tensor, Texts]:
    layers = LAYERS - dense_layers
    texts = Texts.of(model, token_ids, STEPS, 1).stored(model, 1, ["auto"] * dense_layers + ["int8"] * layers)
    methods = [Full()] * dense_layers + [Watched(Coded(Full()))] * layers
    return torch.stack(list(model.follow(texts.prefilled, methods, BUDGET, texts.fed)), dim=1), texts


@pytest.mark.parametrize("dense_layers", range(LAYERS + 1))
def test_prefill_and_steps_read_coded_kv_behind_the_dense_layers(model, token_ids, dense_layers):
    found, texts = followed(model, token_ids, dense_layers)
    others = [whole(model, token_ids, range(first, LAYERS)) for first in range(LAYERS + 1)]
    away = [(found - other).abs().mean().item() for other in others]
    expected = away.pop(dense_layers)
    assert expected < 0.02 * min(away), "a number near the border between two codes may be coded as either"
    torch.testing.assert_close(texts.dense, others[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("left_out", ["the prefill", "the steps"])
def test_what_is_not_coded_is_seen(model, token_ids, monkeypatch, left_out):
    expected, (right, _) = whole(model, token_ids, range(1, LAYERS)), followed(model, token_ids, 1)
    code = coded.stored

    def partly(keys, values, kv_dtype):
        return (keys, values) if (keys.shape[2] == 1) == (left_out == "the steps") else code(keys, values, kv_dtype)

    monkeypatch.setattr("benchmarks.accuracy.model.stored", partly)
    wrong, _ = followed(model, token_ids, 1)
    assert (wrong - expected).abs().mean() > 20 * (right - expected).abs().mean()


def test_keys_are_rotated_and_values_are_not():
    keys, values = torch.randn(2, 2, 3, 5, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    keys[..., 3] += 100
    of_keys, of_values = stored(keys, values, "int8")
    torch.testing.assert_close(of_keys, by_hand(keys @ rotation()) @ rotation().T)
    torch.testing.assert_close(of_values, by_hand(values), rtol=0, atol=0)
    assert (of_keys - keys).norm() < 0.5 * (by_hand(keys) - keys).norm()
    low = [each.bfloat16() for each in (keys, values)]
    assert stored(*low, "auto")[0] is low[0] and {each.dtype for each in stored(*low, "int8")} == {torch.bfloat16}


def test_floats_of_8_bits_are_in_dense_layers_too_and_not_rotated():
    keys, values = 300 * torch.randn(2, 2, 3, 5, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    for kv_dtype, float_type, largest in (("fp8_e4m3", torch.float8_e4m3fn, 448), ("fp8_e5m2", torch.float8_e5m2, 57344)):
        found = stored(keys, values, kv_dtype)
        for ours, numbers in zip(found, (keys, values), strict=True):
            torch.testing.assert_close(ours, numbers.clamp(-largest, largest).to(float_type).float(), rtol=0, atol=0)
    assert kv_dtypes_of(Coded(Full(), "fp8_e4m3"), 1, 3) == ("fp8_e4m3",) * 3
    assert kv_dtypes_of(Coded(Full()), 1, 3) == ("auto", "int8", "int8") and kv_dtypes_of(Full(), 1, 2) == ("auto", "auto")


def test_digests_and_selection_are_of_coded_keys(model, token_ids):
    method, prompts = Coded(FreeKV(digest="min-max")), model.prefill(token_ids, 1, ["auto", "int8", "int8"]).prompts
    pages = method.begin(prompts[1], BUDGET).pages
    full = prompts[1].keys[:, :, : TOKENS // 16 * 16].unflatten(2, (-1, 16))
    assert torch.equal(pages._digests[0].data, full.amax(-2))
    assert not torch.equal(prompts[1].keys, model.prefill(token_ids).prompts[1].keys)


def test_a_prompt_that_is_not_stored_so_is_refused(model, token_ids):
    prompts = model.prefill(token_ids).prompts
    with pytest.raises(ValueError, match="^kv_dtype int8: expected a prompt that was prefilled with it, got one with auto$"):
        Coded(Full()).begin(prompts[0], BUDGET)
    with pytest.raises(ValueError, match="^kv_dtype int4: expected one of auto, int8, fp8_e4m3, fp8_e5m2$"):
        Coded(Full(), "int4")


def test_answers_begin_behind_a_prefill_of_their_own(tmp_path, monkeypatch):
    """Those of prompts, in the other command: one prefill for each way to store KV, and dense layers as computed."""
    asked, prefill = [], OfflineModel.prefill
    monkeypatch.setattr(OfflineModel, "prefill", lambda self, *a: asked.append(a[2]) or prefill(self, *a))
    options = ["--tasks", "magic-number", "--lengths", "360", "--budgets", "160", "--prompts", "2", "--batch", "2", "--dense-layers", "2"]
    monkeypatch.setattr(sys, "argv", ["run.py", *options, "--out", str(tmp_path)])
    assert run.main({"full": Full, "freekv": FreeKV(), "freekv-int8": Coded(FreeKV())}) == 0
    layers = len(asked[0])
    assert asked == [("auto",) * layers, ("auto",) * 2 + ("int8",) * (layers - 2)]
