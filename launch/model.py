# SPDX-License-Identifier: Apache-2.0
"""Model: what config.json tells about a model, without its weights, its code or the network."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from sglang_freekv.config import FreeKVConfig, Refusal
from sglang_freekv.digests import digests_of
from sglang_freekv.memory_pool.sizing import KVShape

KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
WINDOWS = ("sliding_window_size", "sliding_window", "window_size")
EXPECTED = {  # keys that are looked at when they are there
    **dict.fromkeys(("text_config", "llm_config", "rope_scaling", "rope_parameters", "quantization_config"), (dict, "an object")),
    **dict.fromkeys(("layer_types",), (list, "a list")),
    **dict.fromkeys(
        (
            "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
            "head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim", "attention_chunk_size", "num_experts", "num_local_experts",
            "n_routed_experts", "n_shared_experts", "max_position_embeddings", "max_sequence_length", "seq_length", "max_seq_len",
            "model_max_length", *KV_HEADS, *WINDOWS,
        ),
        (int, "a whole number"),
    ),
}  # fmt: skip
DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16, "float32": torch.float32, "float": torch.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model by its config.

    Args:
        path: the file.
        config: its content.
        dtype: what it runs in.
    """

    path: Path
    config: dict
    dtype: torch.dtype

    @classmethod
    def load(cls, path: Path, dtype: str = "auto") -> Model:
        """Read ``path``, a config.json or a directory with one.

        Raises:
            Refusal: there is no such file, it is no config of a model, or ``dtype`` is none of ``DTYPES``.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise Refusal(
                f"--model-path {path}: expected a directory with config.json, or a config.json, found {_reason(error)}; give a model on "
                "this machine, downloaded before"
            ) from None
        if not isinstance(config, dict) or not isinstance(config.get("architectures"), list) or not config["architectures"]:
            raise Refusal(f"{file}: expected architectures, a list of names, found none; give the config.json of a Hugging Face model")
        model = cls(file, config, _dtype(config, dtype))
        for part in (config, model.text):
            for key in part.keys() & EXPECTED.keys():
                kind, words = EXPECTED[key]
                if part[key] is not None and (not isinstance(part[key], kind) or isinstance(part[key], bool)):
                    found = json.dumps(part[key])[:80]
                    raise Refusal(f"{file}: expected {key} to be {words}, found {found}; give the model's own config.json")
        return model

    @property
    def name(self) -> str:
        return str(self.config["architectures"][0])

    @property
    def text(self) -> dict:
        """The part that tells about the language model."""
        return next((self.config[key] for key in ("text_config", "llm_config") if isinstance(self.config.get(key), dict)), self.config)

    @property
    def max_context(self) -> int:
        """Tokens of context by SGLang's own reading."""
        with quiet():
            from sglang.srt.configs.model_config import get_context_length
        try:
            return get_context_length(SimpleNamespace(**self.text))
        except (TypeError, ValueError):
            found = json.dumps(self.text.get("rope_scaling"))[:80]
            raise Refusal(
                f"{self.path}: expected rope_scaling with a number as factor, found {found}; give the model's own config.json"
            ) from None

    @property
    def num_layers(self) -> int:
        return self._count("num_hidden_layers")

    @property
    def query_heads(self) -> int:
        return self._count("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return next((self._count(key) for key in KV_HEADS if self.text.get(key) is not None), self.query_heads)

    @property
    def head_dim(self) -> int:
        return self._count("head_dim") if self.text.get("head_dim") else max(1, self._count("hidden_size") // self.query_heads)

    def kv_shape(self, config: FreeKVConfig) -> KVShape:
        """The KV of one rank that has the whole model.

        Raises:
            Refusal: a key is missing, or is no number above 0.
        """
        digest_shape = digests_of(config).shape(self.head_dim, self.dtype.itemsize)
        return KVShape(
            retrieval_layers=self.num_layers - len(config.dense_layers),
            dense_layers=len(config.dense_layers),
            kv_heads=self.kv_heads,
            query_heads=self.query_heads,
            head_dim=self.head_dim,
            digest_elements=int(torch.Size(digest_shape).numel()),
            element_bytes=self.dtype.itemsize,
        )

    @property
    def parameters(self) -> int:
        """Estimated: embeddings, projections, gated MLPs or experts; no biases, and nothing but the language model."""
        text, hidden = self.text, self._count("hidden_size")
        attention = 2 * hidden * self.head_dim * (self.query_heads + self.kv_heads)
        experts = next((self._count(key) for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(key)), 0)
        if experts:
            width = self._count("moe_intermediate_size" if text.get("moe_intermediate_size") else "intermediate_size")
            mlp = 3 * hidden * width * (experts + (text.get("n_shared_experts") or 0)) + hidden * experts
        else:
            mlp = 3 * hidden * self._count("intermediate_size")
        embeddings = self._count("vocab_size") * hidden * (1 if text.get("tie_word_embeddings", True) else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * hidden) + hidden

    @property
    def weight_bytes(self) -> int:
        """Estimated from :attr:`parameters`; a quantised model by its bits, or in full where they are not told."""
        quantization = self.config.get("quantization_config") or {}
        bits = quantization.get("bits") if isinstance(quantization.get("bits"), int) else None
        bits = bits or (8 if "fp8" in str(quantization).lower() else self.dtype.itemsize * 8)
        return self.parameters * bits // 8

    def _count(self, key: str) -> int:
        value = self.text.get(key)
        if value is None or value < 1:
            found = "none" if value is None else json.dumps(value)
            raise Refusal(f"{self.path}: expected {key}, a whole number above 0, found {found}; give the config.json of a decoder model")
        return value


def _dtype(config: dict, asked: str) -> torch.dtype:
    """What SGLang runs the model in: as it does, float32 becomes a half type unless it is asked for."""
    if asked != "auto":
        if asked.lower() not in DTYPES:
            raise Refusal(f"--dtype {asked}: expected auto or one of {', '.join(DTYPES)}; use --dtype auto")
        return DTYPES[asked.lower()]
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    named = next((each[key] for each in (text, config) for key in ("dtype", "torch_dtype") if each.get(key)), "float32")
    stored = DTYPES.get(str(named).removeprefix("torch."), torch.float32)
    if stored != torch.float32:
        return stored
    return torch.bfloat16 if str(config.get("model_type")).startswith("gemma") else torch.float16


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON ({error})"
    return "no text" if isinstance(error, UnicodeDecodeError) else error.strerror or type(error).__name__


def quiet() -> warnings.catch_warnings:
    """While SGLang is imported: it warns about every kernel that it does without on a CPU."""
    return warnings.catch_warnings(action="ignore")
