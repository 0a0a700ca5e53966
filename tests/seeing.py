"""Tiny random-weight models that read images, each with a tokenizer of bytes, and prompts with an image of random pixels."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from families import CALM, EIGHT, EVERY, LINEAR, SHARED, WINDOWS, experts, spread

VOCABULARY, LAYERS, WIDTH = 512, 4, 64
TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=LAYERS, max_position_embeddings=8192,
    num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=False,
) | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # fmt: skip
SECTIONS = {"mrope_section": [4, 2, 2]}  # frequencies that turn by time, height and width


def rope(**others) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6} | others}


def qwen_images(patch: int) -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(patch_size=patch, size={"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2})


def qwen3_processor(tokenizer, **others):
    return Qwen3VLProcessor(qwen_images(16), tokenizer, Qwen3VLVideoProcessor(patch_size=16), **others)


def qwen2_processor(tokenizer, **others):
    return Qwen2_5_VLProcessor(qwen_images(14), tokenizer, Qwen2VLVideoProcessor(patch_size=14), **others)


def pixtral_processor(tokenizer, **others):
    images = PixtralImageProcessor(patch_size=14, size={"longest_edge": 280})
    return PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2, **others)


def gemma_processor(tokenizer, **others):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        extra_special_tokens=GEMMA_TOKENS,
    )
    return Gemma3Processor(Gemma3ImageProcessor(size={"height": 112, "width": 112}), tokenizer, image_seq_length=16, **others)


class Family(NamedTuple):
    """A model type of transformers that reads images.

    Args:
        text, vision: fields of the two parts of its config.
        tokens: its special tokens by the name of their field in the config; None is in none.
        picture: what stands for an image in a prompt.
        processor: makes the one that published checkpoints have, of a tokenizer.
        more: other fields of its config.
        published: fields of its text that SGLang reads and transformers does not save.
        loud: how much larger embeddings of images are made. Gated delta nets forget others before the answer.
        turned: part of the names of weights whose last two dimensions are the other way round in published checkpoints.
        renamed: a part of names of weights, and what it is in published checkpoints.
    """

    kind: str
    text: dict[str, Any]
    vision: dict[str, Any]
    tokens: dict[str | None, str]
    picture: str
    processor: Callable
    more: dict[str, Any] = {}
    published: dict[str, Any] = {}
    loud: float = 1.0
    turned: str = ""
    renamed: tuple[str, str] | None = None


QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN3_VISION = dict(
    depth=3, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=16, out_hidden_size=WIDTH, num_position_embeddings=64,
    deepstack_visual_indexes=[0, 1, 2],  # as many as published models, because SGLang counts on three
)  # fmt: skip
QWEN35_VISION = QWEN3_VISION | {"deepstack_visual_indexes": []}
QWEN35_TEXT = LINEAR | EIGHT | {"head_dim": 16} | rope(partial_rotary_factor=0.5, mrope_interleaved=True, mrope_section=[2, 1, 1])
QWEN3_TEXT = {"num_attention_heads": 6, "head_dim": 16} | rope(mrope_interleaved=True, **SECTIONS)
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
TIED = {"tie_word_embeddings": True}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
FAMILIES = {
    "gemma-3": Family(
        "gemma3", WINDOWS | {"num_attention_heads": 4, "head_dim": 16, "query_pre_attn_scalar": 2, "rope_parameters": GEMMA_ROPE} | TIED,
        dict(
            num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, patch_size=14, image_size=112,
            vision_use_head=False, hidden_act="quick_gelu",  # SGLang computes no other here
        ),
        dict(zip(("boi_token_index", "image_token_index", "eoi_token_index"), GEMMA_TOKENS.values())), "<start_of_image>", gemma_processor,
        {"mm_tokens_per_image": 16} | TIED, renamed=("vision_tower.", "vision_tower.vision_model."),
    ),
    "qwen3-vl": Family("qwen3_vl", QWEN3_TEXT, QWEN3_VISION, QWEN_TOKENS, QWEN_PICTURE, qwen3_processor),
    "qwen3-vl-moe": Family(
        "qwen3_vl_moe", QWEN3_TEXT | experts("num_experts", moe_intermediate_size=24, norm_topk_prob=True), QWEN3_VISION, QWEN_TOKENS,
        QWEN_PICTURE, qwen3_processor, turned=".mlp.experts.",
    ),
    "qwen2.5-vl": Family(
        "qwen2_5_vl", {"num_attention_heads": 4} | rope(**SECTIONS),
        dict(depth=3, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=WIDTH, fullatt_block_indexes=[1], window_size=56),
        QWEN_TOKENS, QWEN_PICTURE, qwen2_processor,
    ),
    "mistral-small-3.2": Family(
        "mistral3", {"model_type": "mistral", "num_attention_heads": 8, "head_dim": 16, "sliding_window": None} | rope(),
        dict(model_type="pixtral", num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, patch_size=14, image_size=280),
        {"image_token_index": "[IMG]", None: "[IMG_BREAK]", "": "[IMG_END]"}, "[IMG]", pixtral_processor, {"vision_feature_layer": -1},
    ),
    "qwen3.5": Family(
        "qwen3_5", QWEN35_TEXT | {"num_attention_heads": 12}, QWEN35_VISION, QWEN_TOKENS, QWEN_PICTURE, qwen3_processor,
        published=EVERY, loud=8.0,
    ),
    "qwen3.5-moe": Family(
        "qwen3_5_moe", QWEN35_TEXT | experts("num_experts", **SHARED) | {"num_attention_heads": 16}, QWEN35_VISION, QWEN_TOKENS,
        QWEN_PICTURE, qwen3_processor, published=EVERY, loud=8.0,
    ),
}  # fmt: skip


def make_tokenizer(special: list[str]) -> PreTrainedTokenizerFast:
    """A token for each byte, and for each of ``special``."""
    bytes_alone = models.BPE(vocab={letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    tokenizer = Tokenizer(bytes_alone)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1])


def make_model(family: Family, path: Path, **changes: Any) -> None:
    """Write a checkpoint of the family, with its processor, and with ``changes`` to its text part."""
    tokenizer = make_tokenizer(["<eos>", "<pad>", *family.tokens.values()])
    family.processor(tokenizer, chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}").save_pretrained(path)
    numbers = {name: tokenizer.convert_tokens_to_ids(token) for name, token in family.tokens.items() if name}
    fields = (
        {"text_config": TEXT | family.text | changes, "vision_config": family.vision, "tie_word_embeddings": False} | numbers | family.more
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family.kind, **fields), dtype=torch.float32)
    with torch.no_grad():  # biases and norms start as constants, and small weights make every token and every page alike
        for name, parameter in model.named_parameters():
            parameter.add_(
                torch.randn_like(parameter)
                * (0.2 if "visual" in name or "vision" in name else 0.3 if parameter.ndim < 2 else spread(**changes))
            )
            if changes and name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(CALM)
            if "merger.linear_fc2" in name:
                parameter.mul_(family.loud)
        if family.text.get("tie_word_embeddings"):  # Gemma makes embeddings larger, and each token would repeat itself
            model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(path)
    if family.renamed:
        file = path / "model.safetensors"
        save_file({name.replace(*family.renamed): weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    if family.turned:
        weights = load_file(file := path / "model.safetensors")
        turned = {name: weight.transpose(1, 2).contiguous() for name, weight in weights.items() if family.turned in name}
        save_file(weights | turned, file, {"format": "pt"})
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= family.published
    file.write_text(json.dumps(config))


def picture(seed: int, width: int = 192, height: int = 128) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image) -> str:
    """As the OpenAI API takes it."""
    held = io.BytesIO()
    image.save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def inputs(path: Path, text: str, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """What transformers' model takes for a prompt."""
    return dict(AutoProcessor.from_pretrained(path)(text=[text], images=images or None, return_tensors="pt"))
