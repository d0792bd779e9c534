"""Tells the launcher what a trial run has imported beside the script: a model is rarely in the script alone."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from torch import nn

import monetrun
from monetrun.core import codec
from monetrun.core.sources import SUFFIX, Sources

# These are parts of the record's key by themselves.
_KNOWN = ("torch", "monetrun", "__main__")


def write(record_file: str) -> None:
    """Write this process's ``Sources`` beside the record of the trial."""
    Path(record_file + SUFFIX).write_text(codec.dumps(imported()))


def imported() -> Sources:
    """What this process has imported so far."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    within = tuple(os.path.join(folder, "") for folder in {*installed, os.path.dirname(monetrun.__file__)})
    files, packages = set(), set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and isinstance(file, str) and not file.startswith(within) and os.path.isfile(file):
            files.add(os.path.abspath(file))
    for package in {kind.__module__.partition(".")[0] for kind in _kinds(nn.Module)}.difference(_KNOWN):
        file = getattr(sys.modules.get(package), "__file__", None) or ""
        if not file.startswith(within):
            continue  # its files are among those above
        try:
            importlib.metadata.version(package)
            packages.add(package)
        except importlib.metadata.PackageNotFoundError:  # its distribution has another name
            files.add(file)
    return Sources(tuple(sorted(files)), tuple(sorted(packages)))


def _kinds(kind: type) -> Iterator[type]:
    below: type
    for below in type.__subclasses__(kind):
        yield below
        yield from _kinds(below)
