"""What waits for a module's first training forward, and what a training forward is."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


class Nesting:
    """Tells outermost calls of modules from calls within a planned model, in each thread.

    Attributes:
        any_mode: calls in evaluation mode count as training.
        evaluated: modules whose last outermost call with gradients enabled was in evaluation mode.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self.any_mode = False
        self.evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def outermost(self) -> bool:
        """Whether no planned model runs."""
        return not getattr(self._local, "depth", 0)

    def is_outermost_training(self, module: nn.Module) -> bool:
        """Whether this call of ``module`` is an outermost training forward."""
        if not self.outermost:
            return False
        trains = is_training(module, self.any_mode)
        if trains:
            if self.evaluated:
                self.evaluated.difference_update(module.modules())
        elif not module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.evaluated.add(module)
        return trains

    def found_in_evaluation_mode(self, optimizer: Optimizer) -> list[nn.Module]:
        """The modules that ``optimizer``'s step has trained in evaluation mode, the first time that there are any.

        The script does so by intent, or has never called ``train`` after an evaluation. From now on such calls count.
        """
        if self.any_mode or not self.evaluated:
            return []
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        found = [m for m in self.evaluated if not stepped.isdisjoint(map(id, m.parameters()))]
        self.any_mode = bool(found)
        return found

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A planned model runs: calls in this context are not outermost."""
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Calls in this context are not those of the script: whatever runs around them, they can be outermost."""
        before, self._local.depth = getattr(self._local, "depth", 0), 0
        try:
            yield
        finally:
            self._local.depth = before


def is_training(module: nn.Module, any_mode: bool = False) -> bool:
    """Whether this call of ``module`` is a training forward, and not one that something else traces.

    ``any_mode``: also in evaluation mode.
    """
    return (
        torch.is_grad_enabled()
        and (module.training or any_mode)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch.fx._symbolic_trace.is_fx_symbolic_tracing()
        and not is_in_torch_dispatch_mode(include_infra_modes=False)  # FlopCounterMode: Dynamo would capture nothing
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None  # of make_fx
        and torch._C._functorch.peek_interpreter_stack() is None
    )


_CALLS = nn.Module._wrapped_call_impl.__code__  # of nn.Module.__call__, by which its frame is recognized


def called(own: nn.Module | None) -> nn.Module:
    """The module that is called, to be asked where the call arrives.

    It is ``own``, on which the caller was put, or one to which all attributes of that were copied.
    """
    found: nn.Module | None = own
    if not torch.compiler.is_compiling() and (frame := sys._getframe(2)).f_code is _CALLS:
        found = frame.f_locals["self"]
    assert found is not None
    return found


class NotCopied:
    """What is put on a module: copies and pickles of the module have none, also of all of its ``__dict__``."""

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def left_alone(module: nn.Module) -> Callable[..., Any]:
    """No trigger waits for ``module``, nor for a module in it, from now on; gives what runs it as it is."""
    drop_triggers(module)
    return module._call_impl


def drop_triggers(module: nn.Module, only: Callable[[nn.Module], bool] = lambda _: True) -> None:
    """No trigger waits any more for ``module``, or a module in it, where ``only`` says so."""
    for child in module.modules():
        if isinstance(child._compiled_call_impl, Trigger) and only(child):
            take_off(child)


def take_off(module: nn.Module) -> None:
    """Nothing stands on ``module`` any more, not even None: TorchScript asks for the type of all that it has."""
    vars(module).pop("_compiled_call_impl", None)


def is_one_call(module: nn.Module) -> bool:
    """Whether the module is one of torch's own without others in it: a kernel or two, where nothing can be chosen."""
    return type(module).__module__.startswith("torch.nn.") and not module._modules


class Trigger(NotCopied):
    """Waits for a module's first outermost training forward.

    Args:
        module: to wait for; the trigger is put on it.
        nesting: of the process.
        plan: gives what runs ``module`` in its place; called once.
    """

    def __init__(self, module: nn.Module, nesting: Nesting, plan: Callable[[nn.Module], Callable[..., Any]]) -> None:
        self.module = weakref.ref(module)
        self.nesting = nesting
        self.plan = plan
        module._compiled_call_impl = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; its first outermost training forward makes it a planned one."""
        own = self.module()
        module = called(own)
        if module is not own or not self.nesting.is_outermost_training(module):
            return module._call_impl(*args, **kwargs)
        return self.plan(module)(*args, **kwargs)

    def close(self, as_planned: bool = False) -> None:
        """Wait no more; nothing is planned yet that could be kept (``as_planned``, see ``PlannedCall``)."""
        module = self.module()
        if module is not None and module._compiled_call_impl is self:  # type: ignore[comparison-overlap]
            take_off(module)


# torch 2.11 does not look whether parameters are trained now that were not when a model was compiled
_UNSEEN = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


def frozen(module: nn.Module) -> tuple[bool, ...]:
    """Which parameters of a module are not trained, where TorchDynamo does not compile it anew for others; else ()."""
    return tuple(not p.requires_grad for p in module.parameters()) if _UNSEEN else ()
