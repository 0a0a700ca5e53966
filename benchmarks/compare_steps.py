"""Is a change faster? Captured decode steps of several checkouts in turns: two GPUs of one kind differ by more than most changes do.

    python -m benchmarks.compare_steps OLD NEW --corrected 0.59

Options that are not its own go to ``bench_step``. Where ``benchmarks`` is no package yet, it runs by its path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import say, table

CASES = ("8k-b1", "32k-b1", "32k-b4", "32k-b8", "32k-b16", "128k-b4")


def steps_of(tree: Path, cases: list[str], further: list[str]) -> dict[str, float]:
    """Milliseconds of a step of each case, by the benchmark and the code of ``tree``.

    Raises:
        SystemExit: ``tree`` is no checkout, or nothing was measured.
    """
    parts = [f"{case}/freekv" for case in cases]
    if not (tree / "benchmarks" / "bench_step.py").exists():
        raise SystemExit(f"{tree}: expected a checkout with benchmarks/bench_step.py, there is none")
    program = ("-m", "benchmarks.bench_step") if (tree / "benchmarks" / "__init__.py").exists() else ("benchmarks/bench_step.py",)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), os.environ.get("PYTHONPATH", "")))}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, *program, "--only", *parts, "--out", scratch, *further]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        results = Path(scratch, "bench_step.json")
        found = json.loads(results.read_text())["results"] if results.exists() else {}
    if not found:
        raise SystemExit(f"{tree}: bench_step measured nothing\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {part.split("/")[0]: result["seconds"]["median"] * 1e3 for part, result in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="+", metavar="CHECKOUT", help="the first one is what the others are compared with")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2, help="of which each case's fastest counts")
    options, further = parser.parse_known_args()
    trees, best = [tree.resolve() for tree in options.trees], {}
    for _ in range(options.rounds):
        for tree in trees:
            found = best.setdefault(tree, {})
            for case, milliseconds in steps_of(tree, options.cases, further).items():
                found[case] = min(milliseconds, found.get(case, milliseconds))
            say(f"{tree}: " + ", ".join(f"{case} {found[case]:.3f}" for case in found))
    first = best[trees[0]]
    rows = [(tree.name, *map(best[tree].get, options.cases)) for tree in trees]
    for tree in trees[1:]:
        ratios = {case: best[tree][case] / first[case] for case in first.keys() & best[tree].keys()}
        rows.append((f"{tree.name} / {trees[0].name}", *map(ratios.get, options.cases)))
    print(table(("ms", *options.cases), rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
