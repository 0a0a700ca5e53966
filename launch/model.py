# SPDX-License-Identifier: Apache-2.0
"""Model: a checkpoint as the server sees it, by SGLang's own ModelConfig."""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_freekv.architectures import TESTED_ARCHITECTURES
from sglang_freekv.config import BACKEND_NAME, FreeKVConfig, Refusal
from sglang_freekv.launch import weights
from sglang_freekv.launch.checkpoint import Checkpoint
from sglang_freekv.launch.files import MOST_LAYERS
from sglang_freekv.launch.hardware import Hardware
from sglang_freekv.launch.quantization import quantization_of
from sglang_freekv.launch.strangers import quiet, strange
from sglang_freekv.launch.weights import Weights
from sglang_freekv.memory_pool.sizing import KVShape

MOST_WIDTH = 1 << 20


@dataclass(frozen=True)
class Model:
    """A model whose config SGLang has read.

    Args:
        checkpoint: its files.
        config: SGLang's ModelConfig.
        server: stock SGLang's flags; None for a flag that was not given.
    """

    checkpoint: Checkpoint
    config: Any
    server: argparse.Namespace

    @classmethod
    def load(cls, checkpoint: Checkpoint, server: argparse.Namespace | None = None) -> Model:
        """Read a checkpoint's config. No code of the checkpoint is run.

        Raises:
            Refusal: transformers or SGLang does not accept the config, or ``--context-length`` exceeds the model's.
        """
        server = server or argparse.Namespace()
        flags = {name: value for name in ("dtype", "quantization") if (value := getattr(server, name, None)) is not None}
        overrides = getattr(server, "json_model_override_args", None) or "{}"
        _expect_transformers_takes(checkpoint)
        with quiet():
            from sglang.srt.configs.model_config import ModelConfig
            from sglang.srt.layers.quantization import QUANTIZATION_METHODS
            from sglang.srt.layers.quantization.gptq import GPTQMarlinConfig
            from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

            from sglang_freekv.scheduler_patch import windows
        for method, on_gpu in {"gptq": GPTQMarlinConfig, "mxfp4": Mxfp4Config}.items():
            QUANTIZATION_METHODS.setdefault(method, on_gpu)  # SGLang leaves them out where the doctor finds no GPU
        with strange(checkpoint.file), _copied(checkpoint) as directory:
            config = ModelConfig(str(directory), trust_remote_code=False, model_override_args=overrides, **flags)
            windows.tell_again(config)
            description = config._parse_quant_hf_config()
            if config.quantization == "gptq" and QUANTIZATION_METHODS["gptq"] is GPTQMarlinConfig:
                _expect_marlin_takes(description, list(GPTQMarlinConfig.TYPE_MAP))
        config._parse_quant_hf_config = lambda: description  # SGLang would read files of the copy, which is deleted
        model = cls(checkpoint, config, server)
        model._expect_numbers()
        if (asked := getattr(server, "context_length", None)) is not None:
            if asked > config.context_len:
                raise Refusal(
                    f"--context-length {asked}: expected at most the model's {config.context_len}; use --context-length "
                    f"{config.context_len}, or where the model was made for it, --json-model-override-args with its rope_scaling"
                )
            config.context_len = asked
        return model

    @property
    def name(self) -> str:
        return self.config.hf_config.architectures[0]

    @property
    def is_tested(self) -> bool:
        return self.name in TESTED_ARCHITECTURES

    @property
    def dtype(self) -> torch.dtype:
        return self.config.dtype

    @property
    def text(self) -> Any:
        """The part of the config for the language model."""
        return self.config.hf_text_config

    @property
    def context_len(self) -> int:
        """Tokens of the longest request."""
        return self.config.context_len

    def expect_useful(self, config: FreeKVConfig, ranks: int) -> None:
        """Raise Refusal if the context is shorter than the budget, or if ``ranks`` cannot divide the heads."""
        if self.context_len < config.budget_tokens:
            raise Refusal(
                f"--context-length {self.context_len}: expected at least --freekv-budget {config.budget_tokens}, or there is nothing to "
                f"retrieve; use --context-length {config.budget_tokens} or more, or a lower --freekv-budget"
            )
        if not self.fits_ranks(ranks):
            heads = f"{self.config.num_attention_heads} query heads and {self.config.get_total_num_kv_heads()} kv heads"
            fitting = max(fewer for fewer in range(1, ranks + 1) if self.fits_ranks(fewer))
            raise Refusal(f"--tp-size {ranks}: expected a number that divides {heads}; use --tp-size {fitting}")

    def refuse_settings(self, config: FreeKVConfig, hardware: Hardware) -> None:
        """Apply the server's own rules for flags to this model on ``hardware``.

        Raises:
            Refusal: the server would refuse a flag.
        """
        from sglang_freekv.scheduler_patch import refusals, refused_flags, states

        defaults = {flag.name: flag.allowed[0] for flag in refused_flags.FLAGS} | dict.fromkeys(refused_flags.COUNTS)
        defaults |= dict(tp_size=1, max_total_tokens=None, chunked_prefill_size=hardware.chunk, grammar_backend=None)
        defaults |= dict(
            moe_a2a_backend="none", moe_dense_tp_size=None, enable_lora=None, lora_paths=None, dp_size=1, mem_fraction_static=None
        )
        typed = {name: value for name, value in vars(self.server).items() if value is not None}
        asked = SimpleNamespace(
            **defaults | typed | dict(device=hardware.device, page_size=config.page_size, attention_backend=BACKEND_NAME)
        )
        asked.gpu_capability = hardware.capability
        refused_flags.refuse_flags(asked)
        states.refuse_states(asked, self.config, config)
        refusals.refuse_resolved(asked, self.config, config)

    def refusal(self, config: FreeKVConfig) -> Refusal | None:
        """The Refusal of the model by the server's own rules; None if it would be served."""
        with quiet():
            from sglang_freekv.scheduler_patch import refusals
        with strange(self.checkpoint.file):  # the rules hand unchecked values of the config to SGLang
            try:
                refusals.refuse_model(self.config, config.method)
            except Refusal as refusal:
                return refusal
        return None

    def kv_shape(self, config: FreeKVConfig, ranks: int = 1) -> KVShape:
        """Shape of the KV of one of ``ranks`` ranks."""
        from sglang_freekv.scheduler_patch.model_kv import kv_shape

        return kv_shape(self.config, config, self.config.num_attention_layers, ranks)

    def slot_bytes(self, ranks: int) -> int:
        """Bytes of a slot for the states of linear attention on one of ``ranks`` ranks; 0 for a model without."""
        from sglang_freekv.scheduler_patch.states import slot_bytes

        return slot_bytes(self.config, ranks)

    @cached_property
    def weights(self) -> Weights | None:
        """The sizes of all weights, from the files, else from transformers' model; None if neither tells.

        Raises:
            Refusal: a file of the weights is broken.
        """
        description, method = self.config._parse_quant_hf_config(), self.config.quantization
        element_bytes = self.dtype.itemsize
        online = method is not None and description is None
        if not online:
            stored = self.checkpoint.tensors()
            if stored is not None:
                return weights.from_files(stored, None if method else element_bytes)
            if (total := self.checkpoint.total_size()) is not None:
                return Weights(total, 0, None, "by the index of its files")
        try:
            beside = dict(self.checkpoint.quantization_files()).get("hf_quant_config.json", {})
            quantization = quantization_of(method, {**beside.get("quantization", {}), **(description or {})})
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
            return None
        try:
            with strange(self.checkpoint.file):
                parts = weights.parts_of(self._transformers_config() or self.config.hf_config)
        except Refusal:
            return None
        return None if parts is None else weights.from_parts(parts, element_bytes, quantization)

    def _transformers_config(self):
        """The config in transformers' own class; None if transformers has no such class. SGLang's class may differ.

        It includes ``--json-model-override-args``, except for rotary positions.
        """
        from transformers import AutoConfig

        if not _transformers_knows(self.checkpoint):
            return None
        config = copy.deepcopy(self.checkpoint.config)
        for name, value in json.loads(getattr(self.server, "json_model_override_args", None) or "{}").items():
            if not name.startswith("rope_"):  # it changes no weights, and transformers requires more fields in it than SGLang
                config[name] = {**config[name], **value} if isinstance(value, dict) and isinstance(config.get(name), dict) else value
        return AutoConfig.for_model(**config)

    @property
    def weight_bytes(self) -> int | None:
        return self.weights.num_bytes if self.weights else None

    def repeated_kv_bytes(self, ranks: int) -> float:
        """Bytes of key and value projections that a rank has beyond its share. With more ranks than kv heads, kv heads are repeated."""
        heads = self.config.get_num_kv_heads(ranks) - self.config.get_total_num_kv_heads() / ranks
        return 2 * heads * self.config.head_dim * self.config.hidden_size * self.config.num_attention_layers * self.dtype.itemsize

    def fits_ranks(self, ranks: int) -> bool:
        """Whether SGLang can divide the heads among ``ranks``."""
        kv_heads = self.config.get_total_num_kv_heads()
        return self.config.num_attention_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    def _expect_numbers(self) -> None:
        """Raise Refusal unless the fields from which sizes are computed are numbers within bounds."""
        config = self.config
        if not isinstance(config.dtype, torch.dtype) or not config.dtype.is_floating_point:
            raise Refusal(
                f"{self.checkpoint.file}: expected dtype, the name of a floating-point type, found {str(config.dtype)[:80]}; give the "
                "model's own"
            )
        for name, most in (("num_attention_layers", MOST_LAYERS), ("num_attention_heads", MOST_WIDTH), ("head_dim", MOST_WIDTH),
                           ("hidden_size", MOST_WIDTH), ("vocab_size", MOST_WIDTH * 64), ("context_len", 1 << 40)):  # fmt: skip
            self._expect_number(name, getattr(config, name), most)
        with strange(self.checkpoint.file):
            kv_heads = config.get_total_num_kv_heads()
        self._expect_number("num_key_value_heads", kv_heads, MOST_WIDTH)

    def _expect_number(self, name: str, value: Any, most: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise Refusal(
                f"{self.checkpoint.file}: expected {name}, a whole number of 1 to {most}, found {str(value)[:80]}; give the model's own"
            )


def _expect_marlin_takes(description: dict[str, Any], served: list[tuple[int, bool]]) -> None:
    """Raise Refusal for GPTQ weights that SGLang serves on no GPU: those of other (bits, sym) than ``served``."""
    if (found := (description.get("bits"), description.get("sym"))) not in served:
        raise Refusal(
            f"quantization_config: GPTQ with (bits, sym) {found}, expected one of {served}, which SGLang serves on a GPU; use a checkpoint "
            "with one of these, or SGLang 0.5.17"
        )


def _expect_transformers_takes(checkpoint: Checkpoint) -> None:
    """Raise Refusal if transformers knows the model type but does not accept the config. It is imported much faster than SGLang."""
    with quiet():
        from transformers import AutoConfig
    if _transformers_knows(checkpoint):
        with strange(checkpoint.file):
            AutoConfig.for_model(**json.loads(json.dumps(checkpoint.config)))


def _transformers_knows(checkpoint: Checkpoint) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return checkpoint.config.get("model_type") in CONFIG_MAPPING_NAMES


@contextmanager
def _copied(checkpoint: Checkpoint) -> Iterator[Path]:
    """A directory of the same name that holds only the files that were read and checked. SGLang opens any file that it finds there."""
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / (checkpoint.directory.name or "model")
        directory.mkdir()
        for name, content in (("config.json", checkpoint.config), *checkpoint.quantization_files()):
            (directory / name).write_text(json.dumps(content))
        yield directory
