"""Code that asks whether it is being compiled gets the answer that eager gives it, so that it computes the same.

TorchDynamo takes such questions (``torch.compiler.is_compiling`` and its relatives) for constants that are true. Code
that branches on them computes by another program than in eager (an attention with a mask where eager has none, say).
Torch's own code is answered as before: where it asks, its eager branch cannot be traced. So is monetrun's, and other
code that asks for that reason alone, and computes the same either way.

Random numbers that a graph cannot draw in each call break it (all but those of ``random.random`` and a few more):
Dynamo would draw them once, when it traces, and set the generator back in each call.

A call of a logger would break the graph: one that is not logged at the logger's level does nothing, and one that logs
each message once (transformers' ``warning_once``) does so where it is traced.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

# ContextVar.set, which Dynamo does not trace, is replaced there: each Llama would be planned in parts
_OWN_WAY_FOR_TRACING = "transformers.utils.output_capturing"


class _State(threading.local):
    tracing = False
    as_eager = False
    whole = False
    asked = False


_state = _State()


@contextlib.contextmanager
def eager_answers(as_eager: bool = True, whole: bool = False) -> Iterator[None]:
    """What Dynamo traces meanwhile, in this thread, is answered as in eager; ``as_eager=False``: as in compiled code.

    ``whole``: nothing of it has run while Dynamo traces, so that it can be called again (``cached_functions``).
    """
    _install()
    before = _state.tracing, _state.as_eager, _state.whole
    _state.tracing, _state.as_eager, _state.whole, _state.asked = True, as_eager, whole, False
    try:
        yield
    finally:
        _state.tracing, _state.as_eager, _state.whole = before


def is_tracing() -> bool:
    """Whether this thread is within ``eager_answers``: what Dynamo compiles is a planned model."""
    return _state.tracing


def was_asked() -> bool:
    """Whether code outside torch was answered as in eager, in this thread's latest ``eager_answers``."""
    return _state.asked


@functools.cache
def _install() -> None:
    from torch._dynamo.trace_rules import get_torch_obj_rule_map, torch_name_rule_map
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable
    from torch._dynamo.variables.misc import LoggingLoggerVariable, RandomVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    from monetrun.capture.cached_functions import with_its_cache

    LoggingLoggerVariable.call_method = _logging(LoggingLoggerVariable.call_method)  # type: ignore[method-assign]
    cached = WrapperUserFunctionVariable
    cached.call_function = with_its_cache(cached.call_function, _state)  # type: ignore[method-assign]
    RandomVariable.call_method = _drawing(RandomVariable.call_method)  # type: ignore[method-assign]
    handlers: dict[Callable[..., Any], Callable[..., Any]] = TorchInGraphFunctionVariable._get_handlers()
    for question in (
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        torch._dynamo.external_utils.is_compiling,
        torch._utils.is_compiling,
    ):
        handlers[question] = _answering(handlers[question])
    # transformers asks that too, where it is not being compiled; Dynamo does not know the function. Not only into the
    # map by object: it is made anew from the names with each process group
    if (capturing := getattr(torch.xpu, "is_current_stream_capturing", None)) is not None:
        torch_name_rule_map.append({"torch.xpu.is_current_stream_capturing": TorchInGraphFunctionVariable})
        get_torch_obj_rule_map.cache_clear()
        handlers[capturing] = lambda *_, **__: ConstantVariable.create(torch.xpu.is_available() and capturing())


def _answering(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables import ConstantVariable

    def answer(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        by_torch = _module(tx).partition(".")[0] in ("torch", "monetrun")
        # of callers only that one counts: torch's own code calls the script's modules, too
        if by_torch or _module(getattr(tx, "parent", None)) == _OWN_WAY_FOR_TRACING or not _state.as_eager:
            return original(variable, tx, *args, **kwargs)
        _state.asked = True
        return ConstantVariable.create(False)

    return answer


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import unimplemented

    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not _state.tracing or variable.source is None:  # one that the forward makes itself draws the same each time
            return original(variable, tx, name, args, kwargs)
        unimplemented(
            gb_type="random numbers that are drawn when they are traced",
            context=name,
            explanation=f"random's {name} would give the same in each call of a graph",
            hints=[],
        )

    return call_method


def _logging(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables import ConstantVariable

    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not _state.tracing:
            return original(variable, tx, name, args, kwargs)
        level = getattr(logging, name.upper(), None)  # of ``warning`` it is ``WARNING``
        if isinstance(level, int) and not variable.value.isEnabledFor(level):
            return ConstantVariable.create(None)
        given = [*args, *kwargs.values()]
        if _logs_once(variable.value, name) and all(value.is_python_constant() for value in given):
            words = {key: value.as_python_constant() for key, value in kwargs.items()}
            getattr(variable.value, name)(*(value.as_python_constant() for value in args), **words)
            return ConstantVariable.create(None)
        return original(variable, tx, name, args, kwargs)

    return call_method


def _logs_once(logger: logging.Logger, name: str) -> bool:
    """Whether calls of this method with the same words do nothing after the first."""
    function = getattr(getattr(logger, name, None), "__func__", None)
    return isinstance(function, functools._lru_cache_wrapper)


def _module(tx: Any) -> str:
    """The name of the module whose code Dynamo traces in ``tx``; empty for None."""
    return "" if tx is None else str(tx.f_globals.get("__name__"))
