"""The ``torch.compile`` backend: every captured graph asks which schedule to run, and is built to run it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import unset_fake_temporarily

from monetrun.capture import execute
from monetrun.capture.guards import FailedGuards, Guards
from monetrun.capture.joint import JointGraph, capture
from monetrun.capture.meter import Meter
from monetrun.capture.tracing import operators_kept_whole
from monetrun.core.plan import Schedule
from monetrun.ops.random import DECOMPOSITIONS

# The calls of each graph that are timed, to report what recomputation really costs: early ones, but not the first.
_TIMED_CALLS = range(2, 5)

_log = logging.getLogger("monetrun")


class Chooser(Protocol):
    """Who decides what a captured graph runs, and sees its calls."""

    meter: Meter

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's number, and its schedule.

        Raises:
            MonetrunError: no schedule fits.
        """

    def entering(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        """A graph's forward or backward is about to run on these arguments (see ``execute.build``)."""

    def left(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        """It has run, and gives these results."""


class Backend:
    """A ``torch.compile`` backend for one model.

    Attributes:
        name: of the model.
        captured: how many graphs were captured for training so far (0 after a call: nothing was captured).
        guards: of the schedules that run, for each graph that has any; none while observed.
    """

    def __init__(self, chooser: Chooser, name: str, *, observed: bool) -> None:
        self.chooser = chooser
        self.name = name
        self.observed = observed
        self.captured = 0
        self.guards: list[Guards] = []
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

    def failed(self) -> FailedGuards | None:
        """A graph whose weights do not allow its schedule any more (see ``Guards.failed_lately``)."""
        return next((failed for guards in self.guards if (failed := guards.failed_lately())), None)

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
        with unset_fake_temporarily():  # in a trial run without memory too, kernels are asked about themselves for real
            joint = capture(module, num_fwd_outputs, self.name, static_lifetime_input_indices or ())
            number, schedule = self.chooser.choose(joint)
        modules = execute.build(joint, schedule)
        _log.debug("%s: %d operators in %.2f s", self.name, len(joint.nodes), time.perf_counter() - started)
        self.captured += 1
        calls = Calls(self.chooser.meter)
        guards = joint.guards if self.observed else joint.guards.of(schedule)
        if guards.used and not self.observed:
            self.guards.append(guards)
        for part in modules:  # the backward may be compiled much later, after other graphs
            part.meta["monetrun"] = (number, calls, guards)
        return modules

    def _forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        number, calls, guards = module.meta["monetrun"]
        if self.observed:
            return self._watched("forward", number, guards.watching(execute.boxed(module)))
        return guards.checking(calls.forward(execute.boxed(module)))  # type: ignore[no-any-return]

    def _backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        number, calls, _ = module.meta["monetrun"]
        if self.observed:
            return self._watched("backward", number, execute.boxed(module))
        timed = execute.boxed(execute.timed(module))
        return calls.backward(execute.boxed(module), timed)

    def _watched(self, phase: str, number: int, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        chooser = self.chooser

        def watched(arguments: list[Any]) -> Any:
            chooser.entering(phase, number, arguments)
            results = run(arguments)
            chooser.left(phase, number, results)
            return results

        watched._boxed_call = True  # type: ignore[attr-defined]
        return watched


class Calls:
    """Times a few early calls of one graph; after them it stands aside.

    ``totals`` are added up over all graphs of the process: seconds in timed calls, and of these in recomputation.
    """

    totals: ClassVar[dict[str, float]] = {"seconds": 0.0, "again_seconds": 0.0}

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.forwards = 0
        self.backwards = 0

    def forward(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """``run``, timed in a few early calls."""

        def call(arguments: list[Any]) -> Any:
            if self.forwards >= _TIMED_CALLS.stop:
                return run(arguments)
            self.forwards += 1
            if self.forwards - 1 not in _TIMED_CALLS:
                return run(arguments)
            return self._time(run, arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backward(
        self, run: Callable[[list[Any]], Any], timed: Callable[[list[Any]], Any]
    ) -> Callable[[list[Any]], Any]:
        """``run``; in a few early calls ``timed``, which reports to ``execute.stopwatch``."""

        def call(arguments: list[Any]) -> Any:
            if self.backwards >= _TIMED_CALLS.stop:
                return run(arguments)
            self.backwards += 1
            if self.backwards - 1 not in _TIMED_CALLS:
                return run(arguments)
            watch = execute.stopwatch
            watch.synchronize = self.meter.synchronize
            before = watch.seconds
            result = self._time(timed, arguments)
            self.totals["again_seconds"] += watch.seconds - before
            return result

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _time(self, run: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        self.meter.synchronize()
        started = time.perf_counter()
        result = run(arguments)
        self.meter.synchronize()
        self.totals["seconds"] += time.perf_counter() - started
        return result


def measured_overhead() -> float | None:
    """Seconds spent in recomputation over the other seconds of the timed calls; None before any."""
    seconds, again = Calls.totals["seconds"], Calls.totals["again_seconds"]
    return again / (seconds - again) if seconds > again else None
