"""What all pictures share: FreeKV in the one strong colour, all else in greys, and files that come out the same again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot

OURS, OTHERS, INK = "#d9480f", "#9aa0a6", "#333333"
DASHES, MARKERS = ("-", "--", ":", "-."), "os^D"

matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "sglang_freekv"}  # words as words; the same names of parts in every run


@contextmanager
def picture(path: Path, title: str, size: tuple[float, float], down: int = 1, across: int = 1, **grid) -> Iterator[np.ndarray]:
    """Panels ``[down, across]`` to draw on, saved to ``path``, an SVG or a PNG by its name.

    Args:
        size: width and height in inches.
        grid: more for ``pyplot.subplots``.
    """
    figure, axes = pyplot.subplots(down, across, figsize=size, layout="constrained", squeeze=False, **grid)
    figure.suptitle(title, fontsize=11)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    try:
        yield axes
        figure.savefig(path, dpi=110, metadata={"Date" if path.suffix == ".svg" else "Software": None})
    finally:
        pyplot.close(figure)


def name_rows(panel, labels: list[str], size: float = 9) -> None:
    """Rows of a panel from its top down."""
    panel.set_yticks(range(len(labels)), labels, fontsize=size)
    panel.set_ylim(len(labels) - 0.4, -0.6)
