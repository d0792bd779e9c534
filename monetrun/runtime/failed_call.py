"""Calls that fail by the script's own fault: a batch that the model cannot take says nothing of how it is captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from monetrun.core.errors import MonetrunError, is_out_of_memory

F = TypeVar("F", bound=Callable[..., Any])


def undone_if_the_script_fails(method: F) -> F:
    """A method of ``PlannedCall``: ways to run its module that it has found are forgotten where it fails.

    An error of the module's forward makes the capture fail first. Scripts may catch it and go on with the next batch.
    """

    @functools.wraps(method)
    def called(call: Any, *args: Any, **kwargs: Any) -> Any:
        before = _ways(call)
        estimated = _is_estimate(call)
        try:
            return method(call, *args, **kwargs)
        except Exception as error:
            if _ways(call) == before or isinstance(error, MonetrunError) or is_out_of_memory(error):
                raise
            _forget(call, before, estimated)
            raise

    return cast(F, called)


def _ways(call: Any) -> tuple[Any, ...]:
    return call.broken, call._open_sizes, call.as_compiled, call._without_hooks


def _is_estimate(call: Any) -> tuple[bool, bool]:
    running = call.engine.running
    return call.engine.part_in_python, running is not None and running.enforcement.share_is_estimate


def _forget(call: Any, ways: tuple[Any, ...], estimated: tuple[bool, bool]) -> None:
    call.broken, call._open_sizes, call.as_compiled, call._without_hooks = ways
    call._generation, call.backend = -1, None
    engine = call.engine
    if call.broken is None:
        engine.breaks.pop(call.path, None)
        for part in call.parts:
            part.close()
        call.parts = []
    engine.part_in_python = estimated[0]
    if engine.running is not None:
        engine.running.enforcement.share_is_estimate = estimated[1]
