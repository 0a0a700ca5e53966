"""The pages of speed and of the papers' figures, from the results alone.

python -m benchmarks.paper.figures
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.accuracy.page import filled
from benchmarks.paper import papers, texts
from benchmarks.paper.sections import SECTIONS, Section
from benchmarks.paper.sections.names import EARLIER
from benchmarks.paper.takeaways import takeaways
from benchmarks.report import ROOT, markdown
from benchmarks.setups import SHAPES, Setup

PAPERS = ROOT / "docs" / "papers.md"


def sections(results: Path, directory: Path) -> list[Section]:
    """Of all results that are there, with their pictures in ``directory``."""
    shapes = sorted(SHAPES, key=lambda shape: shape != Setup.shape)
    paths = [(name, path) for name in SECTIONS for shape in shapes for path in _files(results, f"paper-{name}-{shape}")]
    return [SECTIONS[name](path, directory) for name, path in paths if json.loads(path.read_text())["results"]]


def _files(results: Path, name: str) -> list[Path]:
    """The main one first, then those that ``--suffix`` named, and of these earlier code's last."""
    others = sorted(results.glob(f"{name}-*.json"), key=lambda path: (path.stem.removeprefix("paper-") in EARLIER, path))
    return [*results.glob(f"{name}.json"), *others]


def page(made: list[Section]) -> str:
    """Takeaways, what was measured, the sections, the aims, and what made the results."""
    told = takeaways(made)
    first = next((number for number, section in enumerate(made) if "answers" in section.facts), len(made))
    servers, engine = made[:first], made[first:]
    parts = [
        texts.HEAD,
        *([f"## Takeaways\n\n{told}"] if told else []),
        texts.measured(),
        *(section.markdown for section in servers),
        *([texts.NOTES] if engine else []),
        *(section.markdown for section in engine),
        *_aims(made),
        _reproduce(made),
    ]
    return "\n\n".join(parts) + "\n"


def _aims(made: list[Section]) -> list[str]:
    aims = [aim.row for section in made for aim in section.aims]
    return [texts.AIMS, markdown(("what", "figure", "aim", "reached", "possible"), aims)] if aims else []


def _reproduce(made: list[Section]) -> str:
    software = dict.fromkeys(line for section in made for line in section.software)
    rows = [row for section in made for row in section.sources]
    told = texts.REPRODUCE.format(software="; ".join(software))
    return told + "\n\n" + markdown(("file", "command", "device", "commit", "date"), rows, words=5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="directory of paper-*.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="directory of speed.md, its pictures, and papers.md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = sections(options.results, options.out)
    if not made:
        parser.error(f"no paper-*.json in {options.results}: measure first, as benchmarks/paper/README.md says")
    (options.out / "speed.md").write_text(page(made))
    print(f"{len(made)} sections: {options.out / 'speed.md'}")
    try:
        told = filled(PAPERS.read_text(), papers.tables(options.results))
    except (FileNotFoundError, KeyError) as error:
        print(f"papers.md was not made, because a result is missing: {error}")
        return 0
    (options.out / PAPERS.name).write_text(told)
    print(f"{len(papers.TABLES)} tables: {options.out / PAPERS.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
