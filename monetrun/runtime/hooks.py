"""What is patched in torch: how monetrun sees optimizers, their steps, and gradients that are set to zero."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from monetrun.capture import allocator_history, output_inputs
from monetrun.core.imports import without_collection
from monetrun.core.patched import patched
from monetrun.runtime import allocation_limit, torchscript
from monetrun.runtime.unplannable_use import IN_CUDA_GRAPHS, OF_OUTPUTS
from monetrun.runtime.within_backward import StepsWithinBackward

_FSDP = "torch.distributed.fsdp"  # has hooks on a module's outputs, to get its parameters before the backward


class TrainingObserver(Protocol):
    """Receives what the script's optimizers do."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer was constructed."""

    def parameters_added(self, optimizer: Optimizer) -> None:
        """An optimizer got a further parameter group (also while it is being constructed)."""

    def zeroing_gradients(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script calls ``zero_grad``; the gradients are still there."""

    def evaluates(self, module: nn.Module) -> None:
        """The script calls ``eval`` of a module."""

    def backward_begins(self, roots: Iterable[Any], create_graph: bool) -> None:
        """The script differentiates ``roots``; ``create_graph``: to differentiate the gradients, too."""

    def backward_failed(self) -> None:
        """That has failed, and the script may go on."""

    def plan_no_more(self, calls: Sequence[Any], use: str) -> None:
        """The script makes a use of planned models for which there is no plan; of these compiled calls, if of any."""

    def compiles(self, compiled: Any) -> None:
        """The script compiles a function or a module (``torch.compile``)."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's ``step`` begins."""

    def closure_ended(self, optimizer: Optimizer) -> None:
        """The closure that an optimizer's ``step`` was given has run; the optimizer goes on."""

    def step_ended(self, optimizer: Optimizer) -> None:
        """An optimizer's ``step`` has ended."""

    def step_within_backward(self, optimizer: Optimizer, ended: bool) -> None:
        """A hook begins an optimizer's ``step`` within a backward, or (``ended``) has made it.

        Of it, too, ``step_begins`` and ``step_ended`` tell, when the backward has ended.
        """


class _Known:
    """Optimizers of the process; all of them once they were looked for while each new one is observed.

    Attributes:
        hooks: how often tensors got hooks that take gradients, or optimizers parameters, which may have such.
    """

    def __init__(self) -> None:
        self.made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.observed = self.all = False
        self.hooks = 0


_known = _Known()


def optimizers() -> list[Optimizer]:
    """All optimizers that exist in the process. The first look at all objects takes 0.2 seconds."""
    if not _known.all:
        _known.made.update(thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer))
        _known.all = _known.observed
    return list(_known.made)


def hooks_of_trained() -> int:
    """A number that changes whenever what optimizers train may have got a hook that takes its gradient."""
    return _known.hooks


def _observes(observed: bool) -> None:
    _known.observed, _known.all = observed, False


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """The optimizers in use that train parameters of ``model``: not those that former trainings left in cycles."""
    gc.collect()
    parameters = {id(p) for p in model.parameters()}
    return [optimizer for optimizer in optimizers() if not parameters.isdisjoint(_trained([optimizer]))]


def all_trained(made: Iterable[Optimizer], stepped: Collection[Optimizer]) -> bool:
    """Whether every parameter of the optimizers ``made`` is one of those that have ``stepped``.

    An optimizer around another one makes no step itself (accelerate's), nor does one of a former training.
    """
    waiting = [optimizer for optimizer in made if optimizer not in stepped]
    return not waiting or _trained(waiting) <= _trained(stepped)


def _trained(made: Iterable[Optimizer]) -> set[int]:
    return {id(p) for optimizer in made for group in optimizer.param_groups for p in group["params"]}


def install(observer: TrainingObserver, undo: contextlib.ExitStack) -> None:
    """Patch torch so that ``observer`` sees the script's optimizers; closing ``undo`` restores torch."""
    init, add_group = Optimizer.__init__, Optimizer.add_param_group
    zero_optimizer, zero_module = Optimizer.zero_grad, nn.Module.zero_grad
    compile_ = torch.compile
    _observes(True)
    undo.callback(_observes, False)
    _observe_gradients(observer, undo)
    _observe_modes(observer, undo)
    _observe_graphs(observer, undo)
    torchscript.passes_calls_over(undo)
    allocation_limit.keep_the_scripts(undo)
    allocator_history.keep_the_scripts(undo)

    def observed_init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        with without_collection():
            importlib.import_module("torch._dynamo")  # torch's first optimizer imports it
        observe_steps()
        _known.made.add(self)
        init(self, *args, **kwargs)  # adds its parameters
        observer.optimizer_made(self)

    def observed_add_group(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        add_group(self, *args, **kwargs)
        _known.hooks += 1
        observer.parameters_added(self)

    def observed_zero_optimizer(self: Optimizer, set_to_none: bool = True) -> None:
        if not torch.compiler.is_compiling():
            observer.zeroing_gradients((p for g in self.param_groups for p in g["params"]), set_to_none)
        zero_optimizer(self, set_to_none)

    def observed_zero_module(self: nn.Module, set_to_none: bool = True) -> None:
        if not torch.compiler.is_compiling():
            observer.zeroing_gradients(self.parameters(), set_to_none)
        zero_module(self, set_to_none)

    def observed_compile(model: Any = None, **kwargs: Any) -> Any:
        if model is not None and not kwargs.get("disable"):  # None: a decorator with options, which calls this again
            observer.compiles(model)
        return compile_(model, **kwargs)

    for owner, name, function, original in (
        (torch, "compile", observed_compile, compile_),
        (Optimizer, "__init__", observed_init, init),
        (Optimizer, "add_param_group", observed_add_group, add_group),
        (Optimizer, "zero_grad", observed_zero_optimizer, zero_optimizer),
        (nn.Module, "zero_grad", observed_zero_module, zero_module),
    ):
        functools.update_wrapper(function, original)
        undo.enter_context(patched(owner, name, function))

    steps = StepsWithinBackward(observer.step_within_backward, observer.step_begins, observer.step_ended)

    def step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        steps.begins(optimizer)
        return _with_closure_observed(optimizer, args, kwargs, observer)

    def step_ended(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps.ended(optimizer)

    @functools.cache
    def observe_steps() -> None:  # also those of a compiled ``optimizer.step``, whose graph ends before and after it
        for register, action in (
            (register_optimizer_step_pre_hook, step_begins),
            (register_optimizer_step_post_hook, step_ended),
        ):
            undo.callback(register(torch.compiler.disable(action)).remove)

    _observe_copies(observer, undo, observe_steps)
    if "torch._dynamo" in sys.modules:  # else it is not imported before the script has an optimizer
        observe_steps()


def _observe_copies(observer: TrainingObserver, undo: contextlib.ExitStack, observe_steps: Callable[[], None]) -> None:
    """Patch what makes copies of optimizers, and those that are loaded from files."""
    original = Optimizer.__setstate__

    @functools.wraps(original)
    def observed(self: Optimizer, state: dict[str, Any]) -> None:
        original(self, state)
        if self not in _known.made:  # one that loads a state is known
            observe_steps()
            _known.made.add(self)
            _known.hooks += 1
            observer.optimizer_made(self)

    undo.enter_context(patched(Optimizer, "__setstate__", observed))


def _observe_graphs(observer: TrainingObserver, undo: contextlib.ExitStack) -> None:
    """Tell ``observer`` when the script begins to capture a CUDA graph of what it trains."""
    kinds = [torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", None)]  # the latter since torch 2.14
    for kind in kinds:
        if kind is not None:
            undo.enter_context(patched(kind, "capture_begin", _observed_capture(kind.capture_begin, observer)))


def _observed_capture(capture_begin: Callable[..., None], observer: TrainingObserver) -> Callable[..., None]:
    @functools.wraps(capture_begin)
    def observed(self: Any, *args: Any, **kwargs: Any) -> None:
        if torch.is_grad_enabled():  # not in evaluation: of ``generate``, say
            observer.plan_no_more((), IN_CUDA_GRAPHS)
        capture_begin(self, *args, **kwargs)

    return observed


def _observe_modes(observer: TrainingObserver, undo: contextlib.ExitStack) -> None:
    """Patch what sets a module to evaluation mode, its parts not counted apart."""
    train, evaluate = nn.Module.train, nn.Module.eval
    within = False
    latest: Callable[[], nn.Module | None] = lambda: None  # noqa: E731 - that was set to training mode

    def evaluates(module: nn.Module) -> None:
        """Not where a part of what trains is put in evaluation mode, as for a batch norm's statistics."""
        whole = latest()
        while isinstance(whole, nn.parallel.DistributedDataParallel) and module is not whole:
            whole = whole.module  # transformers' Trainer trains the wrapper, and evaluates what is in it
        if whole is None or module is whole or all(part is not module for part in whole.modules()):
            observer.evaluates(module)

    def observed(module: nn.Module, mode: bool, set_mode: Callable[[], nn.Module]) -> nn.Module:
        nonlocal within, latest
        if within or torch.compiler.is_compiling():
            return set_mode()
        if mode:
            latest = weakref.ref(module)
        else:
            evaluates(module)
        within = True
        try:
            return set_mode()
        finally:
            within = False

    @functools.wraps(train)
    def observed_train(self: nn.Module, mode: bool = True) -> nn.Module:
        return observed(self, mode, lambda: train(self, mode))

    @functools.wraps(evaluate)
    def observed_eval(self: nn.Module) -> nn.Module:  # a module's own ``train`` may not call torch's
        return observed(self, False, lambda: evaluate(self))

    undo.enter_context(patched(nn.Module, "train", observed_train))
    undo.enter_context(patched(nn.Module, "eval", observed_eval))


@contextlib.contextmanager
def _left_where_it_fails(observer: TrainingObserver) -> Iterator[None]:
    """A backward: where it fails, or is interrupted in a notebook, the script has left the step."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        observer.backward_failed()
        raise


def _observe_gradients(observer: TrainingObserver, undo: contextlib.ExitStack) -> None:
    """Patch what asks torch for gradients."""
    backward, grad = torch.autograd.backward, torch.autograd.grad
    register_hook, retain_grad = torch.Tensor.register_hook, torch.Tensor.retain_grad
    register_accumulated = torch.Tensor.register_post_accumulate_grad_hook

    def observed_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            create_graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
            observer.backward_begins(output_inputs.listed(tensors), bool(create_graph))
        with _left_where_it_fails(observer):
            backward(tensors, *args, **kwargs)

    def observed_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return grad(outputs, *args, **kwargs)
        create_graph = kwargs.get("create_graph", args[3] if len(args) > 3 else False)
        observer.backward_begins(output_inputs.listed(outputs), bool(create_graph))
        given = output_inputs.given_by_calls(args[0] if args else kwargs.get("inputs"))
        with _left_where_it_fails(observer):
            if given:
                return output_inputs.grad(grad, given, outputs, *args, **kwargs)
            return grad(outputs, *args, **kwargs)

    def observed_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        of_torch = str(getattr(hook, "__module__", "")).startswith(_FSDP)  # that looks at no gradient
        given = {} if of_torch or torch.compiler.is_compiling() else output_inputs.given_by_calls(self)
        if not given:
            _known.hooks += 1
            return register_hook(self, hook)
        observer.plan_no_more([output_inputs.node_of(self)], OF_OUTPUTS)
        return output_inputs.watch(*given[0], hook)

    def observed_retain(self: torch.Tensor) -> None:
        given = {} if torch.compiler.is_compiling() else output_inputs.given_by_calls(self)
        if given and not self.retains_grad:
            observer.plan_no_more([output_inputs.node_of(self)], OF_OUTPUTS)
            output_inputs.retain(self, *given[0])
        retain_grad(self)

    def observed_accumulated(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        _known.hooks += 1
        return register_accumulated(self, hook)

    for owner, name, function, original in (
        (torch.autograd, "backward", observed_backward, backward),
        (torch.autograd, "grad", observed_grad, grad),
        (torch.Tensor, "register_hook", observed_hook, register_hook),
        (torch.Tensor, "retain_grad", observed_retain, retain_grad),
        (torch.Tensor, "register_post_accumulate_grad_hook", observed_accumulated, register_accumulated),
    ):
        functools.update_wrapper(function, original)
        undo.enter_context(patched(owner, name, function))
    torchscript.knows({observed_backward: "aten::backward", observed_grad: "aten::grad"}, undo)


def codes_that_observe_gradients() -> list[CodeType]:
    """Of what now stands for torch's functions: Dynamo must not compile it, since a graph keeps no ``retain_grad``."""
    of_tensors = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
    functions = torch.autograd.backward, torch.autograd.grad, *(getattr(torch.Tensor, name) for name in of_tensors)
    codes = (getattr(function, "__code__", None) for function in functions)
    return [code for code in codes if code is not None and code.co_filename == __file__]


def _with_closure_observed(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], observer: TrainingObserver
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of ``step`` with its closure, if any, reporting its end; None where there is none.

    Forward and backward may run in it (Lightning does so), and what the optimizer allocates comes after it.
    """
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(given):
        return None

    @functools.wraps(given)
    def closure(*values: Any, **named: Any) -> Any:
        result = given(*values, **named)
        observer.closure_ended(optimizer)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
