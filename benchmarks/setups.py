"""What is served for a measurement: a model's shape, on a device, with the flags of each system."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.needle import weights
from benchmarks.profiles import BY_PRESET, LOADS
from benchmarks.replay_load import Load
from sglang_freekv.config import GIB, FreeKVConfig
from sglang_freekv.options import Options, config_from, with_kv_cache_dtype
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

HERE = Path(__file__).resolve().parent
SHAPES = tuple(sorted(path.stem for path in (HERE / "shapes").glob("*.json")))
SYSTEMS = ("stock", "freekv", "copies-off")
STOCK_PAGE = 32  # tokens of a page of stock SGLang's prefix tree
POSITIONS = "max_position_embeddings"


@dataclass(frozen=True)
class Setup:
    """Where and on what to serve.

    Args:
        shape: a file of ``shapes/``, served with dummy weights, or ``needle``.
        device: ``cuda`` or ``cpu``.
        scale: contexts are divided by this; 1 but for a dry run.
        budget: of FreeKV, in tokens.
        preset: one of ``PRESETS``. It sets what else FreeKV has, unless ``extra_freekv`` says otherwise; the default one needs no flag.
        context_length: SGLang's; page tables are as wide. The shape's positions are overridden if they are fewer.
        host_memory: GiB of FreeKV's host pool.
        max_running: requests that run at once at most, and the largest batch of the decode graphs.
        resident: whether FreeKV keeps pages on the device while there is room, as it does by default; without it all loads are of recall.
        extra_stock, extra_freekv: more flags, as typed.
        needle_model: its directory.
    """

    shape: str = "llama-3.1-8b"
    device: str = "cuda"
    scale: int = 1
    budget: int = 2048
    preset: str = "fast"
    context_length: int = 140_000
    host_memory: float = 75
    max_running: int = 16
    resident: bool = False
    extra_stock: tuple[str, ...] = ()
    extra_freekv: tuple[str, ...] = ()
    needle_model: Path = weights.MODEL

    @property
    def config_path(self) -> Path:
        return self.needle_model / "config.json" if self.shape == "needle" else HERE / "shapes" / f"{self.shape}.json"

    @property
    def config(self) -> dict:
        return json.loads(self.config_path.read_text())

    @property
    def freekv_config(self) -> FreeKVConfig:
        """The server's own, of the preset and the other settings here, and of how its further flags store KV."""
        resident, coded = None if self.resident else 0, _given("--freekv-kv-dtype", self.extra_freekv)
        asked = Options(
            kv_retrieval="freekv",
            freekv_preset=self.preset,
            freekv_budget=self.budget,
            freekv_resident_memory=resident,
            freekv_kv_dtype=coded,
        )
        return with_kv_cache_dtype(config_from(asked, None), _given("--kv-cache-dtype", self.extra_freekv))

    @property
    def page_size(self) -> int:
        """FreeKV's, in tokens."""
        return self.freekv_config.page_size

    def page_of(self, system: str) -> int:
        """Tokens of a page of a system's prefix tree."""
        return STOCK_PAGE if system == "stock" else self.page_size

    def kv_dtype_of(self, system: str) -> str:
        """How a system stores KV, by its further flags: a type of ``--kv-cache-dtype`` or ``--freekv-kv-dtype``, or auto."""
        typed = self.extra_stock if system == "stock" else self.extra_freekv
        coded = None if system == "stock" else _given("--freekv-kv-dtype", typed)
        return coded or _given("--kv-cache-dtype", typed) or FreeKVConfig().kv_dtype

    @property
    def kv_dtype(self) -> str:
        """FreeKV's."""
        return self.kv_dtype_of("freekv")

    @property
    def edge_pages(self) -> int:
        """Pages of sink and window together."""
        pages = self.freekv_config.pages
        return pages.sink + pages.window

    def load(self, corrected: float | Sequence[float], missed: float, tokens: int) -> Load:
        """A load for contexts of ``tokens``."""
        candidates = tokens // self.page_size - self.edge_pages
        return Load(corrected, missed, candidates, self.freekv_config.pages.selected)

    def named_load(self, name: str, tokens: int) -> Load:
        """A load of ``LOADS`` or ``BY_PRESET``, on the layers that FreeKV compresses by default."""
        shares = (LOADS | BY_PRESET)[name].on(self.config["num_hidden_layers"] - len(FreeKVConfig().dense_layers))
        return self.load(*shares, tokens)

    def flags(self, system: str, directory: Path) -> dict:
        """Command line of ``system``; ``directory`` receives the model's config."""
        flags = {
            "--device": self.device,
            "--random-seed": 0,
            "--page-size": self.page_of(system),
            "--max-running-requests": self.max_running,
            "--chunked-prefill-size": 8192 // self.scale,
            "--context-length": self.context_length // self.scale,
        }
        if flags["--context-length"] > self.config[POSITIONS]:
            flags |= {"--json-model-override-args": json.dumps({POSITIONS: flags["--context-length"]}, separators=(",", ":"))}
        if self.shape == "needle":
            flags |= {"--model-path": weights.ready(self.needle_model)}
        else:
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.config_path, directory / "config.json")
            flags |= {"--model-path": directory, "--load-format": "dummy", "--skip-tokenizer-init": True}
        if self.device == "cpu":
            flags |= {"--dtype": "float32", "--max-total-tokens": 65536, "--sleep-on-idle": True}
        else:
            flags |= {"--dtype": "bfloat16", "--sampling-backend": "pytorch"}
            flags |= {"--mem-fraction-static": 0.8, "--cuda-graph-max-bs-decode": self.max_running}
        if system == "stock" and self.device == "cpu":  # its allocator of larger pages is a Triton kernel
            return flags | {"--attention-backend": "torch_native", "--page-size": 1}
        if system == "stock":
            return flags | {"--attention-backend": "flashinfer"}
        if self.preset == DEFAULT_PRESET:  # whose page size is that of a user who types none
            del flags["--page-size"]
        return flags | self._retrieval_flags()

    def _retrieval_flags(self) -> dict:
        flags = {"--kv-retrieval": "freekv"}
        if self.preset != DEFAULT_PRESET:
            flags |= {"--freekv-preset": self.preset, "--freekv-budget": self.budget}
        elif self.budget != PRESETS[DEFAULT_PRESET].budget_tokens:
            flags |= {"--freekv-budget": self.budget}
        flags |= {} if self.resident else {"--freekv-resident-memory": 0}
        return flags | ({"--freekv-host-memory": self.host_memory} if self.device == "cuda" else {})


def hicache_flags(setup: Setup) -> dict:
    """What gives stock SGLang its hierarchical cache, with at most the host memory that FreeKV has. SGLang counts it in 10^9 bytes."""
    return {"--enable-hierarchical-cache": True, "--hicache-size": int(setup.host_memory * GIB / 1e9)}


def _given(flag: str, typed: Sequence[str]) -> str | None:
    """The value of ``flag`` among flags as typed; None if it is not there."""
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    return parser.parse_known_args(typed)[0].value


def words(flags: dict) -> list[str]:
    """A command line of ``{"--name": value}``; True is a flag without a value."""
    return [word for name, value in flags.items() for word in ([name] if value is True else [name, str(value)])]
