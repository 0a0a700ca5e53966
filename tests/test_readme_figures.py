"""The README's figures of speed are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DEFAULT, FAST, STOCK = "freekv-default", "freekv-resident-tau-0.9-by-layer", "stock-fa3"
CONTEXTS, BATCHES = ("2k", "8k", "32k", "128k"), (1, 4, 16, 64)


def results(suffix: str = "") -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"paper-crossover-llama-3.1-8b{suffix}.json").read_text())["results"]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def row(start: str) -> list[str]:
    """Cells of the one row that begins so, behind its first cell."""
    [line] = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    return cells_of(line)[1:]


def ratio(system: str, cell: str, figure: str = "tpot_s") -> float:
    ours, theirs = (results()[f"{name}/{cell}"][figure] for name in (system, STOCK))
    return ours["median"] / theirs["median"] if isinstance(ours, dict) else ours / theirs


def emphasised(value: float) -> str:
    """Bold if FreeKV is slower by what is shown."""
    return f"**{value:.2f}**" if round(value, 2) > 1 else f"{value:.2f}"


@pytest.mark.parametrize("system, named", [(DEFAULT, "`accurate`, the default"), (FAST, "`fast`")])
def test_times_per_token(system, named):
    lines = README.splitlines()
    first = lines.index(next(line for line in lines if line.startswith(f"| {named} | 2K |")))
    for context, line in zip(CONTEXTS, lines[first : first + len(CONTEXTS)], strict=True):
        cells = [f"{context}/b{batch}" for batch in BATCHES]
        told = [emphasised(ratio(system, cell)) if f"{system}/{cell}" in results() else "" for cell in cells]
        assert cells_of(line)[1:] == [context.upper(), *told]


def test_times_of_the_presets():
    for preset, system in (("accurate", DEFAULT), ("fast", FAST)):
        times = [f"{results()[f'{system}/32k/b{batch}']['tpot_s'] * 1e3:.2f}" for batch in (1, 4, 16)]
        assert row(f"`--freekv-preset {preset}`")[2:5] == times


def test_divergences_of_the_presets():
    found = json.loads((ROOT / "benchmarks" / "results" / "real.json").read_text())["results"]

    def kl(length: int, method: str) -> str:
        return f"{fmean(found[f'{length}/512/{method}']['kl']):.4f}"[1:]

    for preset, method in (("accurate", "freekv-accurate"), ("fast", "freekv")):
        assert row(f"`--freekv-preset {preset}`")[0] == kl(4096, method)
    assert f"At 8,192 tokens it is {kl(8192, 'freekv-accurate')}, and with `fast` **{kl(8192, 'freekv')}**." in README


def test_the_first_table():
    assert row("time per token, less is better") == [f"{ratio(DEFAULT, '128k/b4'):.2f}; {ratio(DEFAULT, '32k/b16'):.2f}"]
    assert row("time per token, 64") == [f"**{ratio(DEFAULT, '2k/b64'):.2f}, slower**"]
    ours, theirs = (results("-same-kv")[f"{system}/32k/b30"] for system in ("freekv-same-kv", "stock-same-kv-hicache"))
    rates = [f"{ours[rate] / theirs[rate]:.1f}" for rate in ("decoding_tokens_per_s", "tokens_per_s")]
    assert row("tokens/s of 30 prompts") == [f"{'; '.join(rates)} (preset `fast`)"]


def test_first_tokens():
    """Of all cells that hit, and of those that are cold, from the least to the most."""
    found = {"hit": [], "cold": []}
    for key, result in results().items():
        system, _, cell = key.partition("/")
        if system == DEFAULT:
            found[result["prefix"]].append(ratio(DEFAULT, cell, "ttft_s"))
    cold, hit = ([f"{value:.2f}" for value in (min(found[prefix]), max(found[prefix]))] for prefix in ("cold", "hit"))
    assert row("time to the first token") == [f"**{cold[0]} to {cold[1]}**; {hit[0]} to **{hit[1]}**"]
    [told] = row("first token of a hit, prefix resident")
    assert told.startswith(f"{hit[0]} to {hit[1]} times")
    for cell, words in {
        "8k/b1": "one of 8K {} ms instead of {}",
        "128k/b1": "of 128K {} instead of {}",
        "2k/b16": "at once {} instead of {}",
    }.items():
        assert words.format(*(f"{results()[f'{name}/{cell}']['ttft_s']['median'] * 1e3:.0f}" for name in (DEFAULT, STOCK))) in told


def test_whole_runs():
    [told] = row("whole runs")
    rates = {"64 prompts of 2K": "2k/b64", "64 of 8K": "8k/b64", "16 of 32K": "32k/b16", "4 of 128K": "128k/b4"}
    for words, cell in rates.items():
        ours, theirs = (results()[f"{name}/{cell}"]["tokens_per_s"] for name in (DEFAULT, STOCK))
        assert re.search(rf"{words}: \**{ours:,.0f} / {theirs:,.0f}", told)


@pytest.mark.parametrize("sent, again", [("sent first", ""), ("sent again", "-again")])
def test_thirty_prompts_with_little_memory(sent, again):
    ours, theirs = (results("-same-kv")[f"{system}/32k/b30{again}"] for system in ("freekv-same-kv", "stock-same-kv-hicache"))
    rates = [f"{ours[rate]:,.0f} / {theirs[rate]:,.0f}" for rate in ("decoding_tokens_per_s", "tokens_per_s")]
    waits = f"{ours['ttft_s']['median']:.1f} / {theirs['ttft_s']['median']:.1f}"
    assert row(sent) == [*rates, waits, f"{ours['tpot_s'] * 1e3:.1f} / {theirs['tpot_s'] * 1e3:.1f}"]
    assert (ours["at_once"], theirs["at_once"]) in ((29, 3), (30, 3))
