"""Checks that the script exists before anything is planned or started. The check runs none of the script."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from monetrun.core.budget import AUTO
from monetrun.core.errors import ScriptNotFound, UsageError
from monetrun.launcher import report
from monetrun.launcher.options import LaunchOptions

_SHOWN = 5  # names of what is there
_INTERPRETERS = ("python", "python3", "torchrun")

# Exits with 99 if python -m would not find the module. Any other error is the module's own.
_FIND_MODULE = """
import importlib.util, sys
name = sys.argv[1]
try:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(name + ".__main__")
except ModuleNotFoundError as error:
    sys.exit(99 if error.name and (name + ".").startswith(error.name + ".") else 0)
sys.exit(99 if spec is None else 0)
"""


def check_script(options: LaunchOptions, commands: Iterable[str] = ()) -> None:
    """Check that Python will find the script or module, or the system the program (``--no-python``).

    Warns where the script gets a ``--budget`` and monetrun none.

    Args:
        options: of the launch.
        commands: names that a script's name may be a misspelling of.

    Raises:
        ScriptNotFound: there is none; the hint names what is there.
        UsageError: it exists, but cannot be run.
    """
    name = options.script
    if not (options.torchrun.run_path or options.torchrun.no_python):
        _check_interpreter()
    if options.torchrun.run_path:
        _check_file(name)
    elif options.torchrun.no_python:
        _check_program(name)
    elif options.is_module:
        _check_module(name)
    elif name != "-":  # Python reads a script from stdin
        _check_file(name, commands)
    for i, word in enumerate(options.script_args):
        option, _, value = word.partition("=")
        if option == "--budget" and options.budget == AUTO:
            given = f"--budget {value or ''.join(options.script_args[i + 1 : i + 2])}"
            before = f"monetrun's own options come before the script (monetrun {given} {name} ...)"
            report.warn(f"{word} goes to {name}, and the budget is auto: {before}")
            return


def _check_interpreter() -> None:
    named = os.environ.get("PYTHON_EXEC")
    if named is not None and shutil.which(named) is None:
        raise UsageError(
            f"PYTHON_EXEC is {named!r}, which is not a program that can be run", "unset it, or name a Python"
        )


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        if os.path.isfile(name) and os.path.dirname(name):
            raise UsageError(f"{name} is not executable", f"chmod +x {name}, or leave out --no-python")
        raise ScriptNotFound(f"there is no program {name!r}", _near_files(name))


def _check_file(name: str, commands: Iterable[str] = ()) -> None:
    path = Path(name)
    if not os.path.exists(name):  # not Path.exists, which raises where a folder may not be entered
        if name.replace(".", "_").isidentifier() and not name.endswith(".py") and _find_module(name):
            raise ScriptNotFound(f"there is no script {name!r}", f"there is a module of that name: -m {name}")
        if name in commands:
            raise ScriptNotFound(f"there is no script {name!r}", f"a command comes first: monetrun {name} ...")
        if name in _INTERPRETERS:
            raise ScriptNotFound(f"there is no script {name!r}", f"leave out {name}: monetrun runs the script itself")
        if near := difflib.get_close_matches(name, commands, 1):
            raise ScriptNotFound(f"there is no script or command {name!r}", f"did you mean monetrun {near[0]}?")
        raise ScriptNotFound(f"there is no script {name!r}", _near_files(name))
    if not os.access(path, os.R_OK):
        raise UsageError(f"{name} cannot be read", f"ls -l {name} shows who may")
    if path.is_dir() and not os.path.isfile(path / "__main__.py"):
        raise ScriptNotFound(f"{name} is a folder without a __main__.py", _near_files(os.path.join(name, "main.py")))
    if path.is_file() and not zipfile.is_zipfile(path) and path.suffix != ".pyc":
        with path.open("rb") as file:
            if b"\0" in file.read(1024):
                raise UsageError(f"{name} is not a Python script but a binary file", "--no-python runs a program")


def _near_files(name: str) -> str:
    folder, base = os.path.split(name)
    if not os.path.isdir(folder or "."):
        return f"there is no folder {folder!r} either"
    try:
        names = [name for name in os.listdir(folder or ".") if not name.startswith(".")]
    except OSError as error:
        return f"the folder {folder or os.getcwd()} cannot be read: {error.strerror}"
    if near := difflib.get_close_matches(base, names, 3):
        return f"did you mean {', '.join(os.path.join(folder, n) for n in near)}?"
    if scripts := sorted(n for n in names if n.endswith(".py")):
        return f"scripts here: {_first(os.path.join(folder, n) for n in scripts)}"
    return f"{os.path.abspath(folder)} has no Python script"


def _first(names: Iterable[str]) -> str:
    """The first few names, and whether there are more."""
    names = list(names)
    return ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)


def _check_module(name: str) -> None:
    if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return  # torchrun starts that interpreter, whose modules are unknown here
    found = _find_module(name)
    if found is None:
        found = subprocess.run([sys.executable, "-c", _FIND_MODULE, name], capture_output=True).returncode != 99
    if not found:
        raise ScriptNotFound(f"there is no module {name!r} that python -m could run", _near_modules(name))


def _find_module(name: str) -> bool | None:
    """Whether ``python -m name`` finds it, without running any code.

    None if that cannot be known: a package may change its own path when it is imported.
    """
    top, *rest = name.split(".")
    if not all((top, *rest)):
        return False
    folder = os.getcwd()  # first on the path of python -m
    sys.path.insert(0, folder)
    try:
        importlib.invalidate_caches()
        if top in sys.modules:  # this process's module, which one of the script's may shadow
            return None
        spec = importlib.util.find_spec(top)
        if spec is None:
            return False
        for part in rest:
            if spec.submodule_search_locations is None:
                return False
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
            if spec is None:
                return None
        if spec.submodule_search_locations is None:
            return True
        return PathFinder.find_spec("__main__", list(spec.submodule_search_locations)) is not None or None
    finally:
        sys.path.remove(folder)


def _near_modules(name: str) -> str:
    if os.path.isfile(name):
        return "there is a file of that name: leave out -m"
    *parents, last = name.split(".")
    folder = os.path.join(*parents) if parents else "."
    names: list[str] = []
    with contextlib.suppress(OSError):  # there is no such folder, or it may not be read
        for name in os.listdir(folder):
            stem, extension = os.path.splitext(name)
            is_folder = os.path.isdir(os.path.join(folder, name))
            if stem.isidentifier() and (extension == ".py" or (is_folder and not stem.startswith("__"))):
                names.append(stem)
    if near := difflib.get_close_matches(last, names, 3):
        return f"did you mean {', '.join('.'.join([*parents, n]) for n in near)}?"
    if names:
        return f"modules here: {_first('.'.join([*parents, n]) for n in sorted(names))}"
    return f"looked in {os.getcwd()} and on Python's path"
