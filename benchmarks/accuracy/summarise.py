"""Tables and pictures of NAME-offline.json and NAME-server.json, and whether a method is better than is possible.

python -m benchmarks.accuracy.summarise --out benchmarks/results --name accuracy
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.accuracy.rows import Comparison, Rows
from benchmarks.accuracy.tables import markdown
from benchmarks.report import RESULTS

MEASURED = ("model", "dtype", "prompts", "seed", "dense_layers")
FACTS = ("device", "torch", "sglang", "commit")


def setup_of(path: Path) -> list[str]:
    """What the results of a file were measured with, each combination once."""
    written = json.loads(path.read_text())
    lines = {}
    for result in written["results"].values():
        run = written["runs"][result["run"]]
        facts = [f"{name.replace('_', ' ')} {result.get(name)}" for name in MEASURED] + [f"{name} {run.get(name)}" for name in FACTS]
        lines[f"{result['half']}: {', '.join(facts)}"] = None
    return list(lines)


def failures_of(path: Path) -> list[str]:
    """What failed in some run and is still not there."""
    written = json.loads(path.read_text())
    failed = {key for run in written["runs"] for key in run.get("failures", {})}
    there = [f"{key}/" for key in written["results"]]  # a cell fails by the beginning of its results' keys
    return sorted(f"{path.stem}: {key}" for key in failed if not any(each.startswith(f"{key}/") for each in there))


def write(directory: Path, name: str) -> list[Comparison]:
    """Write NAME.md and NAME-*.svg from the results in a directory.

    Returns:
        Harness faults: methods that are better than dense attention by more than noise.
    """
    from benchmarks.accuracy.plots import draw  # here: what measures needs no matplotlib until it ends

    paths = [path for half in ("offline", "server") if (path := directory / f"{name}-{half}.json").exists()]
    rows = Rows.read(*paths)
    drawn = draw(rows, directory, name)
    setup, failed = ([line for path in paths for line in of(path)] for of in (setup_of, failures_of))
    (directory / f"{name}.md").write_text(markdown(rows, setup, failed, drawn))
    return rows.faults


def conclude(report, directory: Path, name: str) -> int:
    """Tables and pictures at the end of a run; the exit status."""
    found = write(directory, name)
    status = report.finish(*map(told, found))
    print(f"tables: {directory / name}.md", flush=True)
    return 1 if found else status


def told(fault: Comparison) -> str:
    return f"FAULT better than dense attention: {fault}"


def main() -> int:
    """Exit status: 1 if there are harness faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results, and of what is written")
    parser.add_argument("--name", default="accuracy")
    options = parser.parse_args()
    found = write(options.out, options.name)
    for fault in found:
        print(told(fault))
    print(f"tables: {options.out / options.name}.md")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
