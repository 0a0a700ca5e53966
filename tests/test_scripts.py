"""Every script of benchmarks/, examples/ and launch/ starts by its path, as documents tell to start it, and explains itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    str(path.relative_to(ROOT))
    for directory in ("benchmarks", "examples", "launch")
    for path in sorted((ROOT / directory).rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text()
]

# All in one process, each with the path and the modules that a process of its own would begin with; the slow imports are made once.
EXPLAIN = """
import contextlib, io, json, os, runpy, sys, traceback
import numpy, torch, triton, transformers
import sglang.srt.server_args, sglang.srt.managers.scheduler, sglang_freekv.retrieval, sglang_freekv.launch.server

path, modules, told = sys.path[1:], set(sys.modules), {}
for script in sys.argv[1:]:
    sys.path[:] = [os.path.dirname(os.path.abspath(script)), *path]
    sys.argv[:] = [script, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(script, run_name="__main__")
            status = None
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = traceback.format_exc()
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    told[script] = status, out.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, tuple]:
    done = subprocess.run([sys.executable, "-c", EXPLAIN, *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(told, script):
    status, text = told[script]
    assert status == 0 and "--help" in text, f"{status}\n{text[-500:]}"
