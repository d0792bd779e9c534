"""What TorchDynamo compiles for a planned call: a function of our own that calls the module."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

from torch import nn


def _call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    # our own frame is the root: torch 2.11 captures nothing where the root's class lives in torch (nn.Sequential)
    return module._call_impl(*args, **kwargs)


def _call_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


MOST_TRACED_NODES = 800_000
"""Of the graphs that Dynamo keeps of one model, each for its sizes: about 3 GB. Then all are dropped."""

# Of modules of one class so many are kept whose trained parameters differ (fine-tuning of a few layers in turn).
_MOST_TRAINED = 8

# Of the process, since Dynamo's tables are: some are keyed by file, line and name, and outlive whoever compiled.
_entry_numbers = itertools.count(1)


def entry(without_hooks: bool) -> types.FunctionType:
    """What calls a module (``without_hooks``: its forward), with a code object of its own.

    Dynamo keeps what it compiles per code object.
    """
    call = _call_forward if without_hooks else _call
    code = call.__code__.replace(co_name=f"monetrun_model_{next(_entry_numbers)}")
    return types.FunctionType(code, call.__globals__, code.co_name)


def forget_former(compiled: dict[tuple[Any, ...], tuple[Any, ...]], key: tuple[Any, ...], generation: int) -> None:
    """Make place for what is compiled for ``key``, whose last element is which parameters are trained.

    Args:
        compiled: what was compiled, by keys; a value's first element is its generation, the last one what Dynamo
            has: its compiler, and the code.
        key: its place, which is made free.
        generation: what was compiled in other ones will not be called again.
    """
    former = [k for k in compiled if k[:-1] == key[:-1] and k != key]
    for k in [k for k, made in compiled.items() if made[0] != generation] + former[: 1 - _MOST_TRAINED]:
        compiled.pop(k, None)
    if key in compiled:  # too much of it is kept. Of a former generation it is left: steps can take longer afterwards
        _, code = let_go = compiled.pop(key)[-1]
        if code.co_name not in _running():
            _let_go(*let_go)


def _running() -> set[str]:
    """The names of the functions that run now."""
    frame, names = sys._getframe(1), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def _let_go(compiler: Any, code: types.CodeType) -> None:
    """Dynamo keeps compilers, code of which a guard has failed, and what it has made of it, while the process lives."""
    import torch._dynamo

    torch._C._dynamo.eval_frame.reset_code(code)
    torch._dynamo.utils.guard_failures.pop(code, None)
    kept = torch._dynamo.eval_frame.cached_backends
    for number in [n for n, known in kept.items() if getattr(known, "compiler_fn", known) is compiler]:
        del kept[number]
