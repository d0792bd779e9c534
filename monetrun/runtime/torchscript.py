"""TorchScript beside planned calls: a script compiles its model, or a loop that trains, to save or to serve it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from monetrun.core.patched import patched

# where a planned call stands
_CALL = "_compiled_call_impl"


def knows(operators: Mapping[Callable[..., Any], str], undo: contextlib.ExitStack) -> None:
    """Have TorchScript, which knows functions by their identity, take these for its operators."""
    from torch.jit import _builtins

    table = _builtins._get_builtin_table()
    for function, operator in operators.items():
        _builtins._register_builtin(function, operator)
        undo.callback(table.pop, id(function), None)


def passes_calls_over(undo: contextlib.ExitStack) -> None:
    """Have TorchScript see no planned calls: it asks for the type of all that a module has, and cannot tell theirs."""
    from torch.jit import _recursive

    infer = _recursive.infer_concrete_type_builder

    @functools.wraps(infer)
    def without_call(nn_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = vars(nn_module)
        if _CALL not in own:
            return infer(nn_module, *args, **kwargs)
        call = own.pop(_CALL)
        try:
            return infer(nn_module, *args, **kwargs)
        finally:
            own[_CALL] = call

    undo.enter_context(patched(_recursive, "infer_concrete_type_builder", without_call))
