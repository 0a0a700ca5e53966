"""A section of the page: what one results file says, in markdown, with pictures, and what was to be reached."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .names import BACKENDS, EARLIER, SHAPES, TITLED

SOFTWARE = ("python", "torch", "triton", "sglang")


@dataclass(frozen=True)
class Aim:
    """What was to be reached.

    Args:
        found: the figure, None where it was not measured.
        least: whether ``aim`` is the least, or the most.
        possible: the figure if FreeKV's steps took as little as they can, and all else what it took.
    """

    what: str
    found: float | None
    aim: float
    least: bool
    possible: float | None = None

    @property
    def row(self) -> tuple:
        bound = f"{'at least' if self.least else 'at most'} {self.aim:g}"
        reached = None if self.found is None else "yes" if (self.found >= self.aim) == self.least or self.found == self.aim else "NO"
        return self.what, self.found, bound, reached, self.possible


@dataclass
class Section:
    """Of one results file.

    Args:
        figure: what it shows.
        name: of the file, ``paper-FIGURE-SHAPE`` or ``paper-FIGURE-SHAPE-SUFFIX``, which the pictures' names begin with.
        written: the file's content.
        directory: takes the pictures.
        facts: what the takeaways tell of it.
    """

    figure: str
    name: str
    written: dict
    directory: Path
    parts: list[str] = field(default_factory=list)
    aims: list[Aim] = field(default_factory=list)
    facts: dict = field(default_factory=dict)

    @classmethod
    def of(cls, figure: str, path: Path, directory: Path) -> Section:
        return cls(figure, path.stem, json.loads(path.read_text()), directory)

    @property
    def key(self) -> str:
        """SHAPE or SHAPE-SUFFIX of the file's name."""
        return self.name.split("-", 2)[2]

    @property
    def is_earlier(self) -> bool:
        """Whether its code is from before that of other sections."""
        return self.name.removeprefix("paper-") in EARLIER

    @property
    def title(self) -> str:
        told = TITLED.get(self.name.removeprefix("paper-"), "")
        return f"{self.figure}{told}{', earlier code' * self.is_earlier}: {self.shape}"

    @property
    def shape(self) -> str:
        return SHAPES.get(self.shape_key or "", self.key)

    @property
    def shape_key(self) -> str | None:
        """Of ``SHAPES``; None for a shape without a title."""
        return next((shape for shape in SHAPES if f"{self.key}-".startswith(f"{shape}-")), None)

    @property
    def results(self) -> dict:
        return self.written["results"]

    def ceilings(self, result: dict) -> dict[str, float]:
        """Bytes per second that were measured in the run that made ``result``."""
        return self.written["runs"][result["run"]]["ceilings"]

    def devices(self, results: Iterable[dict]) -> str:
        """Of the runs that made ``results``, each once."""
        runs = sorted({result["run"] for result in results})
        return " and ".join(dict.fromkeys(self.written["runs"][run]["device"] for run in runs))

    def backend(self, result: dict, system: str) -> str | None:
        """The attention backend that the server of ``result`` was started with; None where the run does not tell."""
        words = self.written["runs"][result["run"]].get(f"server {system}", {}).get("command", "").split()
        given = [value for flag, value in zip(words, words[1:]) if flag == "--attention-backend"]
        return BACKENDS.get(given[-1], given[-1]) if given else None

    def add(self, *parts: str) -> None:
        self.parts += parts

    def picture(self, ending: str, draw: Callable, *arguments, **options) -> None:
        path = self.directory / f"{self.name}-{ending}.png"
        draw(path, *arguments, **options)
        self.add(f"![{ending}]({path.name})")

    @property
    def markdown(self) -> str:
        return "\n\n".join((f"## {self.title}", *self.parts))

    @property
    def used(self) -> list[dict]:
        """The runs that made the results."""
        return [self.written["runs"][number] for number in sorted({result["run"] for result in self.results.values()})]

    @property
    def sources(self) -> list[tuple]:
        """By what command and on what the results were made, each combination once: rows of the page's last table."""
        rows = [(self.name, _commands(run), *_made(run)) for run in self.used]
        return list(dict.fromkeys(rows))

    @property
    def software(self) -> list[str]:
        return list(dict.fromkeys(", ".join(f"{name} {run[name]}" for name in SOFTWARE if name in run) for run in self.used))


def _commands(run: dict) -> str:
    """What was typed: one command, or those of processes that nothing but their run's id joins."""
    typed = [run["command"]] if "benchmarks.paper.run" in run["command"] else run.get("commands", [run["command"]])
    return ", ".join(f"`{command}`" for command in typed)


def _made(run: dict) -> tuple[str | None, str | None, str | None]:
    """On what, of which commit, and when."""
    device = f"{run['device']}, {run['cores']} cores" if "cores" in run else run.get("device")
    commit = run.get("commit")
    return device, commit and commit + ("-dirty" if run.get("dirty") else ""), run.get("date", "").split("T")[0] or None


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
