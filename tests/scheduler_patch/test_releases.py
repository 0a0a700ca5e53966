"""The table of releases is true of the SGLang that is installed, and is the only place that asks which one it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sglang
from packaging.version import Version
from sglang.srt.environ import envs

from sglang_freekv import releases, scheduler_patch
from sglang_freekv.config import Refusal
from sglang_freekv.scheduler_patch import preparation
from sglang_freekv.scheduler_patch.sources import Sources

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [file for folder in ("sglang_freekv", "scheduler_patch") for file in sorted((ROOT / folder).glob("*.py"))]


@pytest.mark.parametrize("name", releases.DIFFERENCES)
def test_a_difference_is_there_or_not_as_the_table_says(name):
    difference = releases.DIFFERENCES[name]
    installed = Sources(Path(sglang.__file__).parents[1])
    assert (installed.find(difference.symbol) is not None) == releases.has(name)


@pytest.mark.parametrize(
    "installed, since, expected",
    [
        ("0.5.17", "0.5.20", False),
        ("0.5.23", "0.5.20", True),
        ("0.5.20", "0.5.20", True),
        ("0.5.20rc1", "0.5.20", True),
        ("0.6", "0.5.20", True),
    ],
)
def test_releases_are_compared_as_numbers(monkeypatch, installed, since, expected):
    monkeypatch.setattr(releases, "INSTALLED", Version(installed))
    assert releases.is_since(since) == expected


@pytest.mark.parametrize("installed, expected", [("0.5.23", True), ("0.5.23+cu129", True), ("0.5.23.post1", False), ("0.5.22", False)])
def test_a_release_that_was_not_tested_is_told(monkeypatch, installed, expected):
    monkeypatch.setattr(releases, "INSTALLED", Version(installed))
    assert releases.is_tested() == expected


def test_a_release_that_was_not_tested_is_refused_by_name(monkeypatch):
    preparation.refuse_untested("freekv")
    monkeypatch.setattr(releases, "INSTALLED", Version("0.5.20"))
    with pytest.raises(Refusal, match="expected SGLang 0.5.17 or 0.5.23, which were tested, found 0.5.20; use one of them"):
        preparation.refuse_untested("freekv")


def test_every_difference_is_used_and_none_is_decided_elsewhere():
    texts = {file: file.read_text() for file in SOURCES if file.name != "releases.py"}
    asked = {name for text in texts.values() for name in re.findall(r"releases\.has\(\"(.*?)\"\)", text)}
    assert asked <= set(releases.DIFFERENCES)
    others = [file.name for file, text in texts.items() if re.search(r"sglang\.__version__|version\(.sglang.\)", text)]
    assert not others
    ranges = [patch for table in scheduler_patch.TABLES for patch in table if patch.since or patch.until]
    assert all(patch.concerns(lambda release: True) != patch.concerns(lambda release: False) for patch in ranges)


def test_sglangs_other_server_is_refused():
    preparation.refuse_other_server("freekv")
    with envs.SGLANG_RUST_SERVER.override(True), pytest.raises(Refusal, match="SGLANG_RUST_SERVER: expected it unset .*; unset it, or use"):
        preparation.refuse_other_server("freekv")
