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
LEFT, RIGHT, TOP, BOTTOM = 38, 12, 26, 30  # around a panel's axes
LEGEND = 34
MOST = 1.5  # extra time at the upper edge at most; points above are drawn there, open
SERIES = (  # name, methods, class, marker's shape, whether its points are joined
    ("checkpoint: each block, sqrt(n)", (BLOCKS, SEGMENTS), "checkpoint", "square", False),
    ("activation_memory_budget", (PARTITIONER,), "budget", "triangle", True),
    ("inductor, with and without", (INDUCTOR, INDUCTOR_BUDGET), "inductor", "cross", False),
    ("monetrun", (FULL, EXACT), "monetrun", "circle", True),
)
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333 }
.title { font-weight: 600; font-size: 12px }
.grid { stroke: #888; stroke-opacity: .25 }
.axis { stroke: #888 }
.mark { stroke-width: 1.6; fill-opacity: .9 }
.line { fill: none; stroke-width: 1.6; stroke-opacity: .8 }
.checkpoint { stroke: #8a63d2; fill: #8a63d2 }
.budget { stroke: #d9772b; fill: #d9772b }
.inductor { stroke: #7d8590; fill: none }
.monetrun { stroke: #1a8fb8; fill: #1a8fb8 }
.line, .open { fill: none }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
"""


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
    lines = math.ceil(len(found) / COLUMNS)
    width, height = WIDTH * min(COLUMNS, max(1, len(found))), LEGEND + HEIGHT * lines
    width = max(width, 620)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<title>Extra time of a training step against its true peak</title>",
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
    for title, _, kind, shape, _ in SERIES:
        parts += [_mark(shape, kind, x, 15), f'<text x="{x + 10}" y="19">{title}</text>']
        x += 30 + round(6.1 * len(title))
    return parts


def _panel(title: str, series: Mapping[str, list[list[float]]]) -> list[str]:
    extra = [e for points in series.values() for _, e in points]
    top = min(MOST, max([0.2, *extra]) * 1.08)
    bottom = min([0.0, *extra]) * 1.08
    right = max([1.0, *(s for points in series.values() for s, _ in points)])
    right = min(right, 1.25)
    inner = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(value: float) -> float:
        return round(LEFT + inner[0] * min(value, right) / right, 1)

    def y(value: float) -> float:
        return round(TOP + inner[1] * (top - min(value, top)) / (top - bottom), 1)

    parts = [f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>']
    step = next(s for s in (0.1, 0.25, 0.5, 1.0) if (top - bottom) / s <= 5)
    for k in range(math.ceil(bottom / step), math.floor(top / step) + 1):
        kind = "axis" if k == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(k * step)}" y2="{y(k * step)}"/>')
        label = f"{100 * k * step:+.0f}%" if k else "0"
        parts.append(f'<text text-anchor="end" x="{LEFT - 5}" y="{y(k * step) + 4}">{label}</text>')
    for percent in (25, 50, 75, 100):
        at = x(percent / 100)
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text text-anchor="middle" x="{at}" y="{HEIGHT - BOTTOM + 14}">{percent}%</text>')
    for (_, _, kind, shape, joined), points in zip(SERIES, series.values(), strict=True):
        if joined and len(points) > 1:
            line = " ".join(f"{x(s)},{y(e)}" for s, e in points)
            parts.append(f'<polyline class="{kind} line" points="{line}"/>')
        for s, e in points:
            outside = " open" if e > top or s > right else ""
            parts.append(_mark(shape, kind + outside, x(s), y(e)))
    return parts


def _mark(shape: str, kind: str, x: float, y: float) -> str:
    if shape == "circle":
        return f'<circle class="mark {kind}" cx="{x}" cy="{y}" r="3.4"/>'
    paths = {
        "square": f"M{x - 3.2},{y - 3.2}h6.4v6.4h-6.4z",
        "triangle": f"M{x},{y - 4}l4,7h-8z",
        "cross": f"M{x - 3.2},{y - 3.2}l6.4,6.4m0,-6.4l-6.4,6.4",
    }
    return f'<path class="mark {kind}" d="{paths[shape]}"/>'
