"""A GGUF file that is written here, made a checkpoint: the same weights, the same predictions, and a tokenizer that loses nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.accuracy.gguf_checkpoint import convert

HIDDEN, HEADS, KV_HEADS, LAYERS, CONTEXT = 64, 4, 2, 2, 512
CONTROL = ["<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "Ġ Ġ"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
IN_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4}, rms_norm_eps=1e-4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        embeddings = model.model.embed_tokens.weight
        embeddings.copy_(torch.from_numpy(dequantize(quantized(embeddings), GGMLQuantizationType.Q8_0)))
    return model


def quantized(weights: torch.Tensor) -> np.ndarray:
    return quantize(weights.detach().numpy(), GGMLQuantizationType.Q8_0)


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp has rows of queries and keys: dimension i of the first half of a head beside dimension i of the second."""
    size = len(rows) // heads
    order = [head * size + half * size // 2 + number for head in range(heads) for number in range(size // 2) for half in (0, 1)]
    return rows[order]


def write(path: Path, model: LlamaForCausalLM, architecture: str = "llama", without: str = "", more: str = "") -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS), writer.add_context_length(CONTEXT), writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96), writer.add_head_count(HEADS), writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-4), writer.add_rope_freq_base(5e4)
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("smollm"), writer.add_token_list(TOKENS), writer.add_token_merges(MERGES)
    writer.add_token_types([TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in TOKENS])
    writer.add_bos_token_id(0), writer.add_eos_token_id(1), writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    names = {"model.norm.weight": "output_norm.weight"}
    for layer in range(LAYERS):
        names |= {f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{theirs}.weight" for ours, theirs in IN_LAYER.items()}
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for ours, theirs in names.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(ours.split(".")[-2])
        if theirs != without:
            writer.add_tensor(theirs, neighbours(state[ours], heads) if heads else state[ours])
    writer.add_tensor("token_embd.weight", quantized(model.model.embed_tokens.weight), raw_dtype=GGMLQuantizationType.Q8_0)
    if more:
        writer.add_tensor(more, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return path


@pytest.fixture(scope="module")
def checkpoint(original, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    return convert(write(directory / "model.gguf", original), directory / "checkpoint")


def test_a_converted_model_predicts_what_the_original_does(original, checkpoint):
    converted = AutoModelForCausalLM.from_pretrained(checkpoint)
    token_ids = torch.randint(len(TOKENS), (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(converted(token_ids).logits, original(token_ids).logits)
    assert (converted.config.bos_token_id, converted.generation_config.eos_token_id, converted.config.max_position_embeddings) == (
        0,
        1,
        CONTEXT,
    )


def test_its_tokenizer_splits_digits_and_loses_nothing(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "In the  year 2024,\n    the sun é<|im_end|> ☃"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert [token for token in tokens if token.isdigit()] == list("2024") and "Ġthe" in tokens and tokens.count("<|im_end|>") == 1
    assert tokenizer.tokenize("   7") == ["ĠĠ", "Ġ", "7"] and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "the<|im_end|>"


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"architecture": "qwen2"}, "expected general.architecture llama, found qwen2"),
        ({"without": "blk.1.ffn_up.weight"}, r"expected shape \[96, 64\] for model.layers.1.mlp.up_proj.weight, found no tensor"),
        ({"more": "rope_freqs.weight"}, "found rope_freqs.weight as well"),
    ],
)
def test_a_file_of_another_model_is_refused(original, tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        convert(write(tmp_path / "model.gguf", original, **wrong), tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
