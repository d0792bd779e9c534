"""Finds the private names of torch that monetrun uses, and checks their table, docs/torch-compatibility.md.

    python tests/support/torch_internals.py            # check the table
    python tests/support/torch_internals.py --write    # update its column "Where"

A row of the table gives one or more names, each in one of these forms:

* ``torch.a._b.c``: imported or reached from ``torch``; ``*`` at the end covers all names that begin so. A setting of a
  module (``torch._dynamo.config.recompile_limit``) may also be a keyword or string where that module is used.
* ``Class._attribute``: an attribute of objects of that class of torch.
* ``meta["key"]``: an entry of an fx node's or module's metadata that torch writes.
* ``name=``: a keyword with which monetrun calls torch, or a parameter by which torch calls monetrun.
* ``"text"``: a string that torch writes or reads.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "monetrun"
TABLE = ROOT / "docs" / "torch-compatibility.md"

# private attributes of other libraries' objects
OTHERS = {"_actions", "_get_option_tuples", "_group_actions", "_option_string_actions"}  # argparse


@dataclass
class Uses:
    """What a source file uses.

    Attributes:
        chains: dotted names that begin with ``torch``, as long as the source spells them.
        attributes: names of attributes of any object.
        keywords: names of keyword arguments and of parameters.
        strings: string constants.
        metadata: keys of ``meta`` that are no names of monetrun's.
    """

    chains: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    keywords: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    metadata: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Whether a name of the table, in any of its forms, is used."""
        if name.startswith('"'):
            return name.strip('"') in self.strings
        if name.endswith("="):
            return name[:-1] in self.keywords
        if name.startswith("meta["):
            return name[len('meta["') : -len('"]')] in self.metadata | self.strings
        if not name.startswith("torch."):
            attribute = name.partition(".")[2]
            return attribute in self.attributes | self.strings
        if any(covers(name, chain) for chain in self.chains):
            return True
        parent, _, last = name.rpartition(".")
        return last in self.keywords | self.strings and any(covers(parent, chain) for chain in self.chains)


def covers(name: str, chain: str) -> bool:
    """Whether a dotted name of the table is a used one, or what it is reached through."""
    return chain.startswith(name[:-1]) if name.endswith("*") else f"{chain}.".startswith(f"{name}.")


def is_private(word: str) -> bool:
    """Whether a word begins with one underscore."""
    return word.startswith("_") and not word.startswith("__") and word != "_"


class _Reader(ast.NodeVisitor):
    """Collects the uses of one file."""

    def __init__(self) -> None:
        self.uses = Uses()
        self.origins: dict[str, str] = {}  # local name -> dotted name of torch, or "" for another library's
        self.classes = 0  # around the node

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes += 1
        self.generic_visit(node)
        self.classes -= 1

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            self.origins[alias.asname or root] = (alias.name if alias.asname else root) if root == "torch" else ""
            if root == "torch":
                self.uses.chains.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        of_torch = (node.module or "").partition(".")[0] == "torch"
        for alias in node.names:
            name = f"{node.module}.{alias.name}" if of_torch else ""
            self.origins[alias.asname or alias.name] = name
            if of_torch:
                self.uses.chains.add(name)

    def visit_Assign(self, node: ast.Assign) -> None:
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for target in node.targets:
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            for one, value in zip(targets, values, strict=False):
                if isinstance(one, ast.Name) and (chain := self.chain(value)):
                    self.origins[one.id] = chain
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and isinstance(node.target, ast.Name) and (chain := self.chain(node.value)):
            self.origins[node.target.id] = chain
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = self.chain(node)
        if chain:
            self.uses.chains.add(chain)
            return
        root = node.value.id if isinstance(node.value, ast.Name) else None
        own = self.classes and root in ("self", "cls")  # outside of a class, self is an object whose method is replaced
        if not own and self.origins.get(str(root)) != "":
            self.uses.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.metadata(node.value, node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            self.metadata(node.comparators[0], node.left)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop") and node.args:
            self.metadata(node.func.value, node.args[0])
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.uses.keywords.add(node.arg or "")
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self.uses.keywords.add(node.arg)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.uses.strings.add(node.value)

    def metadata(self, container: ast.expr, key: ast.expr) -> None:
        of_node = isinstance(container, ast.Attribute) and container.attr == "meta" and isinstance(key, ast.Constant)
        if of_node and not str(key.value).startswith("monetrun"):
            self.uses.metadata.add(str(key.value))

    def chain(self, node: ast.expr) -> str:
        """The dotted name of an expression that is reached from torch; empty for others."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        origin = self.origins.get(node.id, "") if isinstance(node, ast.Name) else ""
        return ".".join([origin, *reversed(parts)]) if origin else ""


def uses_by_file(source: Path = SOURCE) -> dict[Path, Uses]:
    """The uses of every Python file under ``source``."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        reader = _Reader()
        reader.visit(ast.parse(path.read_text(encoding="utf-8")))
        found[path.relative_to(source)] = reader.uses
    return found


def own_names(source: Path = SOURCE) -> set[str]:
    """Private names that monetrun itself defines."""
    found: set[str] = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def private_names(uses: Uses, own: Iterable[str]) -> set[str]:
    """The private names of torch that a file uses: dotted ones, ``._attribute``, ``meta["key"]``."""
    chains = {c for c in uses.chains if any(map(is_private, c.split("."))) and not c.startswith("torch.ops.monet.")}
    attributes = {f".{a}" for a in uses.attributes if is_private(a)} - {f".{a}" for a in {*own, *OTHERS}}
    return chains | attributes | {f'meta["{key}"]' for key in uses.metadata}


# ---- the table


@dataclass(frozen=True)
class Row:
    """A row of the table: the names in its first cell, and its line's cells as they are written."""

    names: tuple[str, ...]
    cells: tuple[str, ...]


def rows(table: Path = TABLE) -> list[Row]:
    """The rows of all tables in the file, without headings."""
    found = []
    for line in table.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
            found.append(Row(tuple(re.findall("`([^`]+)`", cells[0])), cells))
    return found


def where(names: Iterable[str], used: dict[Path, Uses]) -> str:
    """The packages of monetrun whose files use one of the names."""
    return ", ".join(sorted({path.parts[0] for path, uses in used.items() if any(map(uses.has, names))}))


def problems(table: Path = TABLE) -> list[str]:
    """What is wrong with the table: missing names, unused names, wrong packages."""
    used, own, listed = uses_by_file(), own_names(), rows(table)
    names = [name for row in listed for name in row.names]
    found = [f"{name} is listed twice" for name in sorted({n for n in names if names.count(n) > 1})]
    for path, uses in used.items():
        here = [name for name in names if uses.has(name)]
        for private in sorted(private_names(uses, own)):
            if not any(_lists(name, private) for name in here):
                found.append(f"monetrun/{path} uses {private}, which is not in the table")
    for row in listed:
        found += [f"{name} is not used" for name in row.names if not where([name], used)]
        if row.cells[1] != (packages := where(row.names, used)):
            found.append(f"{row.cells[0]} is used in: {packages} (the table has: {row.cells[1]})")
    return found


def _lists(name: str, private: str) -> bool:
    """Whether a name of the table stands for a private name that a file uses."""
    if private.startswith("."):
        return not name.startswith("torch.") and name.endswith(private)
    if private.startswith("meta["):
        return name == private
    return covers(name, private) or covers(private, name)


def write(table: Path = TABLE) -> None:
    """Replace the column "Where" by what the source says."""
    used = uses_by_file()
    known = {row.cells: row for row in rows(table)}
    lines = table.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        row = known.get(tuple(cell.strip() for cell in line.strip("|").split("|")))
        if row is not None:
            lines[i] = f"| {' | '.join((row.cells[0], where(row.names, used), *row.cells[2:]))} |"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help='update the column "Where"')
    if parser.parse_args().write:
        write()
    found = problems()
    print("\n".join(found) or "the table is complete")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
