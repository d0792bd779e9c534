"""The figure of recipes/compare.py: a panel for each network, extra time against the true peak; SVG, light and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape

from lib.compared_networks import NETWORKS
from lib.comparison import EXACT, FULL, Row, cheapest, networks, ratio_of, share
from lib.other_methods import BLOCKS, INDUCTOR, INDUCTOR_BUDGET, PARTITIONER, SEGMENTS

WIDTH, HEIGHT, COLUMNS = 250, 190, 4  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 38, 18, 26, 30  # around a panel's axes
LEGEND = 46
MOST = 1.5  # extra time at the upper edge at most, and
WIDEST = 1.25  # share of eager's peak at the right one: marks outside are drawn at the edge, open
SERIES = (  # name, methods, color, mark, whether its points are joined; colors are legible on white and on black
    ("checkpoint: each block, sqrt(n)", (BLOCKS, SEGMENTS), "#8a63d2", "square", False),
    ("activation_memory_budget", (PARTITIONER,), "#d9772b", "triangle", True),
    ("inductor, with and without it", (INDUCTOR, INDUCTOR_BUDGET), "#7d8590", "cross", False),
    ("monetrun", (FULL, EXACT), "#1a8fb8", "circle", True),
)
CAPTION = "extra time of a step against its true peak, % of eager's"
STYLE = "@media (prefers-color-scheme: dark) { text { fill: #d0d7de } }"


def drawn(document: Mapping[str, object]) -> dict[str, dict[str, list[list[float]]]]:
    """For each network and series the shares of eager's peak and the extra times of its marks."""
    return {
        name: {
            title: [[round(share(r, rows), 4), round(ratio_of(r) - 1, 4)] for r in _points(rows, methods)]
            for title, methods, *_ in SERIES
        }
        for name, rows in networks(document).items()
    }


def _points(rows: Sequence[Row], methods: Sequence[str]) -> list[Row]:
    """The points that one would use; of several methods without a budget, each one's."""
    if FULL in methods:
        return cheapest(rows, *methods)
    return [r for m in methods for r in cheapest(rows, m)]


def figure(document: Mapping[str, object]) -> str:
    """The SVG; its description has all that is drawn as JSON."""
    found = drawn(document)
    width = WIDTH * max(3, min(COLUMNS, len(found)))
    height = LEGEND + HEIGHT * math.ceil(len(found) / COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="11" fill="#57606a">',
        f"<title>{CAPTION}</title>",
        f"<desc>{escape(json.dumps(found))}</desc>",
        f"<style>{STYLE}</style>",
        *_legend(),
    ]
    for i, (name, series) in enumerate(found.items()):
        x, y = WIDTH * (i % COLUMNS), LEGEND + HEIGHT * (i // COLUMNS)
        parts += [f'<g transform="translate({x} {y})">', *_panel(NETWORKS[name].title, series), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts, x = [], 14
    for title, _, color, shape, _ in SERIES:
        parts += [_mark(shape, color, x, 15), f'<text x="{x + 10}" y="19">{title}</text>']
        x += 34 + round(5.6 * len(title))
    return [*parts, f'<text x="10" y="37">{CAPTION}</text>']


def _panel(title: str, series: Mapping[str, list[list[float]]]) -> list[str]:
    every = [point for points in series.values() for point in points]
    top = min(MOST, max([0.2, *(e for _, e in every)]) * 1.08)
    bottom = min([0.0, *(e for _, e in every)]) * 1.08
    right = min(WIDEST, max([1.0, *(s for s, _ in every)]))

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(value, right) / right, 1)

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (top - min(value, top)) / (top - bottom), 1)

    parts = [f'<text font-weight="600" font-size="12" x="{LEFT}" y="16">{escape(title)}</text>']
    step = next(s for s in (0.1, 0.25, 0.5, 1.0) if (top - bottom) / s <= 5)
    for k in range(math.ceil(bottom / step), math.floor(top / step) + 1):
        at = y(k * step)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, 0.25 if k else 0.9))
        label = f"{100 * k * step:+.0f}%" if k else "0"
        parts.append(f'<text text-anchor="end" x="{LEFT - 5}" y="{at + 4:g}">{label}</text>')
    for percent in (25, 50, 75, 100):
        at = x(percent / 100)
        parts.append(_line(at, TOP, at, HEIGHT - BOTTOM, 0.25))
        parts.append(f'<text text-anchor="middle" x="{at}" y="{HEIGHT - BOTTOM + 14}">{percent}%</text>')
    for (_, _, color, shape, joined), points in zip(SERIES, series.values(), strict=True):
        if joined and len(points) > 1:
            line = " ".join(f"{x(s)},{y(e)}" for s, e in points)
            parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{line}"/>')
        parts += [_mark(shape, color, x(s), y(e), hollow=e > top or s > right) for s, e in points]
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, opacity: float) -> str:
    return f'<line stroke="#888" stroke-opacity="{opacity}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _mark(shape: str, color: str, x: float, y: float, hollow: bool = False) -> str:
    fill = "none" if hollow or shape == "cross" else color
    paint = f'class="{shape}" stroke="{color}" stroke-width="1.6" fill="{fill}"'
    if shape == "circle":
        return f'<circle {paint} cx="{x}" cy="{y}" r="3.4"/>'
    paths = {
        "square": f"M{x - 3.2:g},{y - 3.2:g}h6.4v6.4h-6.4z",
        "triangle": f"M{x:g},{y - 4:g}l4,7h-8z",
        "cross": f"M{x - 3.2:g},{y - 3.2:g}l6.4,6.4m0,-6.4l-6.4,6.4",
    }
    return f'<path {paint} d="{paths[shape]}"/>'
