"""The ``torch.compile`` backend: captures each of Dynamo's graphs, gets a schedule for it, and builds what runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import unset_fake_temporarily

from monetrun.capture import backward_autocast, execute, gradient_forms, gradient_order
from monetrun.capture import program as programs
from monetrun.capture.absent_terms import with_nothing_at, without
from monetrun.capture.again import TracedBackward
from monetrun.capture.autocast_cache import casts_once
from monetrun.capture.buffer_versions import uncounted
from monetrun.capture.double_backward import repeatable
from monetrun.capture.gradient_order import GradientOrder
from monetrun.capture.guards import FailedGuards, Guards, first_failed
from monetrun.capture.in_turn import InTurn, Turns
from monetrun.capture.joint import JointGraph, capture
from monetrun.capture.lowering import share_output_versions
from monetrun.capture.open_sizes import FixedSizes, OpenSizes, has_open_sizes
from monetrun.capture.output_gradients import AbsentGradients, is_tangent, stay_absent
from monetrun.capture.output_views import views_apart
from monetrun.capture.refusal import is_refusal
from monetrun.capture.regions import note_regions
from monetrun.capture.second_backward import sparing
from monetrun.capture.tracing import operators_kept_whole
from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.plan import Schedule
from monetrun.ops import random
from monetrun.runtime import breaks
from monetrun.runtime.call_timing import CallTiming, Run
from monetrun.runtime.seen_calls import (
    CallObserver,
    RoomKeeper,
    T,
    measured,
    measured_by_turns,
    observed,
    observed_by_turns,
    with_room,
    with_uses,
)
from monetrun.runtime.step_meter import StepMeter
from monetrun.runtime.terms import GradientTerms

_log = logging.getLogger("monetrun")


class Chooser(RoomKeeper, Protocol):
    """Decides what a captured graph runs."""

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's number, and its schedule.

        Raises:
            MonetrunError: no schedule fits.
        """


@dataclass(frozen=True, slots=True)
class PlannedCallMeters:
    """Measure the calls of graphs under a plan: their seconds, and their bytes.

    What runs ``capturing`` is not the step's: there a graph is captured.
    """

    timing: CallTiming
    steps: StepMeter
    capturing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@dataclass(frozen=True, slots=True)
class _PendingBackward:
    """What a backward that is compiled later has to know.

    Attributes:
        number: of its graph.
        order: of the graph's gradients.
        module: what gives the results of ``by_turns``.
        by_turns: the backward by turns; None: it gives all at once.
        watched: with ``by_turns``, while a step is recorded: of each turn the operator that runs before it, and its
            gradients' nodes in the joint graph.
    """

    number: int
    order: GradientOrder
    module: fx.GraphModule
    by_turns: InTurn | None
    watched: Sequence[tuple[int, Sequence[Any]]]

    def __deepcopy__(self, memo: Any) -> _PendingBackward:
        return self  # AOTAutograd copies the module with its meta


@dataclass(frozen=True, slots=True)
class _Traced:
    """What AOTAutograd's trace of a joint module tells beside it.

    Attributes:
        forward_outputs: how many of its outputs are the forward's.
        static_inputs: positions of parameters and buffers.
        order: of its gradients.
        draws_on: the devices whose generators it draws from.
    """

    forward_outputs: int
    static_inputs: tuple[int, ...]
    order: GradientOrder
    draws_on: tuple[torch.device, ...]

    def without(self, positions: Sequence[int]) -> _Traced:
        """Of the module without the inputs at these positions, which are none of the static ones."""
        static = tuple(k - sum(p < k for p in positions) for k in self.static_inputs)
        return dataclasses.replace(self, static_inputs=static)


class Backend:
    """A ``torch.compile`` backend for one model.

    Args:
        chooser: gives each graph its schedule.
        name: of the model.
        observer: sees all calls; while a step is recorded.
        meters: of calls under a plan. With them the guards of the schedules are checked before each call; without them
            guards only remember the weights they were called with.
        autocast: under which the script calls the backward.
        terms: how gradients are given.
        traced: called when TorchDynamo traces a forward.

    Attributes:
        apart: called when a call is differentiated further (see ``double_backward.repeatable``).
        captured: how many graphs were captured for training so far (0 after a call: nothing was captured).
        kept_nodes: nodes of those that Dynamo keeps.
    """

    def __init__(
        self,
        chooser: Chooser,
        name: str,
        *,
        observer: CallObserver | None = None,
        meters: PlannedCallMeters | None = None,
        autocast: backward_autocast.State = backward_autocast.OFF,
        terms: GradientTerms | None = None,
        traced: Callable[[], None] = lambda: None,
    ) -> None:
        self.chooser, self.name = chooser, name
        self.observer, self.meters = observer, meters
        self.autocast, self.terms, self.traced = autocast, terms or GradientTerms(), traced
        self.apart: Callable[[bool], bool] = lambda _: True
        self.captured = self.kept_nodes = 0
        self._order = GradientOrder()  # of the graph that is being compiled
        self._traced = TracedBackward()  # the same graph's
        self._guards: list[weakref.ref[Guards]] = []  # of the schedules that run under a plan, for each graph with any
        self._aot = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            inference_compiler=lambda module, inputs: execute.boxed(module),
            partition_fn=self._partition,
            decompositions=random.DECOMPOSITIONS,
            keep_inference_input_mutations=True,
        )

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs.

        Raises:
            CaptureFailed: it cannot be captured.
        """
        self.traced()
        breaks.check(module)
        note_regions(module)
        # while a step is recorded, it is known when its backward begins whether terms or turns are needed
        undecided = self.observer is not None and not gradient_order.communicates()
        self._order = order = GradientOrder(self.terms.needed or undecided, self.terms.by_turns or undecided)
        self._traced, of_views = TracedBackward(), views_apart(module)
        undonated = torch._functorch.config.patch(donated_buffer=False)
        seen = by.capturing() if (by := self.observer or self.meters) else contextlib.nullcontext()
        with of_views as given, seen, operators_kept_whole(), order.observed(), gradient_forms.left_open(), undonated:
            with backward_autocast.traced_under(self.autocast) as autocast, casts_once(module, inputs), order.kept():
                compiled = uncounted(stay_absent(self._aot(module, inputs)), module)
            traced = dataclasses.replace(self._traced, autocast=autocast)
            return given(repeatable(compiled, module, traced, lambda others: self.apart(others)))

    def failed_guards(self) -> FailedGuards | None:
        """The guards of one graph that do not hold any more (see ``Guards.failed_lately``), or None."""
        return first_failed([known for of in self._guards if (known := of()) is not None])

    def _partition(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._order.traced(module, num_fwd_outputs)
        static = tuple(static_lifetime_input_indices or ())
        of = _Traced(num_fwd_outputs, static, self._order, tuple(random.devices(module)))
        if not has_open_sizes(module):
            self.kept_nodes += len(module.graph.nodes)
            modules, self._traced = self._planned(module, of)
            return modules
        return self._with_open_sizes(module, of)

    def _with_open_sizes(self, module: fx.GraphModule, of: _Traced) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Modules that run a joint module whose sizes are left open."""

        def fix(fixed: fx.GraphModule) -> FixedSizes:
            (forward, backward), self._traced = self._planned(fixed, of.without(opened.numbers))
            inputs = [node.meta.get("val") for node in backward.graph.find_nodes(op="placeholder")]
            return FixedSizes(self._forward(forward, ()), lambda: self._backward(backward, inputs))

        opened = OpenSizes(module, of.forward_outputs, fix)
        opened.fixed(opened.hints())
        forward, backward = opened.shells()
        forward.meta["monetrun"] = backward.meta["monetrun"] = opened
        return forward, backward

    def _planned(
        self, module: fx.GraphModule, of: _Traced
    ) -> tuple[tuple[fx.GraphModule, fx.GraphModule], TracedBackward]:
        """The modules that run a joint module on its schedule, and what its backward was traced for."""
        started = time.perf_counter()
        with unset_fake_temporarily():  # also in a trial run on fake tensors, real kernels are queried for their needs
            joint = capture(module, of.forward_outputs, self.name, of.static_inputs)
            depends_on = backward_autocast.depends_on(joint) | {device_type for device_type, _ in self.autocast}
            traced = TracedBackward(of.draws_on, depends_on=depends_on, sums=of.order.sums)
            number, schedule = self.chooser.choose(joint)
            costs = None if self.meters is None else self.meters.timing.costs_of(joint)
        modules = execute.build(joint, schedule, costs)
        _log.debug("%s: %d operators in %.2f s", self.name, len(joint.nodes), time.perf_counter() - started)
        self.captured += 1
        guards = joint.guards if self.meters is None else joint.guards.of(schedule)
        if guards.used and self.meters is not None:
            self._guards = [*filter(lambda known: known(), self._guards), weakref.ref(guards)]
        forward, backward = modules
        forward.meta["monetrun"] = (number, guards, of.forward_outputs)
        # it may be compiled much later, after other graphs
        with_terms, by_turns = of.order.in_turn(backward, joint.primals)
        watched = [] if by_turns is None or self.observer is None else _watched(joint, by_turns)
        backward.meta["monetrun"] = _PendingBackward(number, of.order, with_terms, by_turns, watched)
        return modules, traced

    def _forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        share_output_versions()
        if isinstance(opened := module.meta["monetrun"], OpenSizes):
            return opened.forward
        number, guards, outputs = module.meta["monetrun"]
        if self.meters is None:
            return observed(self.observer, FORWARD, number, guards.watching(execute.boxed(module)))
        timed = self._timed(module, FORWARD, number)
        run = measured(self.meters.steps, FORWARD, number, timed)
        return guards.checking(with_room(self.chooser, guards.graph, outputs, run))

    def _backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        if isinstance(opened := module.meta["monetrun"], OpenSizes):
            return opened.backward
        pending: _PendingBackward = module.meta["monetrun"]
        if pending.by_turns is None:
            return self._backward_at_once(pending.number, module, inputs)
        by_turns = self._backward_by_turns(pending, pending.by_turns, inputs)
        if gradient_order.communicates() or self.terms.needed or self.terms.by_turns:
            return by_turns
        terms, at_once = self.terms, pending.order.at_once(self._backward_at_once(pending.number, module, inputs))

        def as_needed(arguments: list[Any]) -> Any:
            return (by_turns if terms.needed or terms.by_turns else at_once)(arguments)

        as_needed._boxed_call = True  # type: ignore[attr-defined]
        return as_needed

    def _backward_by_turns(self, pending: _PendingBackward, by_turns: InTurn, inputs: Sequence[Any]) -> Run:
        module, number, turns = pending.module, pending.number, sparing(pending.module, by_turns.run)
        if self.meters is not None:
            turns = self._timed_by_turns(turns, module, pending.order, number)
            turns = measured_by_turns(self.meters.steps, number, turns)
        elif self.observer is not None:
            turns = observed_by_turns(self.observer, number, pending.watched, turns)
        turns = AbsentGradients(module, inputs).by_turns(by_turns, turns)
        turns = _with_uses(self, number, module, gradient_forms.fitting(turns, module, inputs))
        return pending.order.by_turns(by_turns, turns)

    def _backward_at_once(self, number: int, module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        if self.meters is None:
            run = observed(self.observer, BACKWARD, number, sparing(module, execute.boxed(module)))
        else:
            run = measured(self.meters.steps, BACKWARD, number, sparing(module, self._timed(module, BACKWARD, number)))

        def run_without(absent: Sequence[int]) -> Run:
            shortened, unread = without(module, absent)
            # what is freed first is freed within the backward: outside of it, it would be the script's
            program = sparing(shortened, _program(shortened))
            found = observed(self.observer, BACKWARD, number, with_nothing_at(unread, program))
            return found if self.meters is None else measured(self.meters.steps, BACKWARD, number, found)

        run = backward_autocast.off_in(AbsentGradients(module, inputs).at_once(run, run_without))
        return _with_uses(self, number, module, gradient_forms.fitting(run, module, inputs))

    def _timed(self, module: fx.GraphModule, phase: str, number: int) -> Run:
        """Runs ``module``, timed in its early calls."""
        assert self.meters is not None
        run = _program(module)
        timed = self.meters.timing.instrumented(module, phase, number)
        return self.meters.timing.early_calls(run, None if timed is None else execute.boxed(timed))

    def _timed_by_turns(self, run: Turns, module: fx.GraphModule, order: GradientOrder, number: int) -> Turns:
        """``_timed`` of a backward that gives its gradients by turns."""
        assert self.meters is not None
        timed = self.meters.timing.instrumented(module, BACKWARD, number)
        early = None if timed is None else sparing(timed, order.of_turns(timed).run)
        return self.meters.timing.early_calls_by_turns(run, early)


def _watched(joint: JointGraph, by_turns: InTurn) -> list[tuple[int, Sequence[Any]]]:
    """See ``_PendingBackward``."""
    nodes = dict(enumerate(joint.gradients))  # of a sum's terms the last one stands for it
    turns = zip(by_turns.after, by_turns.turns, strict=True)
    return [(operator, [nodes.get(k) for k in turn]) for operator, turn in turns]


def _with_uses(backend: Backend, number: int, module: fx.GraphModule, run: T) -> T:
    """``run``, a backward of which the chooser hears which outputs it is for, where steps are recorded or planned."""
    if backend.meters is None and backend.observer is None:
        return run
    placeholders = enumerate(module.graph.find_nodes(op="placeholder"))
    tangents = [k for k, node in placeholders if is_tangent(node)]
    return with_uses(backend.chooser, number, tangents, run, recording=backend.meters is None)


def _program(module: fx.GraphModule) -> Run:
    return (programs.program(module) if programs.runs_on_cuda(module) else None) or execute.boxed(module)


def or_as_it_is(
    backend: Backend, give_up: Callable[[str], None], runs_in_python: Callable[[], None]
) -> Callable[..., Any]:
    """``backend``, for graphs of a forward that has begun and cannot be repeated: what it cannot compile runs as it is.

    A graph that has graphs in it (a checkpointed region) does not: they take buffers as inputs, which they change. So
    the code that it was made of runs in Python, of which Dynamo makes graphs further in; ``runs_in_python`` is called,
    since nothing tells from now on which way that code takes.

    Refusals (nothing fits the budget, a plan of another model) are raised.
    """

    def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return backend(module, inputs)
        except Exception as error:
            if is_refusal(error):
                raise breaks.Refused(error) from error
            _log.debug("a graph of %s runs as it is", backend.name, exc_info=error)
            what = str(error).partition("\n")[0]
            give_up(f"a part of {backend.name} runs without a plan: {type(error).__name__}: {what}")
            if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in module.graph.nodes):
                runs_in_python()
                raise torch._dynamo.exc.SkipFrame(what) from None
            return module.forward

    return compiled
