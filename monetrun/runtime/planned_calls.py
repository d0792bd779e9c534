"""What is called in place of a module's forward from its first training forward on (see ``trigger``): its planned call.

It stands in the attribute that ``nn.Module.compile`` uses, which is no part of a module's state: a deep copy or a saved
model comes out plain.

A model that cannot be captured whole runs in parts: its forward runs in Python, or as TorchDynamo splits it, and every
module in it that Python calls becomes a planned call of its own, down to where that is possible.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monetrun.capture.eager_answers import eager_answers, was_asked
from monetrun.core.errors import GuardFailed, MemoryShort, PlanningFault
from monetrun.core.options import only_exact, parse_kinds
from monetrun.core.step import Break
from monetrun.runtime import one_call, resharding, sharding, unplannable_use
from monetrun.runtime.entries import MOST_TRACED_NODES, entry, forget_former
from monetrun.runtime.failed_call import undone_if_the_script_fails
from monetrun.runtime.settling import Settling
from monetrun.runtime.smaller_sizes import SmallerSizes, is_small
from monetrun.runtime.trigger import Nesting, NotCopied, Trigger, called, frozen, is_one_call, is_training, take_off
from monetrun.runtime.unguarded import Unguarded

if TYPE_CHECKING:  # the engine imports the planner, too slow for ``import torch``
    from monetrun.runtime.backend import Backend
    from monetrun.runtime.engine import Engine
    from monetrun.runtime.reporter import Reporter


_ASKS = (
    "asks whether it is being compiled, and is captured whole only if it is told so: results may differ from eager's by"
    " rounding (--implementations exact: in parts, as eager)"
)

_APART = "several backward passes run through it"

_log = logging.getLogger("monetrun")

_torch_compile = torch.compile  # what stands there later notices what the script compiles


class PlannedCall(NotCopied):
    """Runs a model, or a module in it, on its schedules in training, and as it is in evaluation.

    Args:
        module: the module.
        nesting: of the process.
        engine: chooses the schedules.
        reporter: says what keeps the model from being captured whole.
        path: which module it is (see ``Break.module``).
        model: of which ``module`` is a part; None: it is a model itself.
        abandon: has all models run as they are, for the reason that it is given.

    Attributes:
        backend: compiles the module's graphs; None before the first call.
        broken: why it is not captured whole, once that is known.
        as_compiled: code that asks whether it is being compiled is told so.
        parts: planned calls of the modules in it, where it is not captured whole. Only of a model.
    """

    def __init__(
        self,
        module: nn.Module,
        nesting: Nesting,
        engine: Engine,
        reporter: Reporter,
        path: str,
        model: PlannedCall | None = None,
        abandon: Callable[[str], None] | None = None,
    ) -> None:
        self.module = weakref.ref(module)
        self.name = type(module).__name__
        self.nesting = nesting
        self.engine = engine
        self.reporter = reporter
        self.path = path
        self.model = model
        self.abandon: Callable[[str], None] | None = model.abandon if model is not None else abandon
        self.backend: Backend | None = None
        self.parts: list[PlannedCall] = []
        self.broken: Break | None = None
        self._generation, self._said = -1, False
        self.as_compiled, self._open_sizes = False, True  # sizes that vary are traced once for all
        self._run: Any = None
        self.settling: Settling = Settling() if model is None else model.settling
        # of a model and its parts, by class, since many are alike: generation, backend, and what Dynamo compiles
        self._compiled: dict[tuple[Any, ...], tuple[int, Backend, Any, Any]] = {}
        self._frozen, self.unguarded, self.sizes = frozen(module), Unguarded(module), SmallerSizes()
        self.sharded = self._without_hooks = sharding.is_sharded(module)  # then the forward alone is captured
        if path in engine.breaks:
            self._break(engine.breaks[path])
            self._said = True  # the launcher has printed what the record has
        elif found := sharding.break_between_blocks(module, path):
            self._breaks_at(found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            MonetrunError: no schedule fits the budget, or (``strict``) nothing was captured.
        """
        own = self.module()
        module = called(own)
        if module is not own or torch.compiler.is_compiling():  # another module's graph includes this one
            return module._call_impl(*args, **kwargs)
        resharding.forward_begins(module)
        if self.model is not None:  # Dynamo may be at work on what calls this
            return one_call.without_dynamo(self._run_part, module, args, kwargs)
        if not self.nesting.is_outermost_training(module) or _cannot_be_planned(self, args, kwargs):
            if self.nesting.outermost and not torch.is_grad_enabled():
                self.engine.evaluates()
            return _unplanned(self, module, args, kwargs)
        result = self._run_outermost(module, args, kwargs)
        self._said = self._said or (not one_call.is_without_gradients(result) and _reported(self))
        return result

    @property
    def captured(self) -> int:
        """How many graphs were captured for training, with those of parts; 0 after a call: none."""
        return sum(b.captured for b in {call.backend for call in (self, *self.parts) if call.backend is not None})

    def _run_outermost(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        hooked = one_call.leaves(args, kwargs) if self.sharded else None
        if self.broken is not None or self.model is not None:
            self.settling.begins(one_call.leaves(args, kwargs), self.engine.generation)
        try:
            self.engine.plan_recorded_step()
        except PlanningFault as fault:
            return _as_it_is(self, fault, module, args, kwargs)
        with self.engine.forward(hooked), self.nesting.entered():
            return self._run_planned(module, args, kwargs)

    def _run_part(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not is_training(module, self.nesting.any_mode) or not _carries_gradients(self, module, args, kwargs):
            return _unplanned(self, module, args, kwargs)
        run = self._run_outermost if self.nesting.outermost else self._run_planned
        return run(module, args, kwargs)

    def _run_planned(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        try:
            if self._without_hooks:
                with _as_planned(self, module):
                    return sharding.around_forward(module, self._run_captured, args, kwargs)
            return self._run_captured(module, args, kwargs)
        except PlanningFault as fault:
            if self.broken is not None:  # a part of the forward may have run
                raise (fault.__cause__ if fault.of_one_call else None) or fault from None
            return _as_it_is(self, fault, module, args, kwargs)

    @undone_if_the_script_fails
    def _run_captured(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        engine, run_as_it_is = self.engine, module.forward if self._without_hooks else module._call_impl
        while True:
            if self.broken is not None and self.broken.in_python:
                return run_as_it_is(*args, **kwargs)
            if is_small(self, args, kwargs):
                return run_as_it_is(*args, **kwargs)
            _compile_anew_where_changed(self, module)
            if self._generation == engine.generation and self.backend and (failed := self.backend.failed_guards()):
                engine.plan_without(failed)
            slow: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self._generation != engine.generation or (self.backend and self.backend.kept_nodes > MOST_TRACED_NODES):
                self._compile()
                slow = self.reporter.if_slow(f"compiling {self.name}")
            assert self.backend is not None
            before = self.backend.captured
            try:
                with slow:
                    result = _with_own_errors(self, module, args, kwargs)
            except GuardFailed as failure:  # ends: each time there is one implementation less
                engine.plan_without(failure.failed)
            except MemoryShort as failure:  # ends: each time there is room for what is held, or an error
                engine.make_room(failure.shortage)
            except one_call.capture_errors() as error:
                from monetrun.runtime import breaks

                if self.broken is not None:
                    raise  # a part of the forward may have run
                if self._open_sizes and (before or breaks.is_of_open_sizes(error)):
                    self._open_sizes, self._generation = False, -1
                elif not self.as_compiled and _may_be_told(engine):
                    self.as_compiled, self._generation = True, -1
                elif one_call.has_hooks(module) and not self._without_hooks:
                    self._without_hooks, self.as_compiled, self._generation = True, False, -1
                    gc.collect()
                    return self._run_planned(module, args, kwargs)
                else:
                    self._cannot_be_captured(breaks.of(error, self.path, self.name), error)
            else:
                self.unguarded.look_again(module, (self.backend, self.backend.captured))
                unsettled = self.backend.captured > before and self.settling.captured(self.path)
                if unsettled and (self.broken or self.model):
                    self._break(Break(self.path, self.name, "its inputs", "a new shape in each call", in_python=True))
                if self.as_compiled and self.backend.captured and engine.running is not None:
                    self.reporter.warn(f"{self.name} {_ASKS}")
                return result
            if self.broken is not None:
                gc.collect()  # the trace that failed holds the inputs, in a cycle

    def _compile(self) -> None:
        """Have Dynamo compile the module anew; parts of one class share what is compiled."""
        from monetrun.runtime.backend import or_as_it_is

        generation, whole = self.engine.generation, self.broken is None
        shared = (self.model or self)._compiled
        state = (whole, self._open_sizes, self.as_compiled, self._without_hooks, self.unguarded.now, self._frozen)
        key = (self.model is None, type(self.module()), *state)
        if key not in shared or shared[key][0] != generation or shared[key][1].kept_nodes > MOST_TRACED_NODES:
            backend = self.engine.backend(self.name)
            of = weakref.ref(self.model or self), weakref.ref(backend)
            backend.apart = functools.partial(_differentiated_apart, *of)
            compiler = backend if whole else or_as_it_is(backend, self.reporter.give_up, self.engine.runs_in_python)
            dynamic = None if whole and self._open_sizes and self.engine.recorder is None else False
            run = _torch_compile(made := entry(self._without_hooks), backend=compiler, dynamic=dynamic, fullgraph=whole)
            forget_former(shared, key, generation)
            shared[key] = (generation, backend, run, (compiler, made.__code__))
        self._generation, self.backend, self._run, _ = shared[key]

    # ---- parts

    def _cannot_be_captured(self, found: Break, error: Exception) -> None:
        """Nothing of the module has run: run it in parts from now on."""
        _log.debug("%s is not captured whole", self.path, exc_info=error)
        self._breaks_at(found)

    def _breaks_at(self, found: Break) -> None:
        self.engine.breaks[self.path] = found
        self._break(found)

    def _break(self, found: Break) -> None:
        self.broken, self.as_compiled = found, False
        self._said = False  # a model that was captured whole so far may break later
        self._generation, self.backend = -1, None
        if self.model is None and not self.parts:
            _make_parts(self)

    def close(self, as_planned: bool = False) -> None:
        """Have the module run as it is; ``as_planned``: sharded ones keep or free parameters as the plan says."""
        for call in (self, *self.parts):
            _close(call, as_planned)


def _close(call: PlannedCall, as_planned: bool) -> None:
    if (module := call.module()) is not None and _stands_on(call, module):
        take_off(module)
        if as_planned and (left := resharding.left_as_planned(module, call.nesting, call.path, call.engine.plan)):
            module._compiled_call_impl = left  # type: ignore[assignment]


def _stands_on(call: PlannedCall, module: nn.Module) -> bool:
    """Whether this call is what runs the module, or has left what does."""
    return module._compiled_call_impl is call or isinstance(module._compiled_call_impl, resharding.RunsAsPlanned)  # type: ignore[comparison-overlap]


def _differentiated_apart(model: weakref.ref[PlannedCall], backend: weakref.ref[Backend], others: bool) -> bool:
    """Backward passes run through calls that share nothing: as one node of autograd's graph each would have only one.

    Where the first was not for ``others`` of their outputs, it is what reads the outputs that is in parts then.

    Gives whether the numbers of this step count.
    """
    owner = model()
    if owner is None or (module := owner.module()) is None or module._compiled_call_impl is not owner:  # type: ignore[comparison-overlap]
        return True
    calls = [call for call in (owner, *owner.parts) if others and call.backend is backend()]
    for call in calls:
        call._breaks_at(Break(call.path, call.name, "each for other outputs", _APART, in_python=True))
    return owner.engine.found_broken(bool(calls))


def _carries_gradients(call: PlannedCall, module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a backward follows this call, and none runs now; looked up until something is captured."""
    if one_call.autograd_is_at_work():
        return False
    if call.backend is not None:
        return True
    given = itertools.chain(module.parameters(), one_call.leaves(args, kwargs))
    return any(p.requires_grad for p in given if isinstance(p, torch.Tensor))


def _compile_anew_where_changed(call: PlannedCall, module: nn.Module) -> None:
    """Where other parameters are trained than before, or what has no guard was changed."""
    if (now := frozen(module)) != call._frozen:
        call._frozen, call._generation = now, -1
    if call.unguarded.changed():
        call._generation = -1


def _make_parts(call: PlannedCall) -> None:
    """Put a planned call on each module in the model's that may be worth a plan of its own."""
    module = call.module()
    assert module is not None
    for name, child in module.named_modules():
        free = child._compiled_call_impl is None or isinstance(child._compiled_call_impl, Trigger)
        if child is module or not free or isinstance(child, torch.jit.ScriptModule) or is_one_call(child):
            continue
        part = PlannedCall(child, call.nesting, call.engine, call.reporter, f"{call.path}.{name}", call)
        call.parts.append(part)
        child._compiled_call_impl = part  # type: ignore[assignment]


def _as_planned(call: PlannedCall, module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """In it, what is sharded keeps or frees its parameters as is planned, or as is recorded."""
    recorder = None if call.engine.recorder is None else call.engine.recorder.sharding
    return resharding.within_planned_call(module, call.path, recorder, call.engine.plan)


def _unplanned(call: PlannedCall, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run the module as it is, in one call.

    Other ranks may run the plan: in training, parameters of a sharded one are kept or freed as there.
    """
    trains = torch.is_grad_enabled() and (module.training or call.nesting.any_mode)
    with _as_planned(call, module) if call.sharded and trains else contextlib.nullcontext():
        return module._call_impl(*args, **kwargs)


def _cannot_be_planned(call: PlannedCall, args: Any, kwargs: Any) -> bool:
    """Whether the script uses a model as no plan can: all models run as they are from now on."""
    if call.abandon is None:
        return False
    if not (why := unplannable_use.of_call(call.name, one_call.leaves(args, kwargs), call.engine.settings)):
        return False
    call.abandon(why)
    return True


def _as_it_is(call: PlannedCall, fault: PlanningFault, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run the module, of which nothing has run, as it is, and all models from now on.

    Raises:
        PlanningFault: with ``strict``.
    """
    if call.engine.settings.strict or call.abandon is None:
        raise fault
    if not call.engine.lets_one_call_be(fault):
        without = "models run without a plan from now on, their budget is not enforced"
        call.abandon(f"{without}: {fault.message}, {fault.hint}")
    return _unplanned(call, module, args, kwargs)


def _may_be_told(engine: Engine) -> bool:
    """Whether code has asked whether it is being compiled, and may be told so: its results may differ by rounding."""
    return was_asked() and not only_exact(parse_kinds(engine.settings.implementations))


def _reported(call: PlannedCall) -> bool:
    """Say once what keeps the model from being captured whole, and what is planned; the latter with the plan."""
    from monetrun.planning.coverage import HOLDS, planned_share

    reason = f": {call.broken.reason} ({call.broken.where})" if call.broken else ""
    running = call.engine.running
    if not call.captured:
        enforced = "" if running and running.enforcement.holds else "; its budget is not enforced"
        without = f"runs without a plan{' from now on' if call.engine.meters.steps.steps else ''}"
        call.reporter.give_up(f"{call.name} {without}, nothing of its forward was captured{reason}{enforced}")
    elif call.broken:
        if running is None:
            return False
        share = f"; {planned_share(running.record):.0%} of the step's peak is planned" if running.record else ""
        call.reporter.tell(f"{call.name} is planned in parts{reason}{share}, {HOLDS}")
    return True


def _with_own_errors(call: PlannedCall, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run what Dynamo compiles; an error of monetrun's is raised without the one of Dynamo's that wraps it."""
    from monetrun.runtime import breaks

    pieces = contextlib.nullcontext() if call.broken is None else breaks.in_pieces()
    before, running = call.captured, call.engine.running
    try:
        with eager_answers(not call.as_compiled, call.broken is None), pieces:
            result = call._run(module, args, kwargs)
        if running is not None and call.captured > before:
            call.sizes.captured(running.room.began, call.engine.generation, args, kwargs)
        return result
    except breaks.Refused as refused:
        raise refused.refusal from None
    except torch._dynamo.exc.BackendCompilerFailed as error:
        from monetrun.capture.refusal import is_refusal

        if is_refusal(error.inner_exception):
            raise error.inner_exception from None
        raise
    except torch._dynamo.exc.TorchDynamoException as error:
        if not breaks.is_for_another_call(error):
            raise
    return _with_own_errors(call, module, args, kwargs)
