"""Half a minute of everything at once: right answers, nothing lost, nothing held; benchmarks/soak.py says what it does."""

from __future__ import annotations

import json
import subprocess
import sys

from room import wait_for_room
from serving import ROOT


def test_a_soak_leaves_no_trace(tmp_path):
    wait_for_room(1)
    command = [sys.executable, "-m", "benchmarks.soak", "--device", "cpu", "--out", str(tmp_path)]
    command += ["--minutes", "0.6", "--retract-every", "20", "--longest", "2048", "--documents", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "soak.json").read_text())["results"]["cpu"]
    assert result["requests"]["ask"] > 50 and result["retractions"] > 0 and result["requests"]["abort"] > 5
    assert result["freekv_right"] >= 0.8 * result["dense_right"]
