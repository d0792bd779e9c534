"""Folders of the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
DOCS = ROOT / "docs"
