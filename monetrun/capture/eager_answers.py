"""Code that asks whether it is being compiled gets the answer that eager gives it, so that it computes the same.

TorchDynamo takes such questions (``torch.compiler.is_compiling`` and its relatives) for constants that are true. Code
that branches on them computes by another program than in eager (an attention with a mask where eager has none, say).
Torch's own code is answered as before: where it asks, its eager branch cannot be traced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _State(threading.local):
    as_eager = False
    asked = False


_state = _State()


@contextlib.contextmanager
def eager_answers(as_eager: bool = True) -> Iterator[None]:
    """What Dynamo traces meanwhile, in this thread, is answered as in eager; with False as in compiled code."""
    _install()
    before, _state.as_eager = _state.as_eager, as_eager
    _state.asked = False
    try:
        yield
    finally:
        _state.as_eager = before


def was_asked() -> bool:
    """Whether code outside torch was answered as in eager, in this thread's latest ``eager_answers``."""
    return _state.asked


@functools.cache
def _install() -> None:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Callable[..., Any], Callable[..., Any]] = TorchInGraphFunctionVariable._get_handlers()
    for question in (
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        torch._dynamo.external_utils.is_compiling,
        torch._utils.is_compiling,
    ):
        handlers[question] = _answering(handlers[question])


def _answering(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables import ConstantVariable

    def answer(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        by_torch = str(tx.f_globals.get("__name__")).partition(".")[0] == "torch"
        if by_torch or not _state.as_eager:
            return original(variable, tx, *args, **kwargs)
        _state.asked = True
        return ConstantVariable.create(False)

    return answer
