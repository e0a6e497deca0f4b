"""A picture of predicted against measured step times, a point a run, as SVG that needs nothing to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

COLOURS = (
    "#1b6ca8",
    "#d1495b",
    "#3a7d44",
    "#8d5a97",
    "#e08e45",
    "#4a4e69",
    "#00798c",
    "#b56576",
    "#6a994e",
    "#343a40",
    "#9c6644",
    "#5e60ce",
)
SIZE, MARGIN, LEGEND = 640, 60, 260
BANDS = ((1.0, "#888"), (1.2, "#ccc"), (1 / 1.2, "#ccc"))
"""Lines: equal, and 20% off to either side."""


def scatter(points: Sequence[tuple[str, float, float]], title: str) -> str:
    """`points`: (series, measured, predicted), both in the same unit, drawn on logarithmic axes.

    >>> scatter([("a", 1.0, 1.1)], "t").startswith("<svg")
    True
    """
    values = [value for _, *pair in points for value in pair if value > 0] or [1.0]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    high = max(high, low + 1)
    span = SIZE - 2 * MARGIN

    def place(value: float) -> float:
        return MARGIN + span * (log10(value) - low) / (high - low)

    series = list(dict.fromkeys(name for name, *_ in points))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE + LEGEND}" height="{SIZE}" font-family="sans-serif" font-size="12">',
        f'<rect width="{SIZE + LEGEND}" height="{SIZE}" fill="white"/><text x="{MARGIN}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        at = place(10.0**power)
        out.append(f'<path d="M{at:.1f} {MARGIN}V{SIZE - MARGIN}M{MARGIN} {SIZE - at:.1f}H{SIZE - MARGIN}" stroke="#eee"/>')
        out.append(f'<text x="{at:.1f}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{10.0**power:g}</text>')
        out.append(f'<text x="{MARGIN - 8}" y="{SIZE - at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for factor, colour in BANDS:
        shift = span * log10(factor) / (high - low)
        start = max(0.0, -shift), max(0.0, shift)
        length = span - abs(shift)
        x0, y0 = MARGIN + start[0], SIZE - MARGIN - start[1]
        out.append(f'<path d="M{x0:.1f} {y0:.1f}l{length:.1f} {-length:.1f}" stroke="{colour}"/>')
    for name, measured, predicted in points:
        if measured > 0 and predicted > 0:
            colour = COLOURS[series.index(name) % len(COLOURS)]
            out.append(
                f'<circle cx="{place(measured):.1f}" cy="{SIZE - place(predicted):.1f}" r="2.2" fill="{colour}" fill-opacity="0.55"/>'
            )
    for index, name in enumerate(series):
        y = MARGIN + 18 * index
        out.append(f'<circle cx="{SIZE}" cy="{y}" r="4" fill="{COLOURS[index % len(COLOURS)]}"/>')
        out.append(f'<text x="{SIZE + 10}" y="{y + 4}">{escape(name)}</text>')
    out.append(f'<text x="{SIZE / 2}" y="{SIZE - 14}" text-anchor="middle">measured seconds a step</text>')
    out.append(f'<text transform="translate(16 {SIZE / 2}) rotate(-90)" text-anchor="middle">predicted seconds a step</text></svg>')
    return "\n".join(out) + "\n"
