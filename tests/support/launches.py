"""What tests need that launch scripts by torchrun and by monetrun."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest


def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's and monetrun's variables of outside are not seen."""
    for name in list(os.environ):
        if name.startswith(("PET_", "MONETRUN_")):
            monkeypatch.delenv(name)


def set_apart(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Launches run in ``folder``, with a cache and a port of their own."""
    without_settings(monkeypatch)
    monkeypatch.setenv("MONETRUN_CACHE", str(folder / "cache"))
    with socket.socket() as free:  # torchrun's own is one for all that runs on this machine
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PET_MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.chdir(folder)


def skip_without(packages: Iterable[str]) -> None:
    """Skip the test where one of the packages of the extra ``real`` is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[real]'")
