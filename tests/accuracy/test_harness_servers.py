"""The server half, with made-up servers: what is asked of them, and results that stand beside the offline ones."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks.accuracy import grid, run, serve
from benchmarks.accuracy.coded import Coded
from benchmarks.accuracy.methods import METHODS
from benchmarks.accuracy.methods.freekv import FreeKV
from benchmarks.accuracy.methods.full import Full
from sglang_freekv.config import KV_DTYPES, FreeKVConfig
from sglang_freekv.options import NAMES, Options, config_from, with_kv_cache_dtype
from sglang_freekv.policy import POLICIES
from sglang_freekv.presets import PRESETS

ASKED = ["--tasks", "magic-number", "code-word", "--lengths", "360", "--budgets", "160", "192", "--prompts", "3"]
COUNTS = {"context_pages": 12, "attended_pages": 5, "selected_units": 40, "recalled_units": 10, "corrections": 8, "decode_steps": 2}


class MadeUp:
    """Answers right if it is dense, and the first prompt only if not."""

    def __init__(self, flags: dict, prompts: list) -> None:
        self.flags, self.dense = flags, "--kv-retrieval" not in flags
        self.answers = {tuple(map(int, prompt.token_ids)): prompt.answer_token_ids for prompt in prompts}
        self.first = prompts[0]

    def post(self, path: str, body: dict) -> dict:
        assert path == "/generate" and body["sampling_params"]["temperature"] == 0
        asked = tuple(body["input_ids"])
        known = self.dense or asked == self.first.token_ids
        answer = [*(int(token) for token in self.answers[asked]), 1] if known else [7, 7]
        return {"output_ids": answer, "meta_info": {"completion_tokens": len(answer)} | ({} if self.dense else {"freekv": COUNTS})}

    def get(self, path: str) -> dict:
        return {} if self.dense else {"freekv": {"retrieval_layers": 5}}


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """``servers(*options)``: exit status, results, and the servers that were started."""
    started = []
    prompts = [prompt for task in ("magic-number", "code-word") for prompt in grid.Cell.ask(task, 360, 3, seed=0).prompts]

    @contextmanager
    def serving(flags, name, directory):
        if flags.get("--freekv-tau") == 0.8 and "--freekv-digest" not in flags:
            raise RuntimeError("does not start")
        started.append(MadeUp(flags, prompts))
        yield started[-1]

    monkeypatch.setattr(serve, "serving", serving)
    monkeypatch.setattr(serve, "POLICIES", {"freekv": None, "another": None})

    def start(*options):
        started.clear()
        monkeypatch.setattr(sys, "argv", ["serve.py", *ASKED, "--out", str(tmp_path), *options])
        return serve.main(), json.loads((tmp_path / "accuracy-server.json").read_text())["results"], list(started)

    return start


def test_every_system_is_asked_the_offline_prompts(servers, tmp_path, monkeypatch, capsys):
    status, results, started = servers("--taus", "0.7", "0.8")
    sparse = ["freekv", "another", "freekv-min-max", "freekv-no-correction", "freekv-tau-0.70"]
    sparse += [f"freekv-{name}" for name in serve.SELECTIONS]
    names = ["all/full", *(f"{budget}/{name}" for name in sparse for budget in (160, 192))]
    assert sorted(results) == sorted(f"{task}/360/{name}" for name in names for task in ("magic-number", "code-word"))
    assert status == 1 and "does not start" in capsys.readouterr().out and len(started) == len(names)
    of = results["magic-number/360/160/freekv"]
    assert of["scores"] == [1, 0, 0] and of["generated"][1] == 2
    assert of["trace"]["mean"] == {"attended": 160, "fetched": 16, "corrected": 0.4}
    assert results["magic-number/360/160/freekv-page-8"]["trace"]["mean"] == {"attended": 40, "fetched": 4, "corrected": 0.4}
    assert of["trace"]["counts"] == {name: 3 * count for name, count in COUNTS.items()}

    monkeypatch.setattr(sys, "argv", ["run.py", *ASKED, "--tasks", "magic-number", "--out", str(tmp_path)])
    assert run.main({"full": Full}) == 0
    offline = json.loads((tmp_path / "accuracy-offline.json").read_text())["results"]["magic-number/360/all/full"]
    full = results["magic-number/360/all/full"]
    assert all(offline[name] == full[name] for name in ("digest", "model", "dtype", "prompts", "seed", "budget"))
    text = (tmp_path / "accuracy.md").read_text()
    assert "| full | magic-number | 360 | - |" in text and "| freekv (server) |" in text


def test_a_server_is_started_for_what_is_not_there(servers):
    servers("--taus", "0.7", "--only", "*/full", "code-word/*")
    _, _, started = servers("--taus", "0.7", "--only", "*/full", "*/160/freekv*")
    freekv = 4 + len(serve.SELECTIONS)  # plain, min-max, without correction, and one tau
    assert [server.flags.get("--freekv-budget") for server in started] == [160] * freekv
    assert len(servers("--taus", "0.7", "--only", "*/full", "*/160/freekv*", "--force")[2]) == freekv + 1


def config_of(server: MadeUp) -> FreeKVConfig:
    """What the server makes of its flags."""
    typed = {name: value for flag, value in server.flags.items() if (name := flag.removeprefix("--").replace("-", "_")) in NAMES}
    return with_kv_cache_dtype(config_from(Options(**typed), server.flags["--page-size"]), server.flags.get("--kv-cache-dtype"))


def test_flags_are_those_of_the_offline_budget(servers, monkeypatch):
    monkeypatch.setattr(serve, "POLICIES", POLICIES)
    _, _, started = servers("--taus", "0.7", "--dense-layers", "2")
    assert {server.flags.get("--page-size") for server in started} == {None, 32, 16, 8}
    methods = {server.flags.get("--kv-retrieval") for server in started}
    assert methods == {None, *POLICIES} and not any(flag.startswith("--freekv") for flag in started[0].flags)
    for server in started[1:]:
        config = config_of(server)
        budget = grid.budget_of(config.budget_tokens, 32)
        usual = {(page, budget.sink, budget.window) for page in (32, 16, 8)}
        assert (config.page_size, config.sink_tokens, config.window_tokens) in usual | {(32, 32, 64), (16, 16, 32), (8, 16, 32)}
        assert config.dense_layers == (0, 1) and ("--freekv-tau" not in server.flags or config.tau in (0.7, 0.8, 0.85, serve.NEVER))


def test_what_a_row_does_not_say_is_not_the_servers_default(servers, monkeypatch):
    """Results of rows stay results of boxes, at tau 0.9 and without hysteresis, whatever the server's default is."""
    monkeypatch.setattr(serve, "POLICIES", POLICIES)
    _, _, started = servers("--taus", "0.7")
    of = {server.flags["--kv-retrieval"]: server for server in reversed(started[1:])}  # the first of each method has no row's flags
    rows = [server for server in started if server.flags.get("--freekv-digest") == "two-bit" and "--freekv-tau" not in server.flags]
    fast = PRESETS["fast"]
    assert (config_of(of["freekv"]).digest, config_of(of["freekv"]).tau, config_of(of["freekv"]).hysteresis) == (fast.digest, 0.9, 0)
    assert rows and {config_of(server).tau for server in rows} == {0.9} and 0 in {config_of(server).hysteresis for server in rows}
    assert all("--freekv-preset" not in server.flags for method, server in of.items() if method != "freekv")


def test_the_row_of_a_preset_is_the_preset_at_the_cells_budget(servers, tmp_path):
    """The budget sets a sink and a window of its own for all rows; the preset's win, and the harness keeps everything in host memory."""
    _, results, started = servers("--only", "*/freekv-accurate*", "*/full")
    accurate = FreeKVConfig(**PRESETS["accurate"].settings)
    common = {"dense_layers": (0,), "host_memory_gib": 4.0, "resident_memory_gib": 0.0}
    stored = (*KV_DTYPES, "fp8_e4m3")
    expected = [replace(accurate, budget_tokens=budget, kv_dtype=each, **common) for each in stored for budget in (160, 192)]
    assert [config_of(server) for server in started[1:]] == expected
    assert results["magic-number/360/160/freekv-accurate"]["trace"]["mean"]["attended"] == 5 * accurate.page_size


def test_both_halves_have_the_row_of_the_preset():
    accurate, row = PRESETS["accurate"], METHODS["freekv-accurate"]()
    told = (row.page, row.sink, row.window, row.tau, row.digest, row.pooling, row.hysteresis)
    assert told == tuple(value for name, value in accurate.settings.items() if name != "budget_tokens")
    assert replace(FreeKV(), **{name: getattr(row, name) for name in ("page", "sink", "window", "tau", "digest", "hysteresis")}) == row
    assert METHODS["freekv-accurate-int8"]() == Coded(row) and METHODS["freekv-accurate-fp8"]() == Coded(row, "fp8_e4m3")
