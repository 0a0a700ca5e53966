"""What is served for a measurement: a model's shape, on a device, with the flags of each system."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.needle import weights
from benchmarks.profiles import LOADS
from benchmarks.replay_load import Load
from sglang_freekv.config import FreeKVConfig

HERE = Path(__file__).resolve().parent
SHAPES = tuple(sorted(path.stem for path in (HERE / "shapes").glob("*.json")))
SYSTEMS = ("stock", "freekv", "copies-off")


@dataclass(frozen=True)
class Setup:
    """Where and on what to serve.

    Args:
        shape: a file of ``shapes/``, served with dummy weights, or ``needle``.
        device: ``cuda`` or ``cpu``.
        scale: contexts are divided by this; 1 but for a dry run.
        budget, page_size: of FreeKV, in tokens. What else a preset sets is that of ``fast``, unless ``extra_freekv`` says otherwise.
        context_length: SGLang's; page tables are as wide.
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
    page_size: int = 32
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
    def kv_dtype(self) -> str:
        """FreeKV's ``--freekv-kv-dtype``, as given among its flags."""
        parser = ArgumentParser(allow_abbrev=False)
        parser.add_argument("--freekv-kv-dtype", default=FreeKVConfig().kv_dtype)
        return parser.parse_known_args(self.extra_freekv)[0].freekv_kv_dtype

    @property
    def edge_pages(self) -> int:
        """Pages of sink and window together, by the preset fast."""
        return 2 * (min(512, self.budget // 4) // self.page_size)

    def load(self, corrected: float | Sequence[float], missed: float, tokens: int) -> Load:
        """A load for contexts of ``tokens``."""
        candidates = tokens // self.page_size - self.edge_pages
        return Load(corrected, missed, candidates, self.budget // self.page_size - self.edge_pages)

    def named_load(self, name: str, tokens: int) -> Load:
        """A load of ``LOADS``, on the layers that FreeKV compresses by default."""
        shares = LOADS[name].on(self.config["num_hidden_layers"] - len(FreeKVConfig().dense_layers))
        return self.load(*shares, tokens)

    def flags(self, system: str, directory: Path) -> dict:
        """Command line of ``system``; ``directory`` receives the model's config."""
        flags = {
            "--device": self.device,
            "--random-seed": 0,
            "--page-size": self.page_size,
            "--max-running-requests": self.max_running,
            "--chunked-prefill-size": 8192 // self.scale,
            "--context-length": self.context_length // self.scale,
        }
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
        flags |= {"--kv-retrieval": "freekv", "--freekv-preset": "fast", "--freekv-budget": self.budget}
        flags |= {} if self.resident else {"--freekv-resident-memory": 0}
        return flags | ({"--freekv-host-memory": self.host_memory} if self.device == "cuda" else {})


def words(flags: dict) -> list[str]:
    """A command line of ``{"--name": value}``; True is a flag without a value."""
    return [word for name, value in flags.items() for word in ([name] if value is True else [name, str(value)])]
