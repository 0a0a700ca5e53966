"""Pictures of numbers: bars, bars of parts, and curves. Scales are linear unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.patches import Patch

from benchmarks.pictures import DASHES, INK, MARKERS, OTHERS, OURS, name_rows, picture

SHADES = {True: ("#d9480f", "#f08c5a", "#f7c4a8"), False: ("#80868b", "#b0b5ba", "#d8dbde")}  # of parts, by whether a bar is ours
CLIP = 2.6  # of our bar: what is longer is cut, and told by its figure


def bars(path: Path, title: str, unit: str, groups: Mapping[str, Mapping[str, float]], ours: str, log: bool = False) -> None:
    """A panel for each group, a bar for each label in it: ``{group: {label: value}}``.

    Args:
        ours: the label whose bars are in the strong colour.
        log: a logarithmic scale, and no bar is cut.
    """
    labels = list(dict.fromkeys(label for values in groups.values() for label in values))
    with picture(path, title, (2.5 + 2.4 * len(groups), 0.9 + 0.3 * len(labels)), across=len(groups), sharey=True) as (panels,):
        for panel, (group, values) in zip(panels, groups.items()):
            most = None if log or ours not in values else CLIP * values[ours]
            for label, value in values.items():
                shown = value if most is None else min(value, most)
                where = labels.index(label)
                panel.barh(where, shown, height=0.72, color=OURS if label == ours else OTHERS)
                _tell(panel, shown, where, value, cut=shown < value, strong=label == ours)
            if log:
                panel.set_xscale("log")
                panel.set_xlim(1, panel.get_xlim()[1] * 4)  # room for the figures
            else:
                panel.set_xlim(0, 1.25 * (most or max(values.values())))
            panel.set_title(group, fontsize=10)
            panel.set_xlabel(unit, fontsize=9)
            panel.tick_params(axis="x", labelsize=8)
        name_rows(panels[0], labels)


def stacks(
    path: Path, title: str, unit: str, parts: Sequence[str], rows: Mapping[str, Sequence[float]], marks: Mapping[str, float], ours: str
) -> None:
    """A bar for each row, its parts end to end; the last part is beside the others in time, so an outline. ``marks`` cross a bar."""
    most = CLIP * sum(rows[ours][:-1]) if ours in rows else max(map(sum, rows.values()))
    with picture(path, title, (9, 1.1 + 0.33 * len(rows))) as ((panel,),):
        for where, (label, values) in enumerate(rows.items()):
            shades, left = SHADES[label == ours], 0.0
            for number, value in enumerate(values):
                width = max(0.0, min(value, most - left))
                outline = {"facecolor": "none", "edgecolor": shades[0], "hatch": "////", "linewidth": 0}
                panel.barh(where, width, left=left, height=0.7, **({"color": shades[number]} if number < len(shades) else outline))
                left += width
            whole = sum(values[:-1])
            _tell(panel, left, where, whole, cut=whole > most, strong=label == ours)
            if label in marks and marks[label] < most:
                panel.plot([marks[label]] * 2, [where - 0.42, where + 0.42], color="black", linewidth=1.6)
        panel.set_xlim(0, 1.12 * most)
        panel.set_xlabel(unit, fontsize=9)
        name_rows(panel, list(rows))
        grey = SHADES[False]
        keys = [Patch(color=shade, label=part) for shade, part in zip(grey, parts)]
        keys += [Patch(facecolor="none", edgecolor=grey[0], hatch="////", label=parts[-1]), Patch(color="black", label="least time (line)")]
        panel.legend(handles=keys, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=len(keys), frameon=False)


def curves(
    path: Path,
    title: str,
    across: str,
    unit: str,
    lines: Mapping[tuple[str, str], Sequence[tuple[float, float]]],
    ours: str,
    doubling: bool = False,
    diagonal: str | None = None,
) -> None:
    """Points joined by lines: ``{(system, what): points}``, where ``what`` sets dashes and markers.

    Args:
        doubling: the horizontal scale has a step for each doubling.
        diagonal: names the line where both are the same.
    """
    kinds = list(dict.fromkeys(what for _, what in lines))
    with picture(path, title, (8, 4.2)) as ((panel,),):
        for (system, what), points in lines.items():
            style = kinds.index(what) % len(DASHES)
            strong = {"color": OURS, "linewidth": 2.4, "zorder": 3} if system == ours else {"color": OTHERS, "linewidth": 1.8}
            label = f"{system}, {what}" if what else system
            panel.plot(*zip(*sorted(points)), linestyle=DASHES[style], marker=MARKERS[style], label=label, **strong)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        if diagonal:
            panel.plot(ticks, ticks, color="#c0c4c8", linestyle=":", linewidth=1, label=diagonal)
        if doubling:
            panel.set_xscale("log", base=2)
            panel.minorticks_off()
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", alpha=0.25)
        panel.set(xlabel=across, ylabel=unit)
        panel.legend(fontsize=8, frameon=False)


def _tell(panel, x: float, y: float, value: float, cut: bool, strong: bool) -> None:
    """The figure at the end of a bar."""
    text = f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
    style = {"color": OURS, "weight": "bold"} if strong else {"color": INK}
    panel.annotate(f"{'» ' if cut else ''}{text}", (x, y), (3, 0), textcoords="offset points", va="center", fontsize=8, **style)
