"""The other ways in: ``sglang serve`` with a YAML file, and ``Engine`` in a program."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.needle import tasks
from oracle import Oracle, OracleSettings
from room import wait_for_room
from serving import DEFAULTS, NEEDLE_MODEL, TestServer, start_all, stop_all, the_nursery

pytestmark = pytest.mark.two_servers

SETTINGS = OracleSettings(
    budget=320, sink=16, window=64, tau=0.7, page=8, digest="two-bit", hysteresis=1.0
)  # the default preset's, but for three
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [int(token) for token in tasks.make_document(np.random.default_rng(6), 900, needle_count=4).token_ids]


@pytest.fixture(scope="module")
def expected(prompt) -> list[int]:
    return Oracle(NEEDLE_MODEL).generate(prompt, NEW_TOKENS, SETTINGS).tokens


class ServedByCommand(TestServer):
    """The same server, started by the ``sglang`` command."""

    program = (str(Path(sys.executable).with_name("sglang")), "serve")


@pytest.fixture(scope="module")
def starting(tmp_path_factory):
    """``sglang serve`` with a YAML file; it starts while the program runs."""
    wait_for_room(2)
    path = tmp_path_factory.mktemp("serve")
    config = path / "config.yaml"
    config.write_text("kv-retrieval: freekv\nfreekv-budget: 320\nfreekv-window: 64\nfreekv-tau: 0.7\n")
    server = ServedByCommand({"--kv-retrieval": "freekv", "--config": config}, path / "log.txt")
    yield [server]
    server.stop()


PROGRAM = """
import json, sys
import sglang

if __name__ == "__main__":
    options, prompt, new_tokens = json.loads(sys.argv[1])
    answers = []
    for method in ({"kv_retrieval": "freekv", "freekv_budget": 320, "freekv_window": 64, "freekv_tau": 0.7}, {}):
        engine = sglang.Engine(**options, **(method or {"attention_backend": "torch_native"}))
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        answers.append((answer["output_ids"], answer["meta_info"].get("freekv")))
        engine.shutdown()
    print("ANSWERS" + json.dumps(answers))
"""


def test_engine_with_and_then_without_retrieval(starting, tmp_path, prompt, expected):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = {name.lstrip("-").replace("-", "_"): str(value) if isinstance(value, Path) else value for name, value in DEFAULTS.items()}
    arguments = json.dumps([options, prompt, NEW_TOKENS])
    with (tmp_path / "log.txt").open("w") as log:
        the_nursery().start([str(program), arguments], dict(os.environ), tmp_path, log.fileno()).wait(300)
    said = (tmp_path / "log.txt").read_text()
    line = next((line for line in said.splitlines() if line.startswith("ANSWERS")), None)
    assert line, said[-3000:]
    (retrieved, counts), (stock, nothing) = json.loads(line.removeprefix("ANSWERS"))
    assert retrieved == expected and counts["selected_units"] > 0 == counts["recalled_units"]  # by default all pages are resident here
    assert stock == Oracle(NEEDLE_MODEL).generate(prompt, NEW_TOKENS).tokens and nothing is None


def test_sglang_serve_with_a_config_file(starting, prompt, expected):
    (server,) = start_all(starting)
    assert server.generate(prompt, NEW_TOKENS)["output_ids"] == expected
    stop_all([server])
