"""Writes the file of --freekv-tau-by-layer for a model: thresholds that correct more where selections really change.

    python -m benchmarks.calibrate_tau --model MODEL --corrected 0.13 --out tau.json [--device cuda] [--text FILE ...]

Texts are prefilled densely but for their last tokens. FreeKV then reads these one by one and corrects always. Each sample is a kv head in a
step: its cosine, and how much more of dense attention its new selection holds than the one made a step ago.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.accuracy import thresholds
from benchmarks.accuracy.forced import joined
from benchmarks.accuracy.gains import Gains
from benchmarks.accuracy.method import Budget
from benchmarks.accuracy.methods.freekv import FreeKV
from benchmarks.accuracy.methods.full import Full
from benchmarks.accuracy.model import OfflineModel
from benchmarks.accuracy.run import DTYPES
from benchmarks.accuracy.texts import Document, documents
from benchmarks.report import say
from sglang_freekv.config import FreeKVConfig, Refusal
from sglang_freekv.options import Options, config_from
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS


def texts_of(options: argparse.Namespace) -> list[Document]:
    """The user's texts, or the first of those that come with Python."""
    if options.text is None:
        return documents(options.documents)
    return [Document(path.name, _text(path)) for path in options.text]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path}: expected UTF-8, found other bytes ({error.reason} at {error.start}); use a text") from None


def config_of(options: argparse.Namespace) -> FreeKVConfig:
    """The server's settings, of which digests, pooling, hysteresis and sizes are taken."""
    asked = Options(kv_retrieval="freekv", freekv_preset=options.preset, freekv_budget=options.budget)
    return config_from(asked, options.page_size)


def expect_sense(options: argparse.Namespace, config: FreeKVConfig) -> None:
    """Raise ValueError for options by which nothing could be measured, or not be written, before any model is loaded."""
    if not (0 < options.corrected < 1 and 0 < options.steps < options.length - config.budget_tokens):
        raise ValueError(
            f"--corrected {options.corrected:g}, --length {options.length}, --steps {options.steps}: expected a share between 0 and 1, and a "
            f"length above the budget of {config.budget_tokens} and the steps; use for example --corrected 0.13 --length 8192 --steps 128"
        )
    if options.batch < 1:
        raise ValueError(f"--batch {options.batch}: expected at least 1; use 4")
    if options.out.is_dir() or not os.access(options.out if options.out.exists() else options.out.parent, os.W_OK):
        raise ValueError(f"--out {options.out}: expected a file that can be written, found none; use one in a folder that is there")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: expected a GPU, found none; use --device cpu")


def expect_model(model: OfflineModel, options: argparse.Namespace, config: FreeKVConfig) -> None:
    """Raise ValueError for a model that has no such context, or no layer to measure."""
    if options.length > (window := model.config.max_position_embeddings):
        raise ValueError(f"--length {options.length}: expected at most {window}, the context of the model; use --length {window} or less")
    if not set(range(model.layers)) - set(config.dense_layers):
        raise ValueError(f"--model {options.model}: expected layers behind the dense one, found {model.layers} in all; use another model")


def samples_of(model: OfflineModel, token_ids: torch.Tensor, config: FreeKVConfig, steps: int, batch: int) -> dict[int, torch.Tensor]:
    """Of each retrieval layer ``[N, 2]``: cosine and gain, of the last ``steps`` of texts ``[documents, length]``."""
    budget = Budget(config.budget_tokens, config.sink_tokens, config.window_tokens, config.page_size)
    gains = Gains(FreeKV(digest=config.digest, pooling=config.pooling, hysteresis=config.hysteresis))
    methods = [Full() if layer in config.dense_layers else gains for layer in range(model.layers)]
    for number, part in enumerate(token_ids.split(batch), start=1):
        prefilled = joined([model.prefill(text[None, :-steps], gains.prompt_queries) for text in part])
        for _ in model.follow(prefilled, methods, budget, part[:, -steps:]):
            pass
        say(f"{min(number * batch, len(token_ids))} of {len(token_ids)} texts")
    samples = {layer: torch.cat(each) for layer, each in sorted(gains.samples.items())}
    for layer, found in samples.items():
        if not found.isfinite().all():
            raise ValueError(f"layer {layer}: expected finite cosines and gains, found others; use another --dtype")
    return samples


def table(samples: dict[int, torch.Tensor], taus: dict[int, float]) -> str:
    rows = ["| layer | median cosine | gain of correcting | tau | corrected |", "|---|---|---|---|---|"]
    for layer, each in samples.items():
        share = (each[:, 0] < taus[layer]).double().mean().item()
        rows.append(f"| {layer} | {each[:, 0].median():.3f} | {each[:, 1].mean():.4f} | {taus[layer]:.3f} | {share:.2f} |")
    return "\n".join(rows)


def calibrate(options: argparse.Namespace) -> None:
    """Measure, write the file, and print the thresholds by layer.

    Raises:
        Refusal, ValueError, OSError: the options, the model or the texts do not fit together.
    """
    config = config_of(options)
    expect_sense(options, config)
    chosen = texts_of(options)
    model, tokenizer = OfflineModel(options.model, options.device, DTYPES[options.dtype]), AutoTokenizer.from_pretrained(options.model)
    expect_model(model, options, config)
    token_ids = torch.tensor([each.token_ids(tokenizer, options.length) for each in chosen], device=options.device)
    samples = samples_of(model, token_ids, config, options.steps, options.batch)
    each = list(samples.values())
    taus = dict(zip(samples, thresholds.taus_of(each, options.corrected)))
    share, gain = thresholds.kept(each, list(taus.values()))
    cosines = torch.cat(each)[:, 0]
    one = thresholds.tau_of(cosines, round(share * len(cosines)))
    same = thresholds.kept(each, [one] * len(each))
    print(table(samples, taus))
    print(f"{share:.3f} of the kv heads are corrected, which keeps {gain:.2f} of what correcting always gains.")
    print(f"One threshold for all layers, {one:.3f}, corrects {same[0]:.3f} and keeps {same[1]:.2f}.")
    made = {name: getattr(options, name) for name in ("corrected", "length", "steps")} | {"texts": [text.name for text in chosen]}
    made |= {"page_size": config.page_size, "budget_tokens": config.budget_tokens, "digest": config.digest, "preset": config.preset}
    held = {"model": model.config.architectures[0], "tau": [taus.get(layer) for layer in range(model.layers)], "made": made}
    options.out.write_text(json.dumps(held, indent=1) + "\n")
    print(f"{options.out} is written: --freekv-tau-by-layer {options.out}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--model", type=Path, required=True, help="a checkpoint with its tokenizer")
    made.add_argument("--corrected", type=float, default=0.13, metavar="SHARE", help="of kv heads, in the mean over layers; at most")
    made.add_argument("--out", type=Path, required=True, metavar="FILE")
    made.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="texts, each of --length tokens at least; without, Python's own")
    made.add_argument("--documents", type=int, default=8, help="of Python's own texts")
    made.add_argument("--length", type=int, default=8192, metavar="TOKENS", help="of each text, the last --steps included")
    made.add_argument("--steps", type=int, default=128, metavar="TOKENS", help="of each text that are read one by one")
    made.add_argument("--batch", type=int, default=4, help="texts that are followed together")
    made.add_argument("--preset", choices=tuple(PRESETS), default=DEFAULT_PRESET, help="that the server has")
    made.add_argument("--budget", type=int, metavar="TOKENS", help="that the server has; without, the preset's")
    made.add_argument("--page-size", type=int, metavar="TOKENS", help="that the server has; without, the preset's")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    made.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    return made


def main() -> int:
    try:
        calibrate(parser().parse_args())
    except (Refusal, ValueError, OSError) as error:
        raise SystemExit(f"error: {' '.join(str(error).split())}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
