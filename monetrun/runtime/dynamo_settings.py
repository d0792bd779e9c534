"""TorchDynamo's settings for models that are captured whole and train as they would in Python."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from monetrun.capture.eager_answers import is_tracing
from monetrun.capture.warned import let_models_warn
from monetrun.core.patched import patched

# Each input shape is compiled once; after torch's default of 8 shapes the ninth would run without a plan.
_RECOMPILE_LIMIT = 1 << 14
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def prepare_dynamo(within: Iterable[CodeType], undo: contextlib.ExitStack) -> None:
    """Have Dynamo keep models as they are; it may be at work where the codes ``within`` are called.

    Closing ``undo`` restores the settings.
    """
    import torch._dynamo
    from torch._dynamo import convert_frame, trace_rules
    from torch._dynamo.variables import nn_module

    config = torch._dynamo.config
    for name in (
        "optimize_ddp",
        "skip_nnmodule_hook_guards",
        "allow_unspec_int_on_nn_module",
        "use_numpy_random_stream",
    ):
        undo.callback(setattr, config, name, getattr(config, name))
    # Dynamo would split models at the borders of DistributedDataParallel's buckets, and the terms of a gradient from
    # both sides of a border would be added in another order; gradients are given as they are computed without that
    config.optimize_ddp = False
    config.skip_nnmodule_hook_guards = False  # hooks that are added later run
    config.allow_unspec_int_on_nn_module = True  # a module's counter of steps is no other model in each step
    config.use_numpy_random_stream = True  # NumPy's numbers come from NumPy, not from torch's generator
    for code in within:
        torch._dynamo.eval_frame.skip_code(code)
    undo.enter_context(
        patched(convert_frame, "exceeds_recompile_limit", _with_many_shapes(convert_frame.exceeds_recompile_limit))
    )
    # what the script has put there before Dynamo was imported, Dynamo takes for torch's, and calls the forward instead
    for name, known in (("__call__", "unpatched_nn_module_call"), ("_call_impl", "unpatched_nn_module_call_impl")):
        if not _is_torchs(getattr(nn.Module, name)):
            undo.enter_context(patched(nn_module, known, None))
    rules = _RulesOfTorchAlone(trace_rules.get_torch_obj_rule_map)
    undo.callback(rules.restore)
    undo.enter_context(patched(trace_rules, "get_torch_obj_rule_map", rules))
    let_models_warn()


class _RulesOfTorchAlone:
    """Has Dynamo trace what the script, or a library, has put in the place of torch's functions, as any other code.

    Dynamo's table has torch's functions by their names: as one of these, another function would be one call of the
    graph, traced with what it reads at the time, and nothing would guard that.

    Args:
        made: gives the table, which is made anew after its ``cache_clear`` (with each process group).
    """

    def __init__(self, made: Any) -> None:
        self._made = made
        self._rules: dict[Any, Any] = {}
        self._replaced: dict[Any, Any] = {}

    def __call__(self) -> dict[Any, Any]:
        """The table without these functions."""
        if (rules := self._made()) is not self._rules:
            self._rules = rules
            others = [f for f in rules if isinstance(f, FunctionType) and not _is_torchs(f)]
            self._replaced = {function: rules.pop(function) for function in others}
            for function, rule in self._replaced.items():
                for builtin in _builtins_of_torch(function):  # Dynamo could not trace one that it does not know
                    rules.setdefault(builtin, rule)
        return rules

    def cache_clear(self) -> None:
        """Have the table made anew."""
        self._made.cache_clear()

    def restore(self) -> None:
        """The table is as it was."""
        self._rules.update(self._replaced)


def _builtins_of_torch(function: FunctionType) -> list[Any]:
    """Torch's functions in C++ that ``function`` may call: in what it stands around, its closure, or its globals."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    read = [function.__globals__.get(name) for name in function.__code__.co_names]
    found = [getattr(function, "__wrapped__", None), *cells, *given, *read]
    builtins = (f for f in found if isinstance(f, BuiltinFunctionType))
    return [f for f in builtins if _root(f.__module__) == "torch" or hasattr(torch._C._VariableFunctions, f.__name__)]


def _root(module: str | None) -> str:
    """The package that a module is in."""
    return (module or "").partition(".")[0]


def _is_torchs(function: FunctionType) -> bool:
    """Whether it is torch's own, or one of Python's, a dependency's or ours that stands for it."""
    root = _root(function.__globals__.get("__name__"))
    return root in ("torch", "functorch", "typing_extensions", "monetrun") or root in sys.stdlib_module_names


def _with_many_shapes(exceeds: Callable[..., Any]) -> Callable[..., Any]:
    """Whether a function was compiled too often, which Dynamo asks before it compiles: what the script compiles alone.

    The limits are read nowhere else; to set them around each call would take a step's time.
    """

    @functools.wraps(exceeds)
    def found(*args: Any, **kwargs: Any) -> Any:
        if not is_tracing():
            return exceeds(*args, **kwargs)
        config = torch._dynamo.config
        with config.patch({name: max(getattr(config, name), _RECOMPILE_LIMIT) for name in _LIMITS}):
            return exceeds(*args, **kwargs)

    return found
