"""Trackers that a script tells by arguments where to report: in a trial run these have no effect.

The launcher sets the variables that silence trackers; a script's own arguments would win over them.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def silence() -> None:
    """Silence the trackers that are imported, and the others once they are."""
    for name, silence_one in _SILENCERS.items():
        if name in sys.modules:
            silence_one(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def _silence_wandb(wandb: Any) -> None:
    init = wandb.init

    @functools.wraps(init)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        return init(*args, **{**kwargs, "mode": "disabled"})

    wandb.init = disabled


def _silence_mlflow(mlflow: Any) -> None:
    mlflow.set_tracking_uri = lambda uri: None
    client = getattr(mlflow, "MlflowClient", None)
    if client is None:
        return
    init = client.__init__

    @functools.wraps(init)
    def local(self: Any, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        init(self)

    client.__init__ = local


_SILENCERS: dict[str, Callable[[Any], None]] = {"wandb": _silence_wandb, "mlflow": _silence_mlflow}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and silences it once it has run."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a tracker; None for all else."""
        if name not in _SILENCERS or name in self._asked:
            return None
        self._asked.add(name)  # the others now
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked.remove(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_silence(module: ModuleType) -> None:
            execute(module)
            _SILENCERS[name](module)

        setattr(spec.loader, "exec_module", execute_and_silence)  # noqa: B010 - mypy rejects the assignment
        return spec
