"""A section of the page: what one results file says, in markdown, with pictures, and what was to be reached."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

FACTS = ("device", "cores", "python", "torch", "triton", "sglang", "commit")
TITLES = {"llama-3.1-8b": "Llama-3.1-8B", "qwen2.5-7b": "Qwen2.5-7B", "qwen3-8b": "Qwen3-8B"}


@dataclass(frozen=True)
class Aim:
    """What was to be reached.

    Args:
        found: the figure, None where it was not measured.
        least: whether ``aim`` is the least, or the most.
        at_bound: the figure if FreeKV's steps took as long as they must, and all else what it took.
    """

    what: str
    found: float | None
    aim: float
    least: bool
    at_bound: float | None = None

    @property
    def row(self) -> tuple:
        bound = f"{'at least' if self.least else 'at most'} {self.aim:g}"
        reached = None if self.found is None else "yes" if (self.found >= self.aim) == self.least or self.found == self.aim else "NO"
        return self.what, self.found, bound, reached, self.at_bound


@dataclass
class Section:
    """Of one results file.

    Args:
        figure: what it shows.
        name: of the file, ``paper-FIGURE-SHAPE``, which the pictures' names begin with.
        written: the file's content.
        directory: takes the pictures.
    """

    figure: str
    name: str
    written: dict
    directory: Path
    parts: list[str] = field(default_factory=list)
    aims: list[Aim] = field(default_factory=list)

    @classmethod
    def of(cls, figure: str, path: Path, directory: Path) -> Section:
        return cls(figure, path.stem, json.loads(path.read_text()), directory)

    @property
    def shape(self) -> str:
        shape = self.name.split("-", 2)[2]
        return TITLES.get(shape, shape)

    @property
    def results(self) -> dict:
        return self.written["results"]

    def ceilings(self, result: dict) -> dict[str, float]:
        """Bytes per second that were measured in the run that made ``result``."""
        return self.written["runs"][result["run"]]["ceilings"]

    def add(self, *parts: str) -> None:
        self.parts += parts

    def picture(self, ending: str, draw: Callable, *arguments, **options) -> None:
        path = self.directory / f"{self.name}-{ending}.png"
        draw(path, *arguments, **options)
        self.add(f"![{ending}]({path.name})")

    @property
    def markdown(self) -> str:
        return "\n\n".join((f"## {self.figure}: {self.shape}", self.sources, *self.parts))

    @property
    def sources(self) -> str:
        """By what command and on what the results were made, each combination once."""
        used = [self.written["runs"][number] for number in sorted({result["run"] for result in self.results.values()})]
        lines = {f"`{run['command']}`: " + ", ".join(f"{fact} {run.get(fact)}" for fact in FACTS): None for run in used}
        return "\n".join(f"- {line}" for line in lines)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
