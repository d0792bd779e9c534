"""What is called in place of a module's forward: a trigger until its first training forward, then the compiled call.

Both stand in the attribute that ``nn.Module.compile`` uses, which is no part of a module's state: a deep copy or a
saved model comes out plain.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monetrun.core.errors import GuardFailed, MonetrunError

if TYPE_CHECKING:  # the engine imports the planner, too slow for ``import torch``
    from monetrun.runtime.backend import Backend
    from monetrun.runtime.engine import Engine

# Each input shape is compiled once; after torch's default of 8 shapes the ninth would run without a plan.
_RECOMPILE_LIMIT = 1 << 14


class Nesting:
    """Tells outermost calls of modules from calls within a planned model, in each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def is_outermost_training(self, module: nn.Module) -> bool:
        """Whether this call of ``module`` is an outermost training forward."""
        return (
            torch.is_grad_enabled()
            and module.training
            and not getattr(self._local, "depth", 0)
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A planned model runs: calls in this context are not outermost."""
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1


class Trigger:
    """Waits for a module's first outermost training forward.

    Args:
        module: to wait for.
        nesting: of the process.
        plan: makes the planned call of ``module``; called once.
    """

    def __init__(self, module: nn.Module, nesting: Nesting, plan: Callable[[nn.Module], PlannedCall]) -> None:
        self.module = weakref.ref(module)
        self.nesting = nesting
        self.plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; its first outermost training forward makes it a planned one."""
        module = self.module()
        assert module is not None
        if not self.nesting.is_outermost_training(module):
            return module._call_impl(*args, **kwargs)
        return self.plan(module)(*args, **kwargs)


class PlannedCall:
    """Runs a model on its schedules in training, and as it is in evaluation.

    Args:
        module: the model.
        nesting: of the process.
        engine: chooses the schedules.
        give_up: called with the reason where nothing of the model was captured.

    Attributes:
        backend: compiles the model's graphs; None before the first call.
    """

    def __init__(self, module: nn.Module, nesting: Nesting, engine: Engine, give_up: Callable[[str], None]) -> None:
        self.module = weakref.ref(module)
        self.name = type(module).__name__
        self.nesting = nesting
        self.engine = engine
        self.give_up = give_up
        self.backend: Backend | None = None
        self._generation = -1
        self._run: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            MonetrunError: no schedule fits the budget, or (``strict``) nothing was captured.
        """
        module, engine = self.module(), self.engine
        assert module is not None
        if not self.nesting.is_outermost_training(module):
            return module._call_impl(*args, **kwargs)
        engine.forward_begins()
        while True:
            compiled = self.backend if self._generation == engine.generation else None
            if compiled is not None and (failed := compiled.failed_guards()):
                engine.plan_without(failed)
            first = self._generation != engine.generation
            if first:
                self._generation = engine.generation
                self.backend = engine.backend(self.name)
                self._run = torch.compile(_entry(), backend=self.backend, dynamic=False)
            try:
                with self.nesting.entered():
                    result = _with_own_errors(self._run, module, args, kwargs)
            except GuardFailed as failure:  # ends: each time there is one implementation less
                engine.plan_without(failure.failed)
                continue
            if first and self.backend is not None and not self.backend.captured:
                self.give_up(f"{self.name} runs without a plan: nothing of its forward was captured")
            return result


def prepare_dynamo() -> None:
    """Raise Dynamo's limits on how many shapes of one function it compiles."""
    import torch._dynamo

    config = torch._dynamo.config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, name, max(_RECOMPILE_LIMIT, getattr(config, name)))


def _with_own_errors(run: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call ``run``; an error of monetrun's is raised without the one of Dynamo's that wraps it."""
    try:
        return run(module, args, kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, MonetrunError):
            raise error.inner_exception from None
        raise


def _call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    # our own frame is the root: torch 2.11 captures nothing where the root's class lives in torch (nn.Sequential)
    return module._call_impl(*args, **kwargs)


# Of the process, since Dynamo's tables are: some are keyed by file, line and name, and outlive whoever compiled.
_entry_numbers = itertools.count(1)


def _entry() -> types.FunctionType:
    """A copy of ``_call`` with a code object of its own, since Dynamo keeps compiled code per code object."""
    code = _call.__code__.replace(co_name=f"monetrun_model_{next(_entry_numbers)}")
    return types.FunctionType(code, _call.__globals__, code.co_name)
