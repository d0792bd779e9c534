"""The sizes that keep a module readable in one sitting, and the layers that the packages keep."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from support.paths import ROOT

MODULE_LINES, CLASS_LINES, FUNCTION_LINES = 400, 200, 80
REASON = re.compile(r"#\s*long: \S+")
SOURCES = sorted((ROOT / "monetrun").rglob("*.py"))


def too_long(text: str) -> Iterator[str]:
    """What exceeds its limit without a comment ``# long: REASON`` on its first line."""
    lines = text.splitlines()
    if len(lines) > MODULE_LINES and not REASON.search(lines[0]):
        yield f"module: {len(lines)} lines, at most {MODULE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            limit = CLASS_LINES
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            limit = FUNCTION_LINES
        else:
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > limit and not REASON.search(lines[node.lineno - 1]):
            yield f"{node.name}: {length} lines, at most {limit}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_classes_and_functions_are_short(path):
    assert list(too_long(path.read_text())) == []


def test_what_is_too_long_is_found():
    body = "\n".join(["    x = 1"] * FUNCTION_LINES)
    assert list(too_long(f"def f():\n{body}")) == [f"f: {FUNCTION_LINES + 1} lines, at most {FUNCTION_LINES}"]
    assert list(too_long(f"def f():  # long: a table\n{body}")) == []
    assert len(list(too_long("x = 1\n" * (MODULE_LINES + 1)))) == 1


def test_recipes_import_nothing_of_the_tests():
    for path in sorted((ROOT / "recipes").rglob("*.py")):
        assert not re.search(r"^\s*(from|import) support\b|sys\.path.*tests", path.read_text(), re.MULTILINE), path


def test_no_test_imports_another_test():
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert not re.search(r"^\s*(from|import) (\w+\.)*test_\w+", path.read_text(), re.MULTILINE), path


def test_the_packages_layers_are_ten_at_most():
    text = (ROOT / "pyproject.toml").read_text()
    (layers,) = re.findall(r"^layers = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert len(re.findall(r'"[^"]+"', layers)) <= 10
