"""Every program of benchmarks/, examples/ and launch/ starts as documents tell to start it, with ``python -m``, and explains itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"benchmarks": "benchmarks", "examples": "examples", "launch": "sglang_freekv.launch"}
PROGRAMS = [
    ".".join([package, *path.relative_to(ROOT / directory).with_suffix("").parts])
    for directory, package in PACKAGES.items()
    for path in sorted((ROOT / directory).rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text()
]

# All in one process, each with the modules that a process of its own would begin with; the slow imports are made once.
EXPLAIN = """
import contextlib, io, json, runpy, sys, traceback
import numpy, torch, triton, transformers
import sglang.srt.server_args, sglang.srt.managers.scheduler, sglang_freekv.retrieval, sglang_freekv.launch.server

modules, told = set(sys.modules), {}
for program in sys.argv[1:]:
    sys.argv[:] = [program, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            status = None
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = traceback.format_exc()
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    told[program] = status, out.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, tuple]:
    done = subprocess.run([sys.executable, "-c", EXPLAIN, *PROGRAMS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_explains_itself(told, program):
    status, text = told[program]
    assert status == 0 and "--help" in text, f"{status}\n{text[-500:]}"
