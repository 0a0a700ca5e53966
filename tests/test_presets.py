"""Presets: each is what its flags are, what the user gives wins, and everything tells which preset serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from made_up import LLAMA
from sglang_freekv.config import FreeKVConfig, Refusal, typed
from sglang_freekv.kv_pool import FreeKVPool
from sglang_freekv.layers import LayerTable
from sglang_freekv.memory_pool.kv_format import KVFormat
from sglang_freekv.memory_pool.sizing import KVShape
from sglang_freekv.methods import METHODS
from sglang_freekv.options import DEFAULTS, FLAGS, Options, config_from
from sglang_freekv.presets import DEFAULT_PRESET, PRESETS

ROOT = Path(__file__).resolve().parent.parent
FLAG_OF = {flag.setting: name for name, flag in FLAGS.items()}
OTHER = {
    "budget_tokens": 4096,
    "sink_tokens": 64,
    "window_tokens": 128,
    "tau": 0.5,
    "digest": "min-max",
    "pooling": "max",
    "hysteresis": 0.7,
}


def made(page_size: int | None = None, method: str = "freekv", **given) -> FreeKVConfig:
    return config_from(Options(kv_retrieval=method, **given), page_size)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_flags_are(name):
    settings = PRESETS[name].settings
    spelled = made(settings["page_size"], **{FLAG_OF[setting]: value for setting, value in settings.items() if setting != "page_size"})
    chosen = made(freekv_preset=name)
    assert chosen == spelled == FreeKVConfig(**settings)
    assert (chosen.preset, chosen.preset_set) == (name, tuple(settings)) and spelled.preset_set == ()


def test_without_a_preset_accurate_is_taken():
    assert DEFAULT_PRESET == "accurate" == next(iter(PRESETS))
    assert made() == made(freekv_preset=DEFAULT_PRESET) == DEFAULTS and made().preset == DEFAULT_PRESET
    assert FreeKVConfig(**PRESETS["fast"].settings) == FreeKVConfig()


@pytest.mark.parametrize("setting", OTHER)
@pytest.mark.parametrize("name", PRESETS)
def test_a_flag_wins_over_a_preset(name, setting):
    value = next(value for value in (OTHER[setting], "cuboid-mean") if value != PRESETS[name].settings[setting])
    config = made(freekv_preset=name, **{FLAG_OF[setting]: value})
    left = {other: each for other, each in PRESETS[name].settings.items() if other != setting}
    assert getattr(config, setting) == value and config.preset_set == tuple(left)
    assert {other: getattr(config, other) for other in left} == left


@pytest.mark.parametrize("given", [{}, {"freekv_preset": "accurate"}], ids=str)
def test_a_page_size_wins_and_the_presets_sink_and_window_become_whole_pages(given):
    config = made(32, **given)
    assert (config.page_size, config.sink_tokens, config.window_tokens, config.digest) == (32, 32, 64, "two-bit")
    with pytest.raises(
        Refusal, match=r"^--page-size 4: expected one .* --page-size is 4\); use --page-size 8, or --freekv-digest cuboid-mean beside it$"
    ):
        made(4, **given)


def test_a_small_budget_shrinks_what_a_preset_pins():
    config = made(freekv_preset="paper", freekv_budget=512)
    assert (config.budget_tokens, config.sink_tokens, config.window_tokens) == (512, 128, 128)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "freekv"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_of_freekv_alone(method, name):
    assert made(method=method) == FreeKVConfig(method) and made(method=method).preset is None
    with pytest.raises(Refusal, match=f"^--freekv-preset {name}: expected none with --kv-retrieval {method}, .*; leave it out and give"):
        made(method=method, freekv_preset=name)


@pytest.mark.parametrize("name", ["slow", "", 1, ["fast"]])
def test_an_unknown_preset_is_refused(name):
    with pytest.raises(Refusal, match=r"--freekv-preset .*: expected one of accurate, fast, paper; use accurate"):
        made(freekv_preset=name)


def test_a_server_tells_its_preset_and_what_it_set():
    config = made(freekv_preset="accurate", freekv_tau=0.7, freekv_budget=256)
    shape = KVShape(LayerTable.uniform(2, dense=1), 2, 4, 16, (2, 16), KVFormat.plain(torch.float32))
    pool = FreeKVPool(config, shape, 512, 2, 256, "cpu")
    assert pool.describe()["preset"] == "accurate" and pool.describe()["hysteresis"] == 1.0
    assert pool.describe()["preset_set"] == ["page_size", "sink_tokens", "window_tokens", "digest", "pooling", "hysteresis"]
    told = "; preset accurate has set page size 8, sink 16, window 32, digest two-bit, pooling softmax-mean, hysteresis 1"
    assert pool.activation_line().endswith(told)


def test_the_doctor_carries_a_preset(ask):
    base = ("--model-path", LLAMA, "--gpu", "H100", "--host-memory", 512, "--context-length", 32768, "--requests", 2)
    answer = ask(None, *base, "--freekv-preset", "accurate")
    assert answer.flag("--freekv-preset") == "accurate" and "--page-size" not in answer.report["command"]
    assert answer.found["preset"].figures == {"preset": "accurate"} | PRESETS["accurate"].settings
    accurate = PRESETS["accurate"]
    flags = {FLAG_OF[setting]: value for setting, value in accurate.settings.items() if setting not in ("page_size", "budget_tokens")}
    words = [word for name, value in flags.items() for word in (typed(name), value)]
    spelled = ask(None, *base, "--page-size", accurate.page_size, "--freekv-budget", accurate.budget_tokens, *words)
    assert answer.tiers == spelled.tiers != ask(None, *base, "--freekv-preset", "fast").tiers
    assert ask(None, *base).found["preset"].value.startswith(f"{DEFAULT_PRESET}, which sets page size ")


@pytest.mark.parametrize("document", ["README.md", "docs/tuning.md", "docs/flags.md"])
def test_documents_name_the_presets(document):
    text = (ROOT / document).read_text()
    assert all(f"`--freekv-preset {name}`" in text or f" {name}, {preset.told}" in text for name, preset in PRESETS.items())
