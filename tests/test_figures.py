"""The page of the papers' figures: what is made of results, and that the page in docs is made of those that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.accuracy import systems
from benchmarks.accuracy.page import filled
from benchmarks.paper import crossover, figures, goodput, papers, plots
from benchmarks.paper.papers import published
from benchmarks.paper.papers.speed import Speed
from benchmarks.paper.scenarios import SCENARIOS
from benchmarks.paper.sections import SECTIONS
from benchmarks.paper.sections.names import METHODS
from benchmarks.paper.sections.section import Aim
from benchmarks.paper.takeaways import takeaways

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAPERS = ROOT / "benchmarks" / "results", ROOT / "docs" / "papers.md"

RUN = {"command": "python3 -m benchmarks.paper.latency", "device": "a device", "ceilings": {"to_device": 10.0, "device": 100.0}}


def moved(link: float) -> dict:
    return {"link": link, "device": 0.5, "weights": 0.5}


def step(seconds: float, **more) -> dict:
    return {"seconds": {"median": seconds}, "bytes": moved(0.0), "corrected": 0.5, "missed": 0.25, "context": 32768, "run": 0} | more


def write(directory: Path, name: str, results: dict, suffix: str = "", **facts) -> Path:
    path = directory / f"paper-{name}-llama-3.1-8b{suffix}.json"
    path.write_text(json.dumps({"runs": [RUN | facts], "results": results}))
    return path


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are files without content: drawing takes seconds, and others draw."""
    for name in ("bars", "stacks", "curves"):
        monkeypatch.setattr(plots, name, lambda path, *arguments, **options: path.touch())


@pytest.fixture
def latency(tmp_path):
    contexts = {name: scenario.at for name, scenario in SCENARIOS.items()}
    seconds = {"window": 1.0, "arkvale": 12.0, "infinigen": 4.4, "freekv": 1.1}
    results = {
        f"{scenario}/b{batch}/{method}/{context}": step(each, bytes=moved(float(method == "freekv")), without_copies={"median": 0.9 * each})
        for scenario, those in contexts.items()
        for context in those
        for batch in (1, 4, 8, 16)
        for method, each in seconds.items()
    }
    return write(tmp_path, "latency", results | {"prefill/32768": {"seconds": {"median": 2.0}, "run": 0}})


def test_a_section_has_what_was_measured(latency, tmp_path):
    section = SECTIONS["latency"](latency, tmp_path)
    text = section.markdown
    whole = [f"{(2 * batch + 511 * 12) / (2 * batch + 511 * 1.1):.2f}" for batch in (1, 4, 8, 16)]  # prompts of two seconds each
    assert f"| ArkVale | {' | '.join(f'12000.00 (10.91 / {ratio})' for ratio in whole)} |" in text
    assert f"| ArkVale {'| 12000.00 (10.91 / -) ' * 4}|" in text, "a scenario whose prefill was not measured"
    assert "8.00 s at batch 4, 16.00 s at batch 8" in text and "Replayed: c 0.5; x 0.25 at 32,768 tokens." in text
    assert "| FreeKV | 1100.00 | 990.00 | 0.00 | 110.00 | 0.00 | 100.00 | 11 |" in text  # a step faster than a window's has no selection
    assert f"| Long input {'| 1.10 (1.05) ' * 4}|" in text  # behind a window's step half of the link's 0.1 s
    assert "At batch 16 the link is busy for up to 100.00 ms of a step, and a window's step takes 1000.00 ms. Recall can hide" in text
    assert "RazorAttention" not in text
    assert section.sources == [(latency.stem, "`python3 -m benchmarks.paper.latency`", "a device", None, None)]
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(pictures) == 6 and all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_aims_are_held_against_the_worst(latency, tmp_path, undrawn):
    rows = {row[0].removeprefix("Llama-3.1-8B: "): row[1:] for row in (aim.row for aim in SECTIONS["latency"](latency, tmp_path).aims)}
    serial = pytest.approx(1.05)  # behind a window's step half of the link's 0.1 s
    for scenario in ("long-input at tau 0.8", "long-generation at tau 0.9", "long-both at tau 0.9"):
        assert rows[f"FreeKV / a window alone, {scenario}, worst of batches up to 8"] == (pytest.approx(1.1), "at most 1.15", "yes", serial)
    of = "long generation, least of batches from 4"
    assert rows[f"ArkVale / FreeKV, {of}"][2] == "yes"
    assert rows[f"InfiniGen / FreeKV, {of}"] == (pytest.approx(4), "at least 5", "NO", pytest.approx(4.4))
    assert rows[f"ShadowKV / FreeKV, {of}"] == (None, "at least 5", None, None)
    results = json.loads(latency.read_text())["results"]
    del results["long-both/b8/freekv/40960"], results["long-generation/b16/arkvale/600"]
    fewer = SECTIONS["latency"](write(tmp_path, "latency", results), tmp_path).aims
    assert [aim.found is None for aim in fewer[:4]] == [False, False, True, True], "held against a part"


@pytest.mark.parametrize("found, least, reached", [(4.9, False, "yes"), (5.1, False, "NO"), (5.1, True, "yes"), (4.9, True, "NO")])
def test_an_aim_is_reached_or_not(found, least, reached):
    assert Aim("it", found, 5, least).row[3] == reached and Aim("it", 5.0, 5, least).row[3] == "yes"


def test_an_ablation_is_held_against_the_whole(tmp_path):
    path = write(tmp_path, "ablation", {"32768/b4/base": step(10.0), "32768/b4/+graph": step(2.0), "32768/b1/base": step(8.0)})
    text = SECTIONS["ablation"](path, tmp_path).markdown
    assert "one copy at a time | 8000.00 | - | 800 | 10000.00 | 5.00 | 1000 |" in text
    assert "| + one CUDA graph: FreeKV | - | - | - | 2000.00 | 1.00 | 200 |" in text


def served(context: int, batch: int, tpot: float, rate: float, **more) -> dict:
    cell = {"context": context, "batch": batch, "prefix": "cold"}
    rates = {"new_tokens": 10, "tokens_per_s": rate / 2, "decoding_tokens_per_s": rate, "at_once": batch}
    times = {"tpot_s": tpot, "ttft_s": {"median": tpot * 10}, "hbm_bytes": 1.0, "link_bytes": 0.5, "device_kv_bytes": 16 << 30}
    return {"cell": cell, "prefix": "cold", "run": 0} | rates | times | more


def test_where_freekv_is_slower_comes_first(tmp_path):
    results = {
        "stock/8k/b1": served(8192, 1, 0.01, 100),
        "freekv/8k/b1": served(8192, 1, 0.02, 50),
        "stock/32k/b8": served(32768, 8, 0.4, 20),
        "freekv/32k/b8": served(32768, 8, 0.2, 40),
        "stock-same-kv/32k/b8": served(32768, 8, 0.4, 10, device_kv_bytes=15 << 30),
        "freekv-same-kv/32k/b8": served(32768, 8, 0.2, 60),
        "stock-same-kv/128k/b1": {"cell": {"context": 131072, "batch": 1, "prefix": "cold"}, "prefix": "no room", "at_once": 0, "run": 0},
    }
    server = {"server stock-same-kv": {"max_total_num_tokens": 131072}}
    section = SECTIONS["crossover"](write(tmp_path, "crossover", results, **server), tmp_path)
    text = section.markdown
    slower, faster = "| 8k/b1 | TPOT+TTFT | cold | 20.00 / 10.00 | 2.00 |", "| 32k/b8 | - | cold | 200.00 / 400.00 | 0.50 |"
    assert text.index(slower) < text.index(faster) and "take 16.00 GiB for FreeKV and 15.00 GiB for stock SGLang. Nothing is" in text
    assert "| 2.00 / 4.00 | 0.50 | 20 / 10 | 40 / 20 | 8 / 8 | 4.00 / 8.00 |" in text  # the link takes 0.05 s
    assert "with 10 new tokens and a page needs 42 more" in text  # than the pool of 131,072 holds, with a page of 32
    assert "| 128k/b1 | - | no room |" in text and {path.name for path in tmp_path.glob("*.png")} == {
        f"paper-crossover-llama-3.1-8b-{name}.png" for name in ("production", "same")
    }
    assert [aim.row[1:4] for aim in section.aims] == [(2, "at most 1.05", "NO"), (6, "at least 5", "yes"), (6, "at least 5", "yes")]
    assert [aim.possible for aim in section.aims] == pytest.approx([5, 24, 6 * (8 / 30) / (8 / 30 - 0.15)])  # the link takes 0.05 s


@pytest.mark.parametrize("frames, told", [(64 * 32, "Nothing is resident in FreeKV's in 8k/b1."), (65 * 32, "FreeKV's pages stay there")])
def test_where_pages_could_not_stay_is_told(tmp_path, undrawn, frames, told):
    server = {"device_rows": 3, "device_cache_tokens": 16 * 32, "frame_tokens": frames}
    results = {"freekv-same-kv/32k/b8": served(32768, 8, 0.2, 60, run=1), "freekv-same-kv/8k/b1": served(8192, 1, 0.2, 60)}
    results |= {key.replace("freekv", "stock"): each for key, each in results.items()}
    path = write(tmp_path, "crossover", results, **{"server freekv-same-kv": {"freekv": server}})
    written = json.loads(path.read_text())
    roomy = {"server freekv-same-kv": {"freekv": server | {"frame_tokens": 99 * 32}}}
    path.write_text(json.dumps(written | {"runs": [*written["runs"], written["runs"][0] | roomy]}))
    assert f"stock SGLang. {told}" in SECTIONS["crossover"](path, tmp_path).markdown


def test_residency_is_told_by_load_and_beside_its_aims(tmp_path, undrawn):
    load = "freekv-resident-tau-0.9-by-layer"
    results = {
        f"{load}/8k/b16": served(8192, 16, 0.01, 100, prefix="hit", ttft_s={"median": 0.2}),
        f"{load}/8k/b1": served(8192, 1, 0.01, 100, prefix="hit", ttft_s={"median": 0.1}),
        "stock-fa3/8k/b16": served(8192, 16, 0.02, 100, prefix="hit", ttft_s={"median": 0.1}),
        "stock-flashinfer/8k/b16": served(8192, 16, 0.03, 100, prefix="hit", ttft_s={"median": 0.3}),
        "stock-flashinfer/8k/b1": served(8192, 1, 0.01, 100, prefix="hit", ttft_s={"median": 0.1}),
        "stock-flashinfer/32k/b1": served(32768, 1, 0.01, 100),
    }
    section = SECTIONS["crossover"](write(tmp_path, "crossover", results), tmp_path)
    text = section.markdown
    assert "### Resident, tau-0.9-by-layer, on a device against the faster of FlashAttention 3 and FlashInfer" in text
    assert "c 0.39 to 0.98 by layer, x 0.175" in text and "32k" not in text
    assert "| 8k/b16 | TTFT | hit | 10.00 / 20.00 | 0.50 | 0.20 / 0.10 | 2.00 |" in text and "| stock-fa3 |" in text
    assert [aim.row[1:4] for aim in section.aims] == [
        (1.0, "at most 1", "yes"),
        (0.5, "at most 0.55", "yes"),
        (1.0, "at most 1.5", "yes"),
        (2.0, "at most 1.5", "NO"),
    ]
    [server] = section.facts["servers"].values()
    assert server["resident"] and server["slowest"].tpot[2] == 1.0
    assert "The last column names the backend" in text and "joined by straight lines" not in text


def test_the_default_preset_has_a_part_of_its_own_and_takeaways_tell_of_it_first(tmp_path, undrawn):
    """With the span of its ratios, and of another type of KV."""
    spread = {"passes": [{}] * 3, "spread": {"tpot_s": [0.009, 0.012]}}
    results = {
        "freekv-default/8k/b1": served(8192, 1, 0.01, 100, prefix="hit", ttft_s={"median": 0.2}, **spread),
        "stock-fa3/8k/b1": served(8192, 1, 0.02, 50, prefix="hit", kv_dtype="fp8_e4m3", passes=[{}] * 2, spread={"tpot_s": [0.02, 0.02]}),
        "freekv-default/32k/b4": served(32768, 4, 0.03, 100, prefix="hit", **spread),
        "stock-fa3/32k/b4": served(32768, 4, 0.02, 50, prefix="hit", kv_dtype="fp8_e4m3"),
        "stock-flashinfer/8k/b16": served(8192, 16, 0.01, 100),
        "freekv-resident-tau-0.9-by-layer/8k/b1": served(8192, 1, 0.05, 100, prefix="hit"),
    }
    section = SECTIONS["crossover"](write(tmp_path, "crossover", results), tmp_path)
    default, text = section.markdown.split("### Resident, tau-0.9-by-layer, on a device against FlashAttention 3\n")
    assert text.endswith("![resident](paper-crossover-llama-3.1-8b-resident.png)")
    text = default.split("### Default preset, on a device against FlashAttention 3\n")[1]
    assert "FreeKV has its default preset `accurate`, with pages of 8 tokens. It replays c 0.01 to 0.81 by layer, x 0.098." in text
    assert "| 8k/b1 | - | hit | 10.00 / 20.00 | 0.50 (0.45-0.60) |" in text and "medians of 2 to 3 passes" in text
    assert "Prompts that hit were sent 9 to 11 times." in text
    assert "| 32k/b4 | TPOT+TTFT | hit | 30.00 / 20.00 | 1.50 |" in text and "8k/b16" not in text
    assert "Stock SGLang stores KV in fp8_e4m3." in text and "FreeKV stores" not in text
    assert text.rstrip().endswith("![default](paper-crossover-llama-3.1-8b-default.png)")
    told = figures.page([section])
    where = "KV in 8 bits on a device against FlashAttention 3."
    assert (
        f"Its time per token over stock SGLang's is 0.50 at 8K with the default preset and {where}" in told
        and "2.50 at 8K with" not in told
    )
    against = "KV in 8 bits | resident | on a device against FlashAttention 3 |"
    assert f"| default preset and {against} 0.50 | 1.50: 4 of 32K | 0.50: 1 of 8K | 1.00 to 1.50 | - |" in told
    assert f"| `fast` and {against} 2.50 | 2.50: 1 of 8K | 2.50: 1 of 8K |" in told
    assert "32K a token takes 1.50 times as long with the default preset and KV in 8 bits on a device against FlashAttention 3." in told
    assert "## Against stock SGLang, on a device, KV in 8 bits: " in told
    for system in ("freekv-default", "stock-fa3"):
        results[f"{system}/1k/b4"] = results[f"{system}/32k/b4"] | {"cell": {"context": 1024, "batch": 4, "prefix": "hit"}}
        results[f"{system}/16k/b4"] = results[f"{system}/32k/b4"] | {"cell": {"context": 16384, "batch": 4, "prefix": "hit"}}
    told = figures.page([SECTIONS["crossover"](write(tmp_path, "crossover", results), tmp_path)])
    assert "Over a long answer to a short prompt, summed from timed steps, it is 1.50 with 4 requests at once there." in told


def test_a_cache_on_the_host_is_shown_where_both_sides_were_measured(tmp_path, monkeypatch):
    """A second visit is no point of a curve."""
    lines: dict = {}
    monkeypatch.setattr(plots, "curves", lambda path, told, x, unit, drawn, *others, **options: lines.update(drawn))
    results = {
        f"{system}/8k/b64{again}": served(8192, 64, tpot, 100, prefix=prefix)
        for system, tpot in (("freekv-same-kv", 0.01), ("stock-same-kv", 0.02), ("freekv-default-same-kv", 0.04))
        for again, prefix in (("", "cold"), ("-again", "hit"))
    }
    text = SECTIONS["crossover"](write(tmp_path, "crossover", results), tmp_path).markdown
    assert "HiCache" not in text and "The prompts of 8k/b64-again were sent a second time." in text
    results |= {key.replace("kv/", "kv-hicache/"): each for key, each in results.items() if key.startswith("stock")}
    section = SECTIONS["crossover"](write(tmp_path, "crossover", results), tmp_path)
    titles = [line for line in section.markdown.splitlines() if line.startswith("### ")]
    assert [title.split(", on a device")[0] for title in titles] == [
        "### Same KV bytes on the device",
        "### Same KV bytes on the device, HiCache",
        "### Same KV bytes on the device, HiCache, default preset",
    ]
    hicache, default = section.markdown.split("### Same KV bytes on the device, HiCache")[1:]
    assert (
        "with `--enable-hierarchical-cache`" in hicache
        and "default preset" not in hicache
        and "| 8k/b64-again | - | hit | 10.00 / 20.00 |" in hicache
    )
    assert "its default preset `accurate`" in default and "| 8k/b64-again | TPOT+TTFT | hit | 40.00 / 20.00 | 2.00 |" in default
    assert ["HiCache" in aim.what for aim in section.aims] == [False, False, True, True], "of the default preset there is none"
    assert section.facts["memory"] == "with `fast` on a device against stock SGLang with HiCache" and section.facts["evicted"] == [0.5]
    alone = {key: each for key, each in results.items() if not key.startswith(("stock-same-kv/", "freekv-default"))}
    section = SECTIONS["crossover"](write(tmp_path, "crossover", alone), tmp_path)
    assert [line.split(",")[1] for line in section.markdown.splitlines() if line.startswith("### ")] == [" HiCache"]
    assert lines == {("FreeKV", "8K"): [(64, 100)], ("stock SGLang", "8K"): [(64, 100)]}


def test_long_answers_are_told_of_resident_pages_and_of_the_backend_that_ran(tmp_path, undrawn):
    results = {
        f"{system}/{context // 1024}k/b4": served(context, 4, tpot, 100)
        for system, tpot in (("freekv-resident-tau-0.9-by-layer", 0.01), ("stock-flashinfer", 0.02))
        for context in (1024, 16384)
    }
    section = SECTIONS["crossover"](write(tmp_path, "crossover", results), tmp_path)
    assert "### Resident, tau-0.9-by-layer, on a device against FlashInfer\n" in section.markdown
    assert "| 4 | 1K, 16K | 10.00 / 20.00 | 0.50 |" in section.markdown
    results |= {key.replace("b4", "b1"): served(each["cell"]["context"], 1, 0.01, 100) for key, each in results.items()}
    section = SECTIONS["crossover"](write(tmp_path, "crossover", results), tmp_path)
    assert (
        "Over a long answer to a short prompt, summed from timed steps, it is 1.00 with 1, 0.50 with 4 requests at once there."
        in figures.page([section])
    )
    tokens = 16984  # of a long answer and its prompt: a batch that no pool holds would not decode at once
    for pool, batches in {4 * tokens: {1: 1.0, 4: 0.5}, 4 * tokens - 1: {1: 1.0}}.items():
        told = {"server stock-flashinfer": {"max_total_num_tokens": 1 << 20}, "server freekv-resident": {"max_total_num_tokens": pool}}
        section = SECTIONS["crossover"](write(tmp_path, "crossover", results, **told), tmp_path)
        assert [server["longer"] for server in section.facts["servers"].values()] == [batches]


def test_a_backend_that_is_slower_everywhere_is_named_and_gives_no_figure(tmp_path, undrawn):
    cell = served(8192, 64, 0.02, 100)
    results = {
        "freekv-resident-tau-0.9-by-layer/8k/b64": served(8192, 64, 0.01, 100),
        "stock-fa3/8k/b64": cell,
        "stock-flashinfer/8k/b64": cell | {"tpot_s": 0.03, "ttft_s": {"median": 0.9}},
    }
    text = SECTIONS["crossover"](write(tmp_path, "crossover", results), tmp_path).markdown
    assert "on a device against FlashAttention 3\n" in text and "FlashInfer was timed in 8k/b64, too, and is slower there." in text
    assert "| faster |" not in text


def test_each_card_has_its_file_its_section_and_its_takeaways(tmp_path, undrawn):
    """Results of two cards are in no table together, and in no sentence."""

    def results(ours: float, backend: str) -> dict:
        return {
            "freekv-resident-tau-0.9-by-layer/8k/b1": served(8192, 1, ours, 100, prefix="hit"),
            f"stock-{backend}/8k/b1": served(8192, 1, 0.01, 100, prefix="hit"),
        }

    write(tmp_path, "crossover", results(0.02, "flashinfer"), suffix="-h100", device="H100")
    write(tmp_path, "crossover", results(0.03, "fa3"), device="H200")
    systems = (("freekv-resident-tau-0.9-by-layer", 0.015), ("stock-fa3", 0.01))
    colds = {f"{system}/32k/b16": served(32768, 16, tpot, 100) for system, tpot in systems}
    rest = dict.fromkeys(goodput.COLUMNS, 1.0) | {"limits": {"ttft_s": 2.0, "tpot_s": 0.05}, "rate": 1.0, "ttfts": [1.0], "tpots": [0.01]}
    rates = {f"{system}/1": rest | {"request_bytes": {"link_bytes": 5.0, "hbm_bytes": 10.0}, "run": 0} for system in ("stock", "freekv")}
    command = {"command": "python -m sglang.launch_server --attention-backend flashinfer --port 1 --attention-backend fa3"}
    write(tmp_path, "goodput", rates, suffix="-fa3", device="H200", **{"server stock": command})
    made = figures.sections(tmp_path, tmp_path)
    titles = [line for section in made for line in section.markdown.splitlines() if line.startswith("#")]
    assert titles == [
        "## Against stock SGLang, on H200: Llama-3.1-8B",
        "### Resident, tau-0.9-by-layer, on H200 against FlashAttention 3",
        "## Against stock SGLang, on H100: Llama-3.1-8B",
        "### Resident, tau-0.9-by-layer, on H100 against FlashInfer",
        "## Goodput under load, on H200 against FlashAttention 3: Llama-3.1-8B",
    ]
    told = figures.page(made)
    assert "SGLang's is 3.00 at 8K with `fast` on H200 against FlashAttention 3.\n" in told
    for where, ratio in {"H200 against FlashAttention 3": "3.00", "H100 against FlashInfer": "2.00"}.items():
        assert f"| `fast` | resident | on {where} | {ratio} | {ratio}: 1 of 8K | {ratio}: 1 of 8K |" in told
    assert "With 1 request of 8K a token takes 3.00 times as long with `fast` on H200 against FlashAttention 3." in told
    assert "FreeKV answers all of 1.0 requests per second and stock SGLang all of 1.0. That was on H200 against FlashAttention 3." in told
    assert "cold prompt" not in told
    write(tmp_path, "crossover", results(0.03, "fa3") | colds, device="H200")
    assert "times as long there. A cell's requests come at once. That of a cold prompt takes 1.50 to 1.50 times as long." in figures.page(
        figures.sections(tmp_path, tmp_path)
    )
    assert [aim.what.split(":")[0] for aim in made[0].aims[:1]] == [
        "Llama-3.1-8B, on H200 against FlashAttention 3, resident, tau-0.9-by-layer"
    ]


def test_very_long_contexts_are_in_the_title_and_without_stock_in_no_takeaway(tmp_path):
    results = {"freekv-default/512k/b1": served(524288, 1, 0.01, 100, prefix="hit")}
    section = SECTIONS["crossover"](write(tmp_path, "crossover", results, suffix="-longer", device="H200"), tmp_path)
    assert section.markdown.startswith("## Against stock SGLang, on H200, from 512K on: Llama-3.1-8B\n")
    assert "| 512k/b1 | - | hit | 10.00 / - |" in section.markdown and "servers" not in section.facts and not list(tmp_path.glob("*.png"))
    results["freekv-default/128k/b1"] = served(131072, 1, 0.01, 100, prefix="hit")
    section = SECTIONS["crossover"](write(tmp_path, "crossover", results, device="H200"), tmp_path)
    assert section.markdown.startswith("## Against stock SGLang, on H200: Llama-3.1-8B\n")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("paper-*.json")), ids=lambda path: path.stem)
def test_what_stands_side_by_side_is_of_one_kind_of_card(path):
    written = json.loads(path.read_text())
    everyone = {key.split("/")[0] for key in written["results"]}
    groups = crossover.PAIRS.values() if "crossover" in path.stem else [everyone]
    for group in groups:
        runs = {result["run"] for key, result in written["results"].items() if key.split("/")[0] in group}
        assert len({written["runs"][run]["device"] for run in runs}) <= 1, group


def test_a_goodput_stands_beside_its_bound(tmp_path):
    rest = dict.fromkeys(goodput.COLUMNS, 1.0)
    rest |= {"limits": {"ttft_s": 2.0, "tpot_s": 0.05}, "request_bytes": {"link_bytes": 5.0, "hbm_bytes": 10.0}, "run": 0}
    results = {
        f"{system}/{rate:g}": rest | {"rate": rate, "ttfts": [1.0, 1.0, ttft], "tpots": [0.01] * 3}
        for system, ttft in (("stock", 3.0), ("freekv", 1.0))
        for rate in (1.0, 2.0)
    }
    text = SECTIONS["goodput"](write(tmp_path, "goodput", results, suffix="-made-up"), tmp_path).markdown
    assert "| FreeKV | 1 | 1 | 1 |" in text and "| stock SGLang | 2 | 1.333 | 0.6667 |" in text
    assert "| stock SGLang | 1.333 | 2 | 0.6667 |" in text and "| FreeKV | 2 | 2 | 1 |" in text
    assert "best may be higher: FreeKV at 2." in text and "A share above 1" not in text and "replays" not in text
    results["freekv/3"] = results["freekv/2"] | {"rate": 3.0, "load": "accurate-by-layer"}  # of 2 that are possible
    results["freekv-fast/1"] = results["freekv/1"] | {"load": "tau-0.8"}
    section = SECTIONS["goodput"](write(tmp_path, "goodput", results, suffix="-made-up"), tmp_path)
    text = section.markdown
    assert "A share above 1: the rate was over before" in text and "FreeKV's has every prefix come from the host" in text
    assert "FreeKV replays the load `accurate-by-layer`. FreeKV with `fast` replays the load `tau-0.8`." in text
    assert "| FreeKV with `fast` | 1 | 1 | 1 |" in text and "| FreeKV with `fast` | 1 | 2 | 0.5 |" in text
    assert (
        "FreeKV answers 3.0 requests per second and stock SGLang 1.3. With `fast` it answers 1.0. That was on a device against stock SGLang."
        in (takeaways([section]))
    )


def test_the_page_begins_with_what_is_to_be_known(latency, tmp_path, undrawn):
    """Losses stand among the takeaways, and aims behind all sections."""
    crossover = {
        "stock/8k/b64": served(8192, 64, 0.01, 100),
        "freekv/8k/b64": served(8192, 64, 0.02, 50),
        "stock/8k/b1": served(8192, 1, 0.01, 100, prefix="hit"),
        "freekv/8k/b1": served(8192, 1, 0.005, 50, prefix="hit", ttft_s={"median": 0.3}),
    }
    write(tmp_path, "crossover", crossover)
    results = json.loads(latency.read_text())["results"]
    for key in [key for key in results if "/window/" in key]:
        results[key.replace("window", "full")] = step(2.2 if key.startswith("long-input") else 0.55)
    write(tmp_path, "latency", results)
    text = figures.page(figures.sections(tmp_path, tmp_path))
    told = text[text.index("## Takeaways") : text.index("## What was measured")]
    assert (
        "With 64 requests of 8K a token takes 2.00 times as long with `fast` and nothing resident on a device against stock SGLang." in told
    )
    assert (
        "After a hit that streams its prefix from host memory the first token takes 3.00 to 3.00 times as long there. A cell's requests come at once."
        in told
    )
    assert (
        "is 0.50 at 8K with `fast` and nothing resident on a device against stock SGLang." in told
        and "full attention takes 2.00 times FreeKV's time per token" in told
    )
    assert "With prefill its answers take 1.97 times as long." in told  # 16 s of prompts beside 511 steps
    assert "Full attention takes 0.50 to 0.50 of FreeKV's time and is faster in 4 of 4 cases." in told and "same device memory" not in told
    assert text.rindex("## Whole answers") < text.index("## Aims") < text.index("## Reproduce") < text.index("latency` | a device")


def test_the_page_is_that_of_the_results(tmp_path, undrawn):
    committed, made = ROOT / "docs" / "speed.md", figures.sections(ROOT / "benchmarks" / "results", tmp_path)
    assert committed.exists() == bool(made)
    if made:
        assert committed.read_text() == figures.page(made), "run python -m benchmarks.paper.figures and commit docs"
    assert {path.name for path in committed.parent.glob("*.png")} == {path.name for path in tmp_path.glob("*.png")}


def cells_of(table: str) -> list[list[str]]:
    """Of a table's rows, its head and its line left out."""
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")][2:]


def test_the_papers_page_is_that_of_the_results():
    text = PAPERS.read_text()
    assert text == filled(text, papers.tables(RESULTS)), "run python -m benchmarks.paper.figures and commit docs"


def test_a_factor_is_of_the_batch_that_a_paper_names(latency, tmp_path):
    speed = Speed(tmp_path, "llama-3.1-8b")
    by_batch = [(2 * batch + 511 * 12) / (2 * batch + 511 * 1.1) for batch in (1, 4, 8, 16)]  # prompts of two seconds each
    assert speed.like(published.Number(5, at=published.BATCH_4), "long-input", "arkvale", "freekv") == pytest.approx(by_batch[1])
    assert speed.like(published.Number(5, "up to"), "long-input", "arkvale", "freekv") == pytest.approx(max(by_batch))
    assert speed.like(published.Number(5), "long-generation", "arkvale", "freekv") is None, "no prefill was measured"
    assert published.Number(0.53, "about", "recall alone").shown(".0%") == "about 53%, recall alone"


def test_the_words_between_the_papers_tables_hold():
    llama, qwen3 = (Speed(RESULTS, shape) for shape in ("llama-3.1-8b", "qwen3-8b"))
    tables = {name: table() for name, table in papers.tables(RESULTS).items()}
    assert "come up to 11 of 11" in tables["reached"] and "over ArkVale, 0 of 4 over ShadowKV" in tables["reached"]
    razor, raas, quest = cells_of(tables["1-left"])
    assert razor[3] > quest[3] and raas[4] == "0.00" and quest[5] == max(razor[5], raas[5], quest[5])
    steps = {row[0]: (float(row[1]), int(row[5].strip("%"))) for row in cells_of(tables["1-right"])}
    assert abs(steps["ArkVale, host copies"][1] - 94) < 3 and steps["ArkVale"][1] < 94 / 4
    assert abs(steps["ArkVale"][0] / steps["full attention"][0] - 1) < 0.05
    assert "Preset accurate: none" in tables["2b-told"] and "Preset fast: none" not in tables["2b-told"]
    assert all(float(row[2]) < published.SIMILAR for row in cells_of(tables["3a"])[1:-1])
    told = {row[0]: row[4].split(" / ") for row in cells_of(tables["8"])}
    layout, buffers, ahead, in_graph = (told[name] for name in list(told) if name.startswith(("+ units", "+ two", "+ selection", "FreeKV")))
    assert float(min(layout, key=float)) > float(max(buffers + ahead, key=float))
    assert 1 < float(buffers[1]) < 1.1 and 0.8 < float(ahead[1]) < 1 < float(in_graph[1]) < 1.9
    for speed in (llama, Speed(RESULTS, "qwen2.5-7b")):
        for method in ("raas", "razor"):
            assert all(abs(speed.factor(name, 1, method, "freekv") - 1) < 0.1 for name in ("long-input", "long-generation"))
            assert all(speed.factor("long-generation", batch, method, "freekv") < 1 for batch in (8, 16))
    near = [row for row in cells_of(tables["7"]) if row[0].startswith("InfiniGen") and row[2] == "long generation"]
    assert all(abs(float(row[4]) / float(row[3].split(",")[0]) - 1) < 0.2 for row in near) and len(near) == 2
    patterns = ((llama, "long-input"), (qwen3, "long-generation"), (qwen3, "long-both"))
    assert all(speed.factor(name, batch, "louiskv", "full") < 1.01 for speed, name in patterns for batch in (1, 4, 8, 16))
    shares = [int(row[6].strip("%")) for row in cells_of(tables["louiskv-parts"])]
    assert all(0 < arkvale - louiskv < 65 - 11 for arkvale, louiskv in zip(shares[::3], shares[2::3]))


def test_the_survey_names_rows_that_there_are():
    rows = cells_of(PAPERS.read_text().split("## The survey's categories")[1])
    judged = {each.label.strip("*") for each in (*systems.OFFLINE, *systems.REAL)}
    for known, column in ((set(METHODS.values()), 2), (judged, 3)):
        assert {name for row in rows for name in row[column].split("; ")} <= known | {"none"}
    assert (len(rows), sum(row[2:4] != ["none", "none"] for row in rows)) == (11, 6)


def test_a_difference_is_told_in_two_sentences():
    reasons = [part for part in PAPERS.read_text().split("\n\n") if part.startswith("*Why they differ*")]
    assert len(reasons) == 8 and all(len(re.findall(r"\.(?=\s|$)", reason)) <= 2 for reason in reasons)


def test_what_int8_saves_under_pressure_is_that_of_the_results():
    """In tuning: times per token, their ratio, and tokens per second while decoding."""
    found = {}
    for kind in ("int8", "bf16"):
        results = json.loads((ROOT / "benchmarks" / "results" / f"same-kv-{kind}.json").read_text())["results"]
        found |= {kind if key.startswith("freekv") else "stock": result for key, result in results.items()}
    int8, bf16, stock = (found[name] for name in ("int8", "bf16", "stock"))
    [line] = [line for line in (ROOT / "docs" / "tuning.md").read_text().splitlines() if "same-kv-int8.json" in line]
    times = f"{int8['tpot_s'] * 1e3:.1f} ms", f"{bf16['tpot_s'] * 1e3:.1f} ms", f"{int8['tpot_s'] / bf16['tpot_s']:.2f}"[1:] + "."
    rates = [f"{each['decoding_tokens_per_s']:,.0f}" for each in (int8, bf16, stock)]
    assert all(each in line for each in (*times, f"{rates[0]} tokens/s", f"gives {rates[2]}.", f"{int8['at_once']} of 30"))
