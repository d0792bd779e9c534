"""Folders of the checkout."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
DOCS = ROOT / "docs"
SITE = Path(__file__).resolve().parent / "site"
"""Has what every interpreter runs at its start that finds it on its path."""


def python_path(*folders: str | Path) -> str:
    """``PYTHONPATH`` for an interpreter that a test starts."""
    return os.pathsep.join(map(str, (SITE, *folders)))
