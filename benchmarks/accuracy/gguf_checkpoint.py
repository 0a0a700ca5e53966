"""A GGUF file of a Llama made a Hugging Face directory: float32 weights, config and tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFReader, TokenType, dequantize, get_tensor_name_map
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ARCHITECTURE, TOKENIZER, SPLIT = "llama", "gpt2", "smollm"
REQUIRED = {"general.architecture": ARCHITECTURE, "tokenizer.ggml.model": TOKENIZER, "tokenizer.ggml.pre": SPLIT}


class Fields:
    """What a file says of its model, by name.

    Raises:
        ValueError: the file is of another kind of model.
    """

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self.reader, self.path = reader, path
        for name, expected in REQUIRED.items():
            if (found := self[name]) != expected:
                raise ValueError(f"{path}: expected {name} {expected}, found {found}; this converter knows no other")

    def __getitem__(self, name: str):
        field = self.reader.fields.get(name)
        return None if field is None else field.contents()

    def of_model(self, name: str):
        if (value := self[f"{ARCHITECTURE}.{name}"]) is None:
            raise ValueError(f"{self.path}: expected the field {ARCHITECTURE}.{name}, found none")
        return value

    def special(self, name: str) -> int | None:
        return self[f"tokenizer.ggml.{name}_token_id"]


def config_of(fields: Fields, tied: bool) -> LlamaConfig:
    """Of the model; special tokens are the file's."""
    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields.of_model("embedding_length"),
        intermediate_size=fields.of_model("feed_forward_length"),
        num_hidden_layers=fields.of_model("block_count"),
        num_attention_heads=fields.of_model("attention.head_count"),
        num_key_value_heads=fields.of_model("attention.head_count_kv"),
        max_position_embeddings=fields.of_model("context_length"),
        rms_norm_eps=fields.of_model("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fields.of_model("rope.freq_base")},
        tie_word_embeddings=tied,
        **{f"{name}_token_id": fields.special(name) for name in ("bos", "eos")},
        pad_token_id=fields.special("padding"),
    )


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection ``[heads * D, hidden]``, from llama.cpp's RoPE of neighbours to Hugging Face's of halves."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


@torch.no_grad()
def model_of(fields: Fields, path: Path) -> LlamaForCausalLM:
    """The model with the file's weights.

    Raises:
        ValueError: the file lacks a tensor, has one too many or of another shape.
    """
    tensors = {tensor.name: tensor for tensor in fields.reader.tensors}
    config = config_of(fields, tied="output.weight" not in tensors)
    model, names = LlamaForCausalLM(config), get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        tensor = tensors.pop(names.get_name(name, try_suffixes=(".weight",)), None)
        values = None if tensor is None else dequantize(tensor.data, tensor.tensor_type)
        if values is None or values.shape != tuple(parameter.shape):
            found = "no tensor" if values is None else f"shape {list(values.shape)}"
            raise ValueError(f"{path}: expected shape {list(parameter.shape)} for {name}, found {found}")
        if turned := heads.get(name.split(".")[-2]):
            values = halves(values, turned)
        parameter.copy_(torch.from_numpy(np.array(values, dtype=np.float32)))
    if tensors:
        raise ValueError(f"{path}: expected the tensors of {ARCHITECTURE}, found {', '.join(sorted(tensors))} as well")
    return model


def tokenizer_of(fields: Fields) -> PreTrainedTokenizerFast:
    """Bytes in pairs; every digit is a token of its own."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    split = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(list(split)), decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ids = {f"{name}_token": fields.special(which) for name, which in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    named = {name: tokens[number] for name, number in ids.items() if number is not None}
    longest = fields.of_model("context_length")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, clean_up_tokenization_spaces=False, **named)
    made.chat_template = fields["tokenizer.chat_template"]
    return made


def convert(path: Path, directory: Path) -> Path:
    """Write the Hugging Face directory of a GGUF file; its path."""
    fields = Fields(GGUFReader(path), path)
    model_of(fields, path).save_pretrained(directory)
    tokenizer_of(fields).save_pretrained(directory)
    return directory
