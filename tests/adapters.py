"""Random LoRA adapters: as files that SGLang loads, and added to the weights of a model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = tuple(f"self_attn.{name}" for name in ATTENTION) + tuple(f"mlp.{name}" for name in MLP)


def make_adapter(model, path: Path, seed: int, rank: int = 8, alpha: int = 16, size: float = 0.2) -> None:
    """Write an adapter of every projection of a Llama to ``path``.

    Args:
        model: transformers' model; its dtype becomes the adapter's.
        size: of what the adapter adds to a weight, in the size of that weight.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in model.named_parameters():
        if any(f"{projection}.weight" in name for projection in PROJECTIONS):
            (rows, columns), spread = weight.shape, size * float(weight.detach().float().std()) * rank**0.5 / alpha
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=generator).to(weight.dtype)
            tensors[f"{stem}.lora_B.weight"] = (spread * torch.randn(rows, rank, generator=generator)).to(weight.dtype)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [*ATTENTION, *MLP], "bias": "none"}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": "", "lora_dropout": 0.0}
    (path / "adapter_config.json").write_text(json.dumps(config))


def merge_adapter(model, path: Path) -> None:
    """Add an adapter to the weights of the model that it was made for."""
    config, tensors = json.loads((path / "adapter_config.json").read_text()), load_file(path / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" in tensors:
                a, b = (tensors[f"{stem}.lora_{letter}.weight"].float() for letter in "AB")
                weight.add_((b @ a * config["lora_alpha"] / config["r"]).to(weight.dtype))
