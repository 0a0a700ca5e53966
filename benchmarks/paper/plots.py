"""Pictures of numbers, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import LogLocator, NullLocator  # noqa: E402

HATCHED = dict(hatch="////", facecolor="none", edgecolor="grey", linewidth=0)
MARKERS = "osv^Dxp*"


@contextmanager
def _picture(path: Path, title: str, size: tuple[float, float]):
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    try:
        yield axes
        figure.savefig(path, dpi=110, metadata={"Software": None})
    finally:
        pyplot.close(figure)


def groups(path: Path, title: str, unit: str, values: Mapping[str, Mapping[str, float]]) -> None:
    """Bars side by side, on a logarithmic scale: ``{series: {group: value}}``."""
    names = list(dict.fromkeys(name for series in values.values() for name in series))
    width = 0.86 / len(values)
    with _picture(path, title, (11, 4.5)) as axes:
        for number, (label, series) in enumerate(values.items()):
            where = [names.index(name) + (number - (len(values) - 1) / 2) * width for name in series]
            axes.bar(where, list(series.values()), width, label=label, color=pyplot.colormaps["tab20"](number % 20))
        axes.set_xticks(range(len(names)), names)
        axes.set(yscale="log", ylabel=unit)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(fontsize=8, ncols=min(6, len(values)), loc="upper center", bbox_to_anchor=(0.5, -0.08))


def stacks(
    path: Path, title: str, unit: str, parts: Sequence[str], bars: Mapping[str, Sequence[float]], marks: Mapping[str, float]
) -> None:
    """A bar for each row, parts end to end; the last part is not in the sum, and ``marks`` are lines across a bar: what bounds it."""
    with _picture(path, title, (9, 0.8 + 0.42 * len(bars))) as axes:
        axes.grid(axis="x", alpha=0.3)
        left = [0.0] * len(bars)
        for number, part in enumerate(parts):
            widths = [values[number] for values in bars.values()]
            style = HATCHED if number == len(parts) - 1 else {"color": pyplot.colormaps["tab10"](number)}
            axes.barh(list(bars), widths, left=left, label=part, height=0.7, **style)
            left = [a + b for a, b in zip(left, widths)]
        where = [list(bars).index(name) for name in marks]
        axes.scatter(list(marks.values()), where, marker="|", s=300, color="black", zorder=3, label="bound")
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.legend(fontsize=8)


def curves(
    path: Path, title: str, across: str, unit: str, lines: Mapping[str, Sequence[tuple[float, float]]], diagonal: str | None = None
) -> None:
    """Points joined by lines, both scales logarithmic to the base 2; ``diagonal`` names the line where both are the same."""
    with _picture(path, title, (8, 4.5)) as axes:
        for number, (label, points) in enumerate(lines.items()):
            axes.plot(*zip(*sorted(points)), marker=MARKERS[number % len(MARKERS)], label=label)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        if diagonal:
            axes.plot(ticks, ticks, color="grey", linestyle=":", label=diagonal)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel=across, ylabel=unit)
        axes.legend(fontsize=8)
