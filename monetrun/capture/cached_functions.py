"""Functions with a cache (``functools.lru_cache``) give a traced forward what their cache has, as they do in eager.

TorchDynamo passes the cache over, and traces what it is a cache of: numbers that the function draws once would be drawn
in each call, and a tensor that the script changes later would be made anew.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_log = logging.getLogger("monetrun")


class CacheFilled(Exception):
    """A function has drawn random numbers as it filled its cache: what Dynamo traces has to be called again.

    Dynamo sets all generators back when it has traced.

    Attributes:
        states: of the generators, by then.
    """

    def __init__(self, states: list[Any]) -> None:
        super().__init__("a function with a cache has drawn random numbers")
        self.states = states

    @staticmethod
    def behind(error: BaseException) -> CacheFilled | None:
        """It, where Dynamo's ``error`` is of it; else None."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CacheFilled):
            cause = cause.__cause__ or cause.__context__
        return cause

    def restore(self) -> None:
        """Set the generators to where the function left them."""
        of_cpu, of_python, of_numpy, *of_cuda = self.states
        torch.set_rng_state(of_cpu)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)


def with_its_cache(original: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """Dynamo's call of a wrapped function, ``original``, which asks the cache while ``state.tracing``.

    ``state.whole``: it may raise ``CacheFilled``.
    """
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables.base import VariableTracker

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = variable.wrapper_obj
        module = str(getattr(function, "__module__", None))
        by_torch = module.partition(".")[0] in ("torch", "monetrun")
        if not state.tracing or by_torch or not isinstance(function, functools._lru_cache_wrapper):
            return original(variable, tx, args, kwargs)
        try:
            given = [_real(tx, value) for value in (*variable.self_args(), *args)]
            words = {key: _real(tx, value) for key, value in kwargs.items()}
        except _NoValueYet as error:
            _log.debug("%s is traced without its cache: %s", function, error)
            return original(variable, tx, args, kwargs)
        states, misses = _states(), function.cache_info().misses
        try:
            found = function(*given, **words)
        except Exception:  # noqa: BLE001 - traced, it is raised where the script may catch it
            return original(variable, tx, args, kwargs)
        if state.whole and function.cache_info().misses > misses and _differ(states, now := _states()):
            raise CacheFilled(now)
        return VariableTracker.build(tx, found, GlobalSource(tx.output.install_global_by_id("monetrun_cached", found)))

    return call_function


class _NoValueYet(Exception):
    """An argument is known when the graph runs."""


def _real(tx: Any, variable: Any) -> Any:
    """The object that a variable of Dynamo's stands for; of a size that is left open, its number, which is fixed then.

    Raises:
        _NoValueYet: there is none before the graph runs.
    """
    variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if hasattr(variable, "evaluate_expr"):
        return variable.evaluate_expr(tx.output)
    value = getattr(variable, "value", None)
    if variable.source is None or not isinstance(value, torch.nn.Module):
        raise _NoValueYet(str(variable))
    return value


def _states() -> list[Any]:
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), random.getstate(), np.random.get_state(), *of_cuda]


def _differ(some: list[Any], others: list[Any]) -> bool:
    return len(some) != len(others) or not all(map(_equal, some, others))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return all(map(_equal, one, other))
    return bool(np.array_equal(one, other))
