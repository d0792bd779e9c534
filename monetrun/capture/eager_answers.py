"""Code that asks whether it is being compiled gets the answer that eager gives it, so that it computes the same.

TorchDynamo takes such questions (``torch.compiler.is_compiling`` and its relatives) for constants that are true. Code
that branches on them computes by another program than in eager (an attention with a mask where eager has none, say).
Torch's own code is answered as before: where it asks, its eager branch cannot be traced. So is other code that asks for
that reason alone, and computes the same either way.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

# ContextVar.set, which Dynamo does not trace, is replaced there: each Llama would be planned in parts
_OWN_WAY_FOR_TRACING = "transformers.utils.output_capturing"


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
    from torch._dynamo.trace_rules import get_torch_obj_rule_map, torch_name_rule_map
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

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
        by_torch = _module(tx).partition(".")[0] == "torch"
        # of callers only that one counts: torch's own code calls the script's modules, too
        if by_torch or _module(getattr(tx, "parent", None)) == _OWN_WAY_FOR_TRACING or not _state.as_eager:
            return original(variable, tx, *args, **kwargs)
        _state.asked = True
        return ConstantVariable.create(False)

    return answer


def _module(tx: Any) -> str:
    """The name of the module whose code Dynamo traces in ``tx``; empty for None."""
    return "" if tx is None else str(tx.f_globals.get("__name__"))
