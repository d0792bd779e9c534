"""Conditions on the weights under which an implementation may replace its operator, and whether they hold now.

A graph is captured without its weights, which change during training. So a guard is evaluated on the parameters of the
graph's last call: when a recorded step is planned, and before each call of a model whose schedules need the guard. Of a
graph that several modules share each call looks after its own, before any of the graph's operators run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map_only

from monetrun.capture.gradient_order import owner
from monetrun.capture.storages import version_of
from monetrun.core.errors import GuardFailed
from monetrun.core.graph import Graph
from monetrun.core.plan import Schedule
from monetrun.ops.registry import Call

Run = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _Input:
    """In a guard's call, stands for the graph's input at ``position``."""

    position: int


@dataclass(frozen=True)
class Guard:
    """The guard of one implementation.

    Attributes:
        operator: id of the implementation's operator.
        implementation: its index among the operator's.
        name: names both, for messages.
        target: an operator overload that gives one bool.
        arguments: its positional arguments and keywords, with an ``_Input`` for each input of the graph.
    """

    operator: int
    implementation: int
    name: str
    target: Any
    arguments: Any

    @classmethod
    def of(cls, call: Call, positions: Mapping[fx.Node, int], operator: int, implementation: int, name: str) -> Guard:
        """From a call on placeholders; ``positions`` are theirs among the graph's inputs."""
        inputs: Callable[[fx.Node], Any] = lambda n: _Input(positions[n])  # noqa: E731
        arguments: Any = fx.map_arg((call.args, call.kwargs), inputs)
        return cls(operator, implementation, name, call.target, arguments)

    @property
    def positions(self) -> set[int]:
        """Positions of the graph's inputs that it reads."""
        found: set[int] = set()
        tree_map_only(_Input, lambda i: found.add(i.position), self.arguments)
        return found

    def evaluate(self, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """A tensor of one bool: whether the guard holds for these inputs, given by position."""
        args, kwargs = self.arguments
        if kwargs or any(isinstance(a, (list, tuple)) for a in args):
            args, kwargs = tree_map_only(_Input, lambda i: inputs[i.position], self.arguments)
        else:  # each call of a model evaluates its guards
            args = [inputs[a.position] if isinstance(a, _Input) else a for a in args]
        return self.target(*args, **kwargs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FailedGuards:
    """Guards of one graph that do not hold."""

    graph: Graph
    guards: tuple[Guard, ...]

    @property
    def implementations(self) -> set[tuple[int, int]]:
        """The implementations that must not be used: (operator, index)."""
        return {(guard.operator, guard.implementation) for guard in self.guards}


@dataclass
class _Weights:
    """The inputs that the guards read in a call, and what is known of them.

    Attributes:
        refs: by position.
        pending: results that are being copied from a CUDA device, and their event.
        stepped: versions of the inputs after the last optimizer step.
        condition: see ``Guards.condition``.
    """

    refs: dict[int, weakref.ref[torch.Tensor]]
    pending: tuple[torch.Tensor, Any] | None = None
    stepped: tuple[int, ...] = ()
    condition: str = ""

    def alive(self) -> dict[int, torch.Tensor]:
        """Those that are there, by position."""
        return {position: tensor for position, ref in self.refs.items() if (tensor := ref()) is not None}

    def are_there(self) -> bool:
        """Whether all of them are."""
        return len(self.alive()) == len(self.refs)

    def readable(self) -> dict[int, torch.Tensor] | None:
        """All of them; None where one is not there, or has no data."""
        found = self.alive()
        return None if len(found) < len(self.refs) or any(map(_without_data, found.values())) else found


class Guards:
    """Guards of one graph, and the inputs of its calls: those of blocks that are alike have other weights each.

    Args:
        graph: the graph.
        guards: all of its guards; where one of ``used`` fails, all are evaluated.
        used: the guards that the current schedule needs, by default all.
    """

    def __init__(self, graph: Graph, guards: Sequence[Guard], used: Sequence[Guard] | None = None) -> None:
        self.graph = graph
        self.guards = tuple(guards)
        self.used = self.guards if used is None else tuple(used)
        self._positions = sorted({p for guard in self.guards for p in guard.positions})
        self._known: dict[tuple[int, ...], _Weights] = {}  # by the ids of the inputs
        self._last = _Weights({})  # of the last call

    def of(self, schedule: Schedule) -> Guards:
        """The same guards, of which those are ``used`` whose implementations ``schedule`` uses."""
        steps = {(step.operator, step.implementation) for step in (*schedule.forward, *schedule.backward)}
        return Guards(self.graph, self.guards, [g for g in self.guards if (g.operator, g.implementation) in steps])

    def watching(self, run: Run) -> Run:
        """``run``, which remembers its inputs."""
        return self._before(run, self._remember) if self.used else run

    def checking(self, run: Run) -> Run:
        """``run``, which raises ``GuardFailed`` when a call has weights that no call had before and a guard fails.

        Of several calls with weights of their own each looks after those, as ``failed_lately`` does.
        """

        def check(arguments: Sequence[Any]) -> None:
            known = self._remember(arguments)
            if known and not self.shared:
                return  # looked after before the model's call
            if failed := self.failed_lately() if known else self.failed():
                names = ", ".join(guard.name for guard in failed.guards)
                raise GuardFailed(f"guard failed: {names}", "monetrun plans again without", failed=failed)

        return self._before(run, check) if self.used else run

    @property
    def shared(self) -> bool:
        """Whether calls of the graph have had different weights."""
        return len(self._known) > 1

    def failed(self) -> FailedGuards | None:
        """The guards that do not hold for the last call's inputs as they are now; None if all used ones hold.

        Without inputs (no call yet, freed or sharded weights, fake tensors) guards count as holding: the next call
        checks them.
        """
        inputs = self._last.readable()
        if not inputs:
            return None
        return None if all(_evaluate(self.used, inputs)) else self._all_failed(inputs)

    @property
    def condition(self) -> str:
        """The same for guards of other graphs that are of the same tensors; empty: there is nothing to evaluate."""
        if not (inputs := self._last.readable()):
            return ""
        if not self._last.condition:
            ids = {position: id(tensor) for position, tensor in inputs.items()}
            read = tree_map_only(_Input, lambda i: ids[i.position], [guard.arguments for guard in self.used])
            self._last.condition = repr([(str(g.target), of) for g, of in zip(self.used, read, strict=True)])
        return self._last.condition

    def failed_lately(self) -> FailedGuards | None:
        """As ``failed``; on a CUDA device, the result of the previous call of this method, to avoid a device sync.

        It waits for the device only where something other than an optimizer has written to the weights since.
        """
        weights, inputs = self._last, self._last.readable()
        if not inputs or not all(map(_on_cuda, inputs.values())):
            return self.failed()
        before, weights.pending = weights.pending, _copied(torch.stack(_evaluate(self.used, inputs)))
        _pending.add(self)
        trained_only = before is not None and weights.stepped == _versions(inputs)
        on_host, event = before if before is not None and trained_only else weights.pending
        event.synchronize()  # of one recorded a step ago: no wait
        return None if on_host.all() else self._all_failed(inputs)

    def stepped(self) -> None:
        """An optimizer's step has ended."""
        for weights in self._known.values():
            if weights.pending is not None:
                weights.stepped = _versions(weights.alive())

    def _all_failed(self, inputs: Mapping[int, torch.Tensor]) -> FailedGuards | None:
        failed = tuple(g for g, holds in zip(self.guards, _evaluate(self.guards, inputs), strict=True) if not holds)
        return FailedGuards(self.graph, failed) if failed else None

    def _remember(self, arguments: Sequence[Any]) -> bool:
        """Remember the inputs; gives whether those of an earlier call were the same."""
        owners = {p: owner(arguments[p]) for p in self._positions}
        key = tuple(map(id, owners.values()))
        weights = self._known.get(key)
        if weights is not None and weights.are_there():
            self._last = weights
            return True
        self._last = _Weights({p: weakref.ref(owner) for p, owner in owners.items()})
        self._known = {**{k: w for k, w in self._known.items() if w.are_there()}, key: self._last}
        return False

    def _before(self, run: Run, first: Callable[[Sequence[Any]], object]) -> Run:
        def call(arguments: list[Any]) -> Any:
            first(arguments)
            return run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


# those of which a result is awaited, or was
_pending: weakref.WeakSet[Guards] = weakref.WeakSet()


def optimizer_ended() -> None:
    """An optimizer's step has ended."""
    for guards in _pending:
        guards.stepped()


def first_failed(several: Iterable[Guards]) -> FailedGuards | None:
    """What ``failed_lately`` gives for the first of them that do not hold; each condition is evaluated once.

    Not of those whose calls have weights of their own: the calls look after them.
    """
    seen: set[str] = set()
    for guards in several:
        if guards.shared or (guards._last.condition and guards._last.condition in seen):
            continue  # its calls look after them, or the same weights, with inputs of another size
        condition = guards.condition
        if condition and condition not in seen and (failed := guards.failed_lately()):
            return failed
        seen.add(condition)
    return None


def _on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _copied(on_device: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on the host, and the event after which it is there."""
    on_host = torch.empty(on_device.shape, dtype=torch.bool, device="cpu", pin_memory=True)
    on_host.copy_(on_device, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(on_device.device))
    return on_host, event


def _versions(inputs: Mapping[int, torch.Tensor]) -> tuple[int, ...]:
    return tuple(map(version_of, inputs.values()))


def _without_data(tensor: torch.Tensor) -> bool:
    """Whether there is nothing to read: a fake tensor, or a weight that FSDP2 has not gathered now."""
    return isinstance(tensor, FakeTensor) or bool(tensor.numel() and not tensor.untyped_storage().nbytes())


def _evaluate(guards: Sequence[Guard], inputs: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [guard.evaluate(inputs) for guard in guards]
