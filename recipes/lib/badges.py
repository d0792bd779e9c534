"""The README's badges, drawn from what setup.py says, so that they are true and need no server."""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

_HEIGHT, _GAP, _PER_LETTER, _MARGIN = 20, 6, 6.4, 6
_LABEL, _VALUE = "#4a4f55", "#1f6f8b"


def facts(setup: str) -> list[tuple[str, str]]:
    """Name and value of each badge.

    Args:
        setup: the text of setup.py.
    """
    call = next(n for n in ast.walk(ast.parse(setup)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "setup")
    wanted = ("license", "classifiers", "install_requires")
    said = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg in wanted}
    classes = [c.split(" :: ") for c in said["classifiers"]]
    pythons = [c[-1] for c in classes if c[:2] == ["Programming Language", "Python"] and "." in c[-1]]
    (torch,) = (r.removeprefix("torch>=") for r in said["install_requires"] if r.startswith("torch>="))
    return [
        ("Python", ", ".join(pythons)),
        ("torch", f"{torch} or newer"),
        ("system", next(c[-1] for c in classes if c[0] == "Operating System")),
        ("types", "included" if ["Typing", "Typed"] in classes else "none"),
        ("licence", said["license"]),
    ]


def draw(found: list[tuple[str, str]]) -> str:
    """An SVG image with a badge for each name and value, in a row."""
    parts, x = [], 0.0
    for pair in found:
        for text, colour in zip(pair, (_LABEL, _VALUE), strict=True):
            inside = _PER_LETTER * len(text)
            width = inside + 2 * _MARGIN
            parts.append(f'<rect x="{x:g}" width="{width:g}" height="{_HEIGHT}" fill="{colour}"/>')
            place = f'x="{x + _MARGIN:g}" y="14" textLength="{inside:g}" lengthAdjust="spacingAndGlyphs"'
            parts.append(f'<text {place} fill="#fff">{escape(text)}</text>')
            x += width
        x += _GAP
    title = escape("; ".join(" ".join(pair) for pair in found))
    style = 'font-family="Verdana, DejaVu Sans, sans-serif" font-size="11"'
    size = f'width="{x - _GAP:g}" height="{_HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {style}>',
            f"<title>{title}</title>",
            *parts,
            "</svg>\n",
        ]
    )


def badges(root: Path) -> str:
    """The image for the repository at ``root``."""
    return draw(facts((root / "setup.py").read_text(encoding="utf-8")))
