"""A profiled decode step as a picture: two layers of ``bench_step.py --profile``, streams as lanes.

python -m benchmarks.plot_step benchmarks/results/step-32k-b8.json
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path

from sglang_freekv.decode_step import CORRECTING_PROGRAMS

WIDTH, LANE, GAP, LEFT, TOP = 1400, 46, 16, 150, 40
LAYER, LAYERS = 12, 2  # where to begin, and how many: both of the committed step have corrections
COLOURS = {
    "GEMM": "#c9d3df", "other": "#e4e7eb", "append": "#f2b84b", "correction test": "#f2b84b", "digest, offload": "#8f7fc4",
    "score": "#63a375", "plan": "#2f7d4f", "recall": "#c8553d", "attention": "#3a6ea5",
}  # fmt: skip
KINDS = (
    ("_overwrite", "score"),
    ("_append", "append"), ("_needs_correction", "correction test"), ("_digest", "digest, offload"), ("_offload", "digest, offload"),
    ("_score", "score"), ("_norm", "plan"), ("_preselect", "plan"), ("_plan", "plan"), ("_recall", "recall"), ("_attend", "attention"), ("_merge", "attention"), ("nvjet", "GEMM"),
)  # fmt: skip
LANES = ("main", "appends", "selection", "transfers")


def kind_of(name: str) -> str:
    return next((kind for prefix, kind in KINDS if name.startswith(prefix)), "other")


def lanes_of(kernels: list[list]) -> list[tuple[str, str, float, float]]:
    """(lane, kind, begin, length): streams of a graph have no names, so what a kernel is tells its lane."""
    placed, attending = [], False
    for name, _, begin, length, programs in kernels:
        kind = kind_of(name)
        if kind in ("append", "digest, offload"):
            lane = "appends"
        elif kind in ("score", "plan") or kind == "recall" and programs == CORRECTING_PROGRAMS:
            lane = "selection"
        elif name.startswith("_attend") and attending:  # the second of its layer, to what the correction brought
            lane = "selection"
        else:
            lane = "transfers" if kind == "recall" else "main"
        if kind == "attention":
            attending = not name.startswith("_merge")
        placed.append((lane, kind, begin, length))
    return placed


def picture(kernels: list[list]) -> str:
    """SVG of ``LAYERS`` layers; what waits for nothing else on the main lane is exposed."""
    begins = [begin for name, _, begin, *_ in kernels if name.startswith("_score")]
    first, last = begins[LAYER], begins[LAYER + LAYERS]
    scale = (WIDTH - LEFT - 20) / (last - first)
    height = TOP + len(LANES) * (LANE + GAP) + 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22">{LAYERS} layers of a decode step, {last - first:.0f} us</text>',
    ]
    for index, lane in enumerate(LANES):
        y = TOP + index * (LANE + GAP)
        parts.append(f'<text x="12" y="{y + LANE / 2 + 5}">{lane}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="{LANE}" fill="#f7f8fa"/>')
    for lane, kind, begin, length in lanes_of(kernels):
        start, end = max(begin, first), min(begin + length, last)
        if start < end:
            y = TOP + LANES.index(lane) * (LANE + GAP)
            box = f'x="{LEFT + (start - first) * scale:.1f}" y="{y + 3}" width="{max(1, (end - start) * scale):.1f}" height="{LANE - 6}"'
            title = f"<title>{escape(kind)} {length:.1f} us</title>"
            parts.append(f'<rect {box} fill="{COLOURS[kind]}" stroke="white" stroke-width="0.5">{title}</rect>')
    for index, (kind, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + index * 132, height - 40
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="{y + 11}">{kind}</text>')
    return "\n".join((*parts, "</svg>")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=Path, nargs="+", metavar="STEP.json", help="the picture goes beside it")
    for path in parser.parse_args().steps:
        path.with_suffix(".svg").write_text(picture(json.loads(path.read_text())["kernels"]))


if __name__ == "__main__":
    main()
