"""Checkpoints with weights of four bits, in the formats that SGLang loads as AWQ and GPTQ, rounded to nearest in groups."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP, MOST = 128, 15  # inputs that share a scale, and the largest code
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column whose code is in each nibble of a word, the lowest first


def make_checkpoint(source: Path, path: Path, kind: str) -> None:
    """Write the Llama of ``source`` to ``path`` with every projection in four bits; the rest in float16.

    Args:
        kind: ``awq`` or ``gptq``.
    """
    path.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".model", ".txt") and not file.name.endswith(".index.json"):
            shutil.copy(file, path)
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if name.endswith("_proj.weight"):
                stem = name.removesuffix("weight")
                tensors |= {stem + part: tensor.contiguous() for part, tensor in packed(weight, kind).items()}
            else:
                tensors[name] = weight.half()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    settings = {"awq": {"zero_point": True, "version": "gemm"}, "gptq": {"desc_act": False, "sym": True, "lm_head": False}}[kind]
    config["quantization_config"] = {"quant_method": kind, "bits": 4, "group_size": GROUP} | settings
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))


def packed(weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """``weight [out, in]`` as the tensors of its format: codes and zeros in int32 words of eight, and a scale for each group of inputs."""
    codes, zeros, scales = rounded(weight.float().T)
    if kind == "awq":
        order = torch.tensor(AWQ_ORDER)
        return {
            "qweight": _words(codes.unflatten(1, (-1, 8))[..., order]),
            "qzeros": _words(zeros.unflatten(1, (-1, 8))[..., order]),
            "scales": scales.half(),
        }
    return {
        "qweight": _words(codes.unflatten(0, (-1, 8)).transpose(1, 2)),
        "qzeros": _words((zeros - 1).unflatten(1, (-1, 8))),  # the format adds the one
        "scales": scales.half(),
        "g_idx": torch.arange(codes.shape[0], dtype=torch.int32) // GROUP,
    }


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes ``[in, out]``, zeros and scales ``[in / GROUP, out]`` of ``weight [in, out]``, which is about ``(codes - zeros) * scales``."""
    groups = weight.unflatten(0, (-1, GROUP))
    zero = (MOST + 1) // 2
    scales = (groups.abs().amax(1) / (zero - 1)).clamp(min=1e-6)
    codes = (groups / scales[:, None]).round().add(zero).clamp(0, MOST)
    return codes.flatten(0, 1).to(torch.int64), torch.full(scales.shape, zero, dtype=torch.int64), scales


def _words(codes: torch.Tensor) -> torch.Tensor:
    """``[..., 8]`` codes as ``[...]`` int32, the first in the lowest bits."""
    words = (codes << torch.arange(0, 32, 4)).sum(-1)
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)
