"""The documents: what they point to is there, what they name exists, and they read as the rules of CONTRIBUTING.md ask."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest
import torch
import yaml

from sglang_freekv import __version__
from sglang_freekv.architectures import TESTED_ARCHITECTURES
from sglang_freekv.config import GIB, FreeKVConfig, typed
from sglang_freekv.digests import digests_of
from sglang_freekv.launch import flags
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape, Sizing
from sglang_freekv.metrics import METRICS
from sglang_freekv.options import DEFAULTS, FLAGS
from sglang_freekv.presets import PRESETS
from sglang_freekv.scheduler_patch import arguments

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("*.md", "docs/*.md", "docs/history/*.md", "benchmarks/**/README.md", "deploy/**/*.md", "examples/**/*.md")
DOCUMENTS = {str(path.relative_to(ROOT)): path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))}
MAIN = [name for name in DOCUMENTS if name in ("README.md", "DESIGN.md") or re.fullmatch(r"docs/[^/]+", name)]
LINES = {"README.md": 130, "DESIGN.md": 220}
MOST_WORDS, MEDIAN_WORDS = 30, 16
SHORTEST = 4  # words: what is shorter, a number of a list or a caption, does not lower the median
SLANG = r"\bturned\b|\bflagged\b|context buffer|\bthe floor\b|\bthe bound\b"
COMMIT = r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b"
MODELS = {"Llama-3.1-8B": (32, 8, 32), "Qwen3-32B": (64, 8, 64), "Llama-3.1-70B": (80, 8, 64), "Qwen3-235B-A22B": (94, 4, 64)}


def prose(text: str) -> str:
    """``text`` without code, tables, headings and pictures."""
    text = re.sub(r"```.*?```", " ", text, flags=re.S)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "![")))


def lengths(text: str) -> dict[str, int]:
    """Words of each sentence."""
    sentences = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*] ", prose(text))
    return {" ".join(sentence.split()): len(sentence.split()) for sentence in sentences}


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    path = DOCUMENTS[name]
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_of_docs_is_linked_from_the_readme():
    readme = DOCUMENTS["README.md"].read_text()
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"](docs/{path.name}" not in readme] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_sentence_is_long(name):
    long = {sentence: words for sentence, words in lengths(DOCUMENTS[name].read_text()).items() if words > MOST_WORDS}
    assert not long


@pytest.mark.parametrize("name", MAIN)
def test_half_of_the_sentences_are_short(name):
    assert median(words for words in lengths(DOCUMENTS[name].read_text()).values() if words >= SHORTEST) <= MEDIAN_WORDS


def test_sentences_are_found_as_a_reader_finds_them():
    text = "# A heading\nOne two three. Four\nfive six:\n- An item of four\n| a | table |\n```\ncode is no prose\n```\n"
    assert [words for words in lengths(text).values() if words] == [3, 3, 4]


@pytest.mark.parametrize("name", LINES)
def test_a_document_is_short(name):
    assert len(DOCUMENTS[name].read_text().splitlines()) <= LINES[name]


@pytest.mark.parametrize("name", MAIN)
def test_words_are_those_that_design_explains(name):
    assert re.findall(SLANG, prose(DOCUMENTS[name].read_text())) == []


@pytest.mark.parametrize("name", LINES)
def test_no_commit_is_named(name):
    assert re.findall(COMMIT, DOCUMENTS[name].read_text()) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_flags_exist(name):
    known = {typed(flag) for flag in (*FLAGS, *arguments.defaults())}
    for script in (ROOT / "benchmarks").rglob("*.py"):
        known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', script.read_text()))
    named = set(re.findall(r"--(?:freekv|kv)-[a-z0-9-]*[a-z0-9]", DOCUMENTS[name].read_text()))
    assert named - known == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_metrics_exist(name):
    assert set(re.findall(r"sglang:freekv_\w+", DOCUMENTS[name].read_text())) <= {metric.name for metric in METRICS}


def test_every_metric_is_explained():
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in DOCUMENTS["docs/tuning.md"].read_text()] == []


def test_the_page_of_flags_is_that_of_the_table():
    assert (ROOT / "docs" / "flags.md").read_text() == flags.page(), "run python -m sglang_freekv.launch.flags and commit docs/flags.md"


def test_the_citation_is_of_this_version_and_of_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    assert [work["url"] for work in citation["references"]] == ["https://arxiv.org/abs/2505.13109"]


def sizing_of(config: FreeKVConfig, counts: tuple[int, int, int], context_len: int) -> Sizing:
    """Of a model with so many layers, kv heads and query heads of 128 dimensions, in bfloat16."""
    layers, kv_heads, query_heads = counts
    kinds, digest = LayerTable.uniform(layers - 1, dense=1), digests_of(config).shape(128, torch.bfloat16.itemsize)
    return Sizing(config, KVShape(kinds, kv_heads, query_heads, 128, digest, KVFormat.plain(torch.bfloat16)), context_len)


def test_the_device_memory_of_a_token_is_told_for_each_preset():
    rows = {
        name: line
        for name in PRESETS
        for line in DOCUMENTS["README.md"].read_text().splitlines()
        if line.startswith(f"| `--freekv-preset {name}`")
    }
    for name, preset in PRESETS.items():
        kib = sizing_of(FreeKVConfig(**preset.settings), MODELS["Llama-3.1-8B"], 1 << 15).device_bytes_per_token / 1024
        assert rows[name].endswith(f" {kib:.0f} KiB |")


@pytest.mark.parametrize("model", MODELS)
def test_the_memory_of_a_request_is_what_the_server_reckons(model):
    layers, kv_heads, query_heads = MODELS[model]
    sizes = {tokens: sizing_of(DEFAULTS, (layers, kv_heads, query_heads), tokens) for tokens in (1 << 15, 1 << 17)}
    host = [f"{size.host_bytes_per_token * tokens / GIB:.1f}" for tokens, size in sizes.items()]
    device = [f"{(size.device_bytes_per_token * tokens + size.row_bytes) / GIB:.2f}" for tokens, size in sizes.items()]
    stock = " / ".join(f"{layers * size.shape.dense_token_bytes * tokens / GIB:.1f}" for tokens, size in sizes.items())
    assert f"| {' | '.join([model, *host, *device, stock])} |" in DOCUMENTS["README.md"].read_text()


def test_the_models_that_are_called_tested_are():
    [table] = re.findall(r"^\| architectures \|.*\n\|.*\n((?:\|.*\n)+)", DOCUMENTS["README.md"].read_text(), re.MULTILINE)
    tested = {re.sub("ForCausalLM$|ForConditionalGeneration$|_", "", name).lower() for name in TESTED_ARCHITECTURES}
    named = [
        re.sub(r" \(.*?\)|, (with|and) .*", "", row.split(" | ")[0][2:]) for row in table.splitlines()
    ]  # without models and what they read
    assert {re.sub("[-.]", "", name).lower() for names in named for name in names.split(", ")} == tested
