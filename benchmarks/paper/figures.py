"""The tables and pictures of all figures, from the results alone.

    python benchmarks/paper/figures.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [path for path in (str(Path(__file__).resolve().parent.parent),) if path not in sys.path]

from paper.sections import SECTIONS, Section  # noqa: E402
from report import ROOT, markdown  # noqa: E402
from setups import SHAPES  # noqa: E402

HEAD = """# Speed

What a decode step, an answer and a server's load take, beside other methods and stock SGLang, and what bounds them.
`benchmarks/paper/figures.py` makes this page from the results in `benchmarks/results`; each section begins with the commands that made
them and what they ran on.
[What is measured, and how](../benchmarks/paper/README.md)."""

AT_BOUND = """*At the bound* is what a figure would be if a decode step of FreeKV's took no longer than it must, and all else were as measured: no longer
than the link or the device memory needs for the bytes that it moves at least nor, beside other methods in the same engine, than the floor's step.
For FreeKV / floor it is the floor's step and, behind it, the link's time for what kv heads that turned wait for; only attention to what is
there already runs beside that."""


def sections(results: Path, directory: Path) -> list[Section]:
    """Of all results that are there, with their pictures in ``directory``."""
    paths = [(name, results / f"paper-{name}-{shape}.json") for name in SECTIONS for shape in SHAPES]
    return [SECTIONS[name](path, directory) for name, path in paths if path.exists() and json.loads(path.read_text())["results"]]


def page(made: list[Section]) -> str:
    aims = [aim.row for section in made for aim in section.aims]
    reached = f"## Aims\n\n{AT_BOUND}\n\n" + markdown(("what", "figure", "aim", "reached", "at the bound"), aims)
    return "\n\n".join((HEAD, *([reached] if aims else []), *(section.markdown for section in made))) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="directory of paper-*.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="directory of speed.md and its pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = sections(options.results, options.out)
    if not made:
        parser.error(f"no paper-*.json in {options.results}: measure first, as benchmarks/paper/README.md says")
    (options.out / "speed.md").write_text(page(made))
    print(f"{len(made)} sections: {options.out / 'speed.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
