"""Tells the launcher what a trial run has read beside the script: a model is rarely in the script alone."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

import monetrun
from monetrun.core import codec
from monetrun.core.sources import SUFFIX, Sources, content

# These are parts of the record's key by themselves.
_KNOWN = ("torch", "monetrun", "__main__")
# Endings of files of settings. Results and data would change from launch to launch.
_SETTINGS = (".cfg", ".conf", ".gin", ".ini", ".json", ".toml", ".yaml", ".yml")

_read: set[str] = set()


def watch() -> None:
    """Note from now on which files of settings that the script's arguments name it reads, and never writes."""
    named = {part for word in sys.argv[1:] for part in (word, word.partition("=")[2]) if part.endswith(_SETTINGS)}
    settings = {os.path.abspath(path) for path in named}
    if not settings:
        return

    def noticed(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, os.PathLike)) and isinstance(args[2], int):
            path = os.path.abspath(args[0])
            if path in settings and args[2] & (os.O_WRONLY | os.O_RDWR):
                settings.discard(path)
                _read.discard(path)
            elif path in settings:
                _read.add(path)

    sys.addaudithook(noticed)


def write(record_file: str) -> None:
    """Write this process's ``Sources`` beside the record of the trial."""
    Path(record_file + SUFFIX).write_text(codec.dumps(found()))


def found() -> Sources:
    """What this process has imported so far, and the files of settings that it has read."""
    within = _installed()
    files, packages = set(_read), {}
    for name, module in list(sys.modules.items()):
        file = _file_of(module)
        if name != "__main__" and file and not file.startswith(within) and os.path.isfile(file):
            files.add(os.path.abspath(file))
    kinds = {str(kind.__module__).partition(".")[0] for kind in _kinds(nn.Module)}
    for package in kinds.difference(_KNOWN):
        if _file_of(sys.modules.get(package)).startswith(within):  # else its files are among those above
            packages.update(_version(package))
    return Sources({file: content(file) for file in sorted(files)}, dict(sorted(packages.items())))


def _installed() -> tuple[str, ...]:
    """The folders of installed packages, of Python itself, and of monetrun."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(monetrun.__file__)]
    return tuple(os.path.join(path, "") for path in {*paths, "/usr/lib/python3/dist-packages"})


def _file_of(module: Any) -> str:
    """Without the import that a lazy module would make of such a question."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else ""


def _version(package: str) -> dict[str, str]:
    """The version of the package's distribution, by that one's name."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {package: importlib.metadata.version(package)}
    names = importlib.metadata.packages_distributions().get(package, [])
    return {name: importlib.metadata.version(name) for name in names}


def _kinds(kind: type) -> Iterator[type]:
    below: type
    for below in type.__subclasses__(kind):
        yield below
        yield from _kinds(below)
