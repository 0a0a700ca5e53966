"""What is asked: tasks x lengths x budgets, the same prompts whoever answers, and the names of results.

A result's key is ``TASK/LENGTH/BUDGET/METHOD``; dense attention has no budget, and ``all`` stands there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from benchmarks.accuracy.method import Budget
from benchmarks.accuracy.rows import DENSE
from benchmarks.needle import tasks, weights
from benchmarks.report import Report

LENGTHS, BUDGETS = (1024, 2048, 4096, 8192, 16384), (256, 512, 1024)
SLACK_TOKENS = 8  # an answer may be longer than the right one, by so many tokens
EDGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Cell:
    """Prompts of one task and length.

    Args:
        length: tokens of each prompt.
        prompts: by seed and place in this tuple; more of them begin with the same ones.
    """

    task: str
    length: int
    prompts: tuple[tasks.Prompt, ...]

    @classmethod
    def ask(cls, task: str, length: int, prompts: int, seed: int) -> Cell:
        name = zlib.crc32(task.encode())
        random = (np.random.default_rng((seed, name, length, number)) for number in range(prompts))
        return cls(task, length, tuple(tasks.make_prompt(each, task, length) for each in random))

    @cached_property
    def digest(self) -> str:
        """Of the token ids and the answers: results of different prompts are not compared."""
        said = [(list(map(int, prompt.token_ids)), list(map(int, prompt.answer_token_ids))) for prompt in self.prompts]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]

    @property
    def new_tokens(self) -> int:
        """Most that is generated for each prompt."""
        return max(len(prompt.answer_token_ids) for prompt in self.prompts) + SLACK_TOKENS

    def key(self, budget: int, method: str) -> str:
        return f"{self.task}/{self.length}/{'all' if method == DENSE else budget}/{method}"

    def batches(self, size: int) -> list[list[int]]:
        """Numbers of prompts that can be computed together: at most ``size``, of equal length."""
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        alike = [list(numbers) for _, numbers in groupby(order, key=lengths.__getitem__)]
        return [numbers[start : start + size] for numbers in alike for start in range(0, len(numbers), size)]


def score(prompt: tasks.Prompt, answer: Sequence[int]) -> float:
    """How right generated tokens are, 0 to 1."""
    return round(prompt.score(answer), 5)


def budget_of(total: int, page: int) -> Budget:
    """A quarter each for sink and window, in whole pages; a window of at least two, as servers have it."""
    quarter = total // 4 // page
    return Budget(total, sink=max(1, quarter) * page, window=max(2, quarter) * page, page=page)


def model_digest(model: Path) -> str:
    """Of a checkpoint's config, and of its weights' sizes, beginnings and ends: all of a large one takes minutes to read."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{path.name} {size}".encode())
            for start in (0, max(0, size - EDGE_BYTES)):
                file.seek(start)
                digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()[:12]


def ensure_tokenizer(model: Path) -> None:
    """Raise ValueError unless the prompts' token ids mean the same to the model."""
    if (model / "tokenizer.json").read_bytes() != (weights.MODEL / "tokenizer.json").read_bytes():
        raise ValueError(f"--model {model}: expected the tokenizer of needle/model, in which the prompts are made; train with that")


def is_done(results: dict, key: str, identity: dict) -> bool:
    """Whether a result is there that a new run would only repeat."""
    return key in results and all(results[key].get(name) == value for name, value in identity.items())


def open_report(half: str, dtype: str, options: argparse.Namespace) -> tuple[Report, dict]:
    """The file of a half's results, and what all of them have in common.

    Raises:
        ValueError: it has results of another model, which would end up in one table with these.
    """
    ensure_tokenizer(weights.ready(options.model))
    digest, report = model_digest(options.model), Report(f"{options.name}-{half}", options.out)
    if others := {result["model"] for result in report.results.values()} - {digest}:
        raise ValueError(f"{report.path} is of model {', '.join(sorted(others))}, and this is {digest}: use another --name or --out")
    common = {"half": half, "model": digest, "dtype": dtype, "prompts": options.prompts, "seed": options.seed}
    return report, common | {"dense_layers": options.dense_layers}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that both halves take."""
    parser.add_argument("--model", type=Path, default=weights.MODEL, help="checkpoint")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="TOKENS", help="of a prompt")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS), metavar="TOKENS", help="sink and window included")
    parser.add_argument("--tasks", nargs="+", default=list(tasks.TASKS), metavar="TASK", help=", ".join(tasks.TASKS))
    parser.add_argument("--prompts", type=int, default=32, help="of each task and length")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--page", type=int, default=32, help="tokens of a page")
    parser.add_argument("--dense-layers", type=int, default=1, help="first layers that attend to everything")
    parser.add_argument("--name", default="accuracy", help="results are NAME-offline.json and NAME-server.json; tables NAME.md")
    parser.add_argument("--force", action="store_true", help="measure again what is there; the earlier result is kept as superseded")
