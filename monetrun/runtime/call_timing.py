"""How long a plan's extra work takes: a few early calls of each graph are timed, later ones are not."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch import fx

from monetrun.capture import cost
from monetrun.capture.clock import clock_of
from monetrun.capture.cost import OperatorCost
from monetrun.capture.execute import Stopwatch, timed, timed_by_step
from monetrun.capture.in_turn import Turns
from monetrun.capture.joint import JointGraph
from monetrun.capture.meter import Meter
from monetrun.core.graph import Costs
from monetrun.core.plan import Step
from monetrun.planning.check import OperatorSeconds

Run = Callable[[list[Any]], Any]

# The calls of each graph that are timed; the first ones compile and warm up.
_TIMED_CALLS = range(2, 5)

_log = logging.getLogger("monetrun")


class CallTiming:
    """The timed calls of all graphs of a process.

    Args:
        meter: of their device.
        known: measured costs, by the operators' signatures; more may be added.

    Attributes:
        calls: runs in timed calls.
    """

    def __init__(self, meter: Meter, known: Mapping[str, OperatorCost] | None = None) -> None:
        self._known = {} if known is None else known
        self._clock = clock_of(meter)
        self.calls = Stopwatch(self._clock)
        self._extra: dict[float, Stopwatch] = {}  # by the share of its time that is extra

    def costs_of(self, joint: JointGraph) -> Costs | None:
        """The measured costs of a graph, the few that cannot be measured as they are estimated; None: none is known."""
        signatures = {signature for row in joint.signatures for signature in row}
        if self._known.keys().isdisjoint(signatures):
            return None
        known = {s: self._known.get(s) or cost.estimate(*joint.timed[s]) for s in signatures}
        return cost.costs_of(joint, known, "measured")

    def extra(self, share: float) -> Stopwatch:
        """Runs in timed calls while they do what the plain step does not do, or ``share`` of it is."""
        return self._extra.setdefault(share, Stopwatch(self._clock))

    def instrumented(self, module: fx.GraphModule, phase: str, graph: int) -> fx.GraphModule | None:
        """What runs in timed calls in the place of a module of ``execute.build``; None: the module itself.

        Args:
            module: the forward or the backward.
            phase: which of the two.
            graph: its graph's number in the record, -1 if it has none.
        """
        return timed(module, self.extra)

    def overhead(self) -> float | None:
        """Seconds that the plain step would not take, over the other seconds of the timed calls.

        Extra are operators that run again, and of other implementations what they take longer than the default: of
        their measured seconds, the share that their costs (measured alone) say. Implementations that are faster, and
        what a schedule leaves out of the plain step, are not counted. None before any timed call, and where the device
        failed before it came to their end.
        """
        try:
            calls = self.calls.seconds
            extra = sum(share * stopwatch.seconds for share, stopwatch in self._extra.items())
        except RuntimeError as error:
            _log.info("the overhead is not known: %s", error)
            return None
        return extra / (calls - extra) if calls > max(0.0, extra) else None

    def call_seconds(self) -> float | None:
        """Seconds of a timed call, the mean; None before any, and where the device failed before it came to their end.

        Ranks that run the same script time the same calls.
        """
        try:
            return self.calls.seconds / self.calls.stops if self.calls.stops else None
        except RuntimeError as error:
            _log.info("the seconds of calls are not known: %s", error)
            return None

    def early_calls(self, run: Run, timed: Run | None = None) -> Run:
        """``run``, timed in a few early calls, in which ``timed`` runs in its place if given."""
        numbers = itertools.count()

        def call(arguments: list[Any]) -> Any:
            if next(numbers) not in _TIMED_CALLS:
                return run(arguments)
            self.calls.start()
            result = (timed or run)(arguments)
            self.calls.stop()
            return result

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def early_calls_by_turns(self, run: Turns, timed: Turns | None = None) -> Turns:
        """``early_calls`` of a backward that gives its gradients by turns; what takes these is timed with it."""
        numbers = itertools.count()

        def call(arguments: list[Any]) -> Generator[list[Any], None, Any]:
            if next(numbers) not in _TIMED_CALLS:
                return (yield from run(arguments))
            self.calls.start()
            result = yield from (timed or run)(arguments)
            self.calls.stop()
            return result

        return call


class OperatorTiming(CallTiming):
    """Times every operator in the timed calls of the record's graphs, in place of what is extra."""

    def __init__(self, meter: Meter, known: Mapping[str, OperatorCost] | None = None) -> None:
        super().__init__(meter, known)
        self._steps: dict[tuple[int, str, Step], Stopwatch] = {}
        self._calls_of: Counter[tuple[int, str]] = Counter()

    def instrumented(self, module: fx.GraphModule, phase: str, graph: int) -> fx.GraphModule | None:
        """See ``CallTiming.instrumented``."""
        if graph < 0:
            return None

        def stopwatch_of(step: Step) -> Stopwatch:
            return self._steps.setdefault((graph, phase, step), Stopwatch(self._clock))

        def begins() -> None:
            self._calls_of[graph, phase] += 1

        return timed_by_step(module, stopwatch_of, begins)

    def operators(self) -> tuple[OperatorSeconds, ...]:
        """Measured seconds of the operators in a call of their graph, the medians; empty before any timed call."""
        found = []
        for (graph, phase, step), stopwatch in self._steps.items():
            spans, calls = stopwatch.spans(), self._calls_of[graph, phase]
            if calls:
                runs = len(spans) // calls
                seconds = statistics.median(sum(spans[k * runs : (k + 1) * runs]) for k in range(calls))
                found.append(OperatorSeconds(graph, phase, step.operator, step.implementation, seconds))
        return tuple(found)
