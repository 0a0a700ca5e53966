"""Pictures as plain SVG: lines over numbers, and maps of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 460, 70, 44, 230, 56
INSET = 40
COLOURS = ("#3a6ea5", "#c8553d", "#2f7d4f", "#8f7fc4", "#f2b84b", "#4aa3a2", "#b5651d", "#7a7f87", "#d46a9f", "#5b8c2a")
DASHES = ("", "6 3", "2 3", "9 3 2 3")
SCALE = ((247, 251, 255), (107, 174, 214), (8, 48, 107))  # light is low


@dataclass(frozen=True)
class Line:
    """A series: ``points`` of (x, y), or (x, y, low, high) with the ends of an interval."""

    name: str
    points: Sequence[tuple[float, ...]]


def document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="12">'
    ground = f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>'
    return "\n".join((head, ground, text(14, 22, title, size=14), *parts, "</svg>")) + "\n"


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def lines(title: str, x_name: str, y_name: str, series: Sequence[Line], y_range: tuple[float, float] = (0, 1), even: bool = False) -> str:
    """Lines of one plot.

    Args:
        even: the values of x are as far apart from each other, whatever they are, and the lines' points stand side by side there.
    """
    ticks = sorted({point[0] for line in series for point in line.points})
    low, high = y_range
    span = (len(ticks) - 1 if even else ticks[-1] - ticks[0]) or 1

    def across(x: float, number: float = 0) -> float:
        place = LEFT + INSET + (ticks.index(x) if even else x - ticks[0]) / span * (WIDTH - LEFT - RIGHT - 2 * INSET)
        return place + even * (number / max(1, len(series) - 1) - 0.5) * INSET

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for step in range(6):
        y = low + (high - low) * step / 5
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(y):.1f}" y2="{down(y):.1f}" stroke="#e4e7eb"/>')
        parts.append(text(LEFT - 8, down(y) + 4, f"{y:.2g}", "end"))
    middle = (len(series) - 1) / 2
    parts += [text(across(x, middle), HEIGHT - BOTTOM + 18, f"{x:g}", "middle") for x in ticks[:: -(-len(ticks) // 16)]]
    parts += [text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_name, "middle"), text(14, TOP - 6, y_name)]
    for number, line in enumerate(series):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        drawn = " ".join(f"{across(point[0], number):.1f},{down(point[1]):.1f}" for point in line.points)
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{drawn}" fill="none" {style}/>')
        for x, y, *ends in line.points:
            shown, at = f"{line.name}, {x:g}: {y:.3f}", across(x, number)
            if ends:
                shown += f" [{ends[0]:.3f}, {ends[1]:.3f}]"
                place = f'x1="{at:.1f}" x2="{at:.1f}" y1="{down(ends[0]):.1f}" y2="{down(ends[1]):.1f}"'
                parts.append(f'<line {place} stroke="{colour}" stroke-opacity="0.45"/>')
            parts.append(f'<circle cx="{at:.1f}" cy="{down(y):.1f}" r="3" fill="{colour}"><title>{escape(shown)}</title></circle>')
        y = TOP + 4 + number * 17
        at = f'x1="{WIDTH - RIGHT + 14}" x2="{WIDTH - RIGHT + 42}" y1="{y}" y2="{y}"'
        parts += [f"<line {at} {style}/>", text(WIDTH - RIGHT + 48, y + 4, line.name)]
    return document(WIDTH, max(HEIGHT, TOP + 20 + 17 * len(series)), title, parts)


def colour_of(share: float) -> str:
    """Of 0, light, to 1, dark."""
    place = min(max(share, 0.0), 1.0) * (len(SCALE) - 1)
    first = min(int(place), len(SCALE) - 2)
    mixed = (round(a + (b - a) * (place - first)) for a, b in zip(SCALE[first], SCALE[first + 1]))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def maps(title: str, panels: Sequence[tuple[str, str, Sequence[Sequence[float | None]]]], low: float, high: float, cell: int = 12) -> str:
    """Maps below each other, each of (name, what its columns are, values by row); None stays blank.

    Args:
        low, high: ends of the scale of colours.
    """
    parts, y, width = [], TOP + 40, WIDTH
    for step in range(11):
        value = low + (high - low) * step / 10
        parts.append(f'<rect x="{LEFT + step * 40}" y="{TOP}" width="40" height="12" fill="{colour_of(step / 10)}"/>')
        parts.append(text(LEFT + step * 40 + 20, TOP + 26, f"{value:.2g}", "middle", 10))
    for name, columns, rows in panels:
        parts.append(text(LEFT, y + 14, f"{name}: layers down, {columns} across"))
        y += 22
        for number, row in enumerate(rows):
            if number % max(1, len(rows) // 8) == 0:
                parts.append(text(LEFT - 6, y + cell - 2, str(number), "end", 10))
            for column, value in enumerate(row):
                if value is not None:
                    box = f'x="{LEFT + column * cell}" y="{y}" width="{cell}" height="{cell}"'
                    fill = colour_of((value - low) / (high - low))
                    parts.append(f'<rect {box} fill="{fill}"><title>layer {number}, {column}: {value:.3f}</title></rect>')
            y += cell
        width, y = max(width, LEFT + 20 + cell * max(map(len, rows), default=0)), y + 12
    return document(width, y + 10, title, parts)
