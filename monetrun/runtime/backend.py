"""The ``torch.compile`` backend: captures each of Dynamo's graphs, gets a schedule for it, and builds what runs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import unset_fake_temporarily

from monetrun.capture import execute
from monetrun.capture.guards import FailedGuards, Guards
from monetrun.capture.joint import JointGraph, capture
from monetrun.capture.tracing import operators_kept_whole
from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.plan import Schedule
from monetrun.ops.random import DECOMPOSITIONS
from monetrun.runtime.call_timing import CallTiming, Run
from monetrun.runtime.step_meter import StepMeter

_log = logging.getLogger("monetrun")


class Chooser(Protocol):
    """Decides what a captured graph runs."""

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's number, and its schedule.

        Raises:
            MonetrunError: no schedule fits.
        """


class CallObserver(Protocol):
    """Sees the calls of captured graphs with their tensors."""

    def call_begins(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        """A graph's forward or backward is about to run on these arguments (see ``execute.build``)."""

    def call_ended(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        """It has run, with these results."""


@dataclass(frozen=True, slots=True)
class PlannedCallMeters:
    """Measure the calls of graphs under a plan: their seconds, and their bytes."""

    timing: CallTiming
    steps: StepMeter


class Backend:
    """A ``torch.compile`` backend for one model.

    Args:
        chooser: gives each graph its schedule.
        name: of the model.
        observer: sees all calls; while a step is recorded.
        meters: of calls under a plan. With them the guards of the schedules are checked before each call; without them
            guards only remember the weights they were called with.

    Attributes:
        captured: how many graphs were captured for training so far (0 after a call: nothing was captured).
    """

    def __init__(
        self,
        chooser: Chooser,
        name: str,
        *,
        observer: CallObserver | None = None,
        meters: PlannedCallMeters | None = None,
    ) -> None:
        self.chooser = chooser
        self.name = name
        self.observer = observer
        self.meters = meters
        self.captured = 0
        self._guards: list[Guards] = []  # of the schedules that run under a plan, for each graph that has any
        self._aot = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            inference_compiler=lambda module, inputs: execute.boxed(module),
            partition_fn=self._partition,
            decompositions=DECOMPOSITIONS,
            keep_inference_input_mutations=True,
        )

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs."""
        with operators_kept_whole(), torch._functorch.config.patch(donated_buffer=False):
            return self._aot(module, inputs)  # type: ignore[no-any-return]

    def failed_guards(self) -> FailedGuards | None:
        """The guards of one graph that do not hold any more (see ``Guards.failed_lately``), or None."""
        return next((failed for guards in self._guards if (failed := guards.failed_lately())), None)

    def _partition(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        started = time.perf_counter()
        with unset_fake_temporarily():  # also in a trial run on fake tensors, real kernels are queried for their needs
            joint = capture(module, num_fwd_outputs, self.name, static_lifetime_input_indices or ())
            number, schedule = self.chooser.choose(joint)
            costs = None if self.meters is None else self.meters.timing.costs_of(joint)
        modules = execute.build(joint, schedule, costs)
        _log.debug("%s: %d operators in %.2f s", self.name, len(joint.nodes), time.perf_counter() - started)
        self.captured += 1
        guards = joint.guards if self.meters is None else joint.guards.of(schedule)
        if guards.used and self.meters is not None:
            self._guards.append(guards)
        for part in modules:  # the backward may be compiled much later, after other graphs
            part.meta["monetrun"] = (number, guards)
        return modules

    def _forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        number, guards = module.meta["monetrun"]
        run = execute.boxed(module)
        if self.meters is None:
            return self._observed(FORWARD, number, guards.watching(run))
        timed = self._timed(run, module)
        return guards.checking(_measured(self.meters.steps, FORWARD, number, timed))  # type: ignore[no-any-return]

    def _backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        number, _ = module.meta["monetrun"]
        if self.meters is None:
            return self._observed(BACKWARD, number, execute.boxed(module))
        return _measured(self.meters.steps, BACKWARD, number, self._timed(execute.boxed(module), module))

    def _timed(self, run: Run, module: fx.GraphModule) -> Run:
        """``run``, which runs ``module``, timed in its early calls."""
        assert self.meters is not None
        timed = execute.timed(module, self.meters.timing.extra)
        return self.meters.timing.early_calls(run, None if timed is None else execute.boxed(timed))

    def _observed(self, phase: str, number: int, run: Run) -> Run:
        observer = self.observer
        if observer is None:
            return run

        def observed(arguments: list[Any]) -> Any:
            observer.call_begins(phase, number, arguments)
            results = run(arguments)
            observer.call_ended(phase, number, results)
            return results

        observed._boxed_call = True  # type: ignore[attr-defined]
        return observed


def _measured(steps: StepMeter, phase: str, number: int, run: Run) -> Run:
    def measured(arguments: list[Any]) -> Any:
        steps.call_begins()
        results = run(arguments)
        steps.call_ended(phase, number)
        return results

    measured._boxed_call = True  # type: ignore[attr-defined]
    return measured
