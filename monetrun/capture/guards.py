"""Conditions on the weights under which an implementation may stand for its operator, and whether they hold now.

A graph is captured without its weights, which change as they train. So a guard is asked of the parameters that the
graph was last called with: when a recorded step is planned, before each call of a model whose schedules need it, and in
a call that brings other parameters, before anything of the graph has run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map_only

from monetrun.core.errors import GuardFailed
from monetrun.core.graph import Graph
from monetrun.core.plan import Schedule
from monetrun.ops.registry import Call

Run = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _Input:
    """Stands in a guard's call for the graph's input at ``place``."""

    place: int


@dataclass(frozen=True)
class Guard:
    """The guard of one implementation.

    Attributes:
        operator: whose.
        implementation: its index.
        name: of both, for messages.
        target: what to call.
        arguments: positional arguments and keywords; ``_Input`` where the graph's inputs go.
    """

    operator: int
    implementation: int
    name: str
    target: Any
    arguments: Any

    @classmethod
    def of(cls, call: Call, places: Mapping[fx.Node, int], operator: int, implementation: int, name: str) -> Guard:
        """From a call on placeholders, of which ``places`` tells the order."""
        inputs: Callable[[fx.Node], Any] = lambda n: _Input(places[n])  # noqa: E731
        arguments: Any = fx.map_arg((call.args, call.kwargs), inputs)
        return cls(operator, implementation, name, call.target, arguments)

    @property
    def places(self) -> set[int]:
        """Of the inputs that it reads."""
        found: set[int] = set()
        tree_map_only(_Input, lambda i: found.add(i.place), self.arguments)
        return found

    def asked(self, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """One bool: whether it holds for these inputs."""
        args, kwargs = tree_map_only(_Input, lambda i: inputs[i.place], self.arguments)
        return self.target(*args, **kwargs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Failed:
    """Guards that do not hold, and the graph that they are of."""

    graph: Graph
    guards: tuple[Guard, ...]

    @property
    def implementations(self) -> set[tuple[int, int]]:
        """What they forbid: operators and indices of their implementations."""
        return {(guard.operator, guard.implementation) for guard in self.guards}


class Guards:
    """Guards of one graph, and the inputs with which it was called last.

    Args:
        graph: whose.
        guards: all of them; where one fails, all are asked.
        used: those that matter now, by default all.
    """

    def __init__(self, graph: Graph, guards: Sequence[Guard], used: Sequence[Guard] | None = None) -> None:
        self.graph = graph
        self.guards = tuple(guards)
        self.used = self.guards if used is None else tuple(used)
        self._places = sorted({p for guard in self.guards for p in guard.places})
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._answer: tuple[torch.Tensor, Any] | None = None  # on its way from a CUDA device, and the event of its end

    def of(self, schedule: Schedule) -> Guards:
        """The same guards, of which those matter whose implementations ``schedule`` uses."""
        steps = {(step.operator, step.implementation) for step in (*schedule.forward, *schedule.backward)}
        return Guards(self.graph, self.guards, [g for g in self.guards if (g.operator, g.implementation) in steps])

    def watching(self, run: Run) -> Run:
        """``run``, whose inputs are remembered."""
        return self._before(run, self._saw) if self.used else run

    def checking(self, run: Run) -> Run:
        """``run``, which raises ``GuardFailed`` if it is called with weights that were not asked before, and fail."""

        def check(arguments: Sequence[Any]) -> None:
            if not self._saw(arguments) and (failed := self.failed()):
                names = ", ".join(guard.name for guard in failed.guards)
                raise GuardFailed(f"the weights do not allow {names}", "monetrun plans again without", failed=failed)

        return self._before(run, check) if self.used else run

    def failed(self) -> Failed | None:
        """Those that do not hold for the inputs seen last, as they are now; None if all that matter do.

        Without inputs (no call yet, weights that are gone, fake tensors) they are taken to hold: a call will tell.
        """
        inputs = self._inputs()
        if inputs is None:
            return None
        return None if all(_answers(self.used, inputs)) else self._all_failed(inputs)

    def failed_lately(self) -> Failed | None:
        """As ``failed``; on a CUDA device as of the last time this was asked, so that nothing waits for the device."""
        inputs = self._inputs()
        if inputs is None or not all(tensor.is_cuda for tensor in inputs.values()):
            return self.failed()
        before, self._answer = self._answer, None
        answers = torch.stack(_answers(self.used, inputs))
        arriving = torch.empty(answers.shape, dtype=torch.bool, pin_memory=True)
        arriving.copy_(answers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._answer = arriving, event
        if before is None:
            return None
        before[1].synchronize()  # a step ago
        return None if before[0].all() else self._all_failed(inputs)

    def _all_failed(self, inputs: Mapping[int, torch.Tensor]) -> Failed | None:
        failed = tuple(g for g, holds in zip(self.guards, _answers(self.guards, inputs), strict=True) if not holds)
        return Failed(self.graph, failed) if failed else None

    def _inputs(self) -> dict[int, torch.Tensor] | None:
        found = {place: tensor for place, ref in self._seen.items() if (tensor := ref()) is not None}
        if not found or len(found) < len(self._places) or any(isinstance(t, FakeTensor) for t in found.values()):
            return None
        return found

    def _saw(self, arguments: Sequence[Any]) -> bool:
        """Remember the inputs; whether they are those of the last call."""
        same = bool(self._seen) and all(self._seen[p]() is arguments[p] for p in self._places)
        if not same:
            self._seen = {p: weakref.ref(arguments[p]) for p in self._places}
            self._answer = None
        return same

    def _before(self, run: Run, first: Callable[[Sequence[Any]], object]) -> Run:
        def call(arguments: list[Any]) -> Any:
            first(arguments)
            return run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _answers(guards: Sequence[Guard], inputs: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [guard.asked(inputs) for guard in guards]
