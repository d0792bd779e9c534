"""The first training step, run on the most frugal schedules and watched: gives the ``StepRecord`` to plan from."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monetrun.capture import cost, roofline
from monetrun.capture.cost import OperatorCost
from monetrun.capture.joint import JointGraph
from monetrun.capture.lifetimes import Lifetimes
from monetrun.capture.meter import Meter
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, without
from monetrun.core.plan import Schedule
from monetrun.core.step import OUTSIDE, Event, StepRecord, call_footprint
from monetrun.machine.store import Store, key
from monetrun.solve import greedy

# Gradients that zero_grad(set_to_none=False) keeps: the new ones are added to them after the last backward.
_NEVER = -2

_log = logging.getLogger("monetrun")


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What the meter saw: a call of a graph, an optimizer's step, or what the script did between."""

    kind: str
    graph: int
    name: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int


class Recorder:
    """Gives every captured graph its most frugal schedule, and notes what the step allocates around the calls.

    Args:
        meter: of the device that the model is on.
        device: that device.
        known: costs measured before, by signature.
        model: of the device to plan for, where it is not this one and nothing can be measured.
    """

    def __init__(
        self,
        meter: Meter,
        device: torch.device,
        known: Mapping[str, OperatorCost],
        model: roofline.Device | None = None,
    ) -> None:
        self.meter = meter
        self.device = device
        self.model = model
        self.known = dict(known)
        self.joints: list[JointGraph] = []
        self.schedules: list[Schedule] = []
        self.stretches: list[_Stretch] = []
        self.lifetimes = Lifetimes()
        self.state_bytes = 0
        self.parameters: list[torch.Tensor] = []
        self.gradient_bytes = 0
        self.drops: list[tuple[int, list[torch.Tensor]]] = []  # at which stretch whose gradients were dropped
        self._dropped: set[int] = set()
        self._gradients: dict[int, int] = {}
        self._number: dict[str, int] = {}
        self._start = 0
        self._running = False

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's number, and the schedule of the least peak that is known for it."""
        number = self._number.get(joint.graph.fingerprint)
        if number is None:
            number = self._number[joint.graph.fingerprint] = len(self.joints)
            self.joints.append(joint)
            # the weights have not been seen yet: nothing that they may forbid; nor what rounds, or has not been tried
            unknown = {(g.operator, g.implementation) for g in joint.guards.guards}
            for op in joint.graph.operators:
                unknown.update((op.id, k) for k, impl in enumerate(op.implementations) if not impl.exact)
            self.schedules.append(greedy.most_frugal(without(joint.graph, unknown), estimated(joint)))
        return number, self.schedules[number]

    # ---- what happens in the step

    def entering(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        """A graph's call begins; what lies between it and the last one is the script's."""
        if not self.stretches and not self._running:
            self.meter.reset_peak()
            self._start = self.meter.current_bytes()
        self._close(OUTSIDE)
        self._running = True
        if phase == FORWARD:
            self.lifetimes.forward_begins(self.joints[graph], arguments)
        else:
            self.lifetimes.backward_begins(self.joints[graph], len(self.stretches), arguments)

    def left(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        """A graph's call has ended."""
        if phase == FORWARD:
            self.lifetimes.forward_ended(results)
        self._close(phase, graph)
        self._running = False

    def optimizer_begins(self) -> None:
        """An optimizer's step begins."""
        if self.stretches:
            self._close(OUTSIDE)

    def optimizer_ended(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        """It has ended; what stays allocated is the optimizer's state. ``parameters``: all that are trained."""
        self.parameters = list(parameters)
        self.gradient_bytes = _bytes_of(p.grad for p in self.parameters)
        self._gradients = {id(p): _bytes_of([p.grad]) for p in self.parameters}
        if self.stretches:
            self._close(OUTSIDE, name=f"{name}.step")
            stretch = self.stretches[-1]
            self.state_bytes += max(0, stretch.end_bytes - stretch.start_bytes)

    def gradients_dropped(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script called ``zero_grad``: from the second step on, the last step's gradients lie there until now.

        Those that this step has computed already are not the last step's: the script drops them at its end.
        """
        waiting = [p for p in parameters if p.grad is None and id(p) not in self._dropped]
        self._dropped.update(id(p) for p in waiting)
        self.drops.append((len(self.stretches) if set_to_none else _NEVER, waiting))

    def _close(self, kind: str, graph: int = -1, name: str = "") -> None:
        self.meter.synchronize()
        now = self.meter.current_bytes()
        peak = max(now, self._start, self.meter.peak_bytes())
        self.stretches.append(_Stretch(kind, graph, name, self._start, peak, now))
        self.lifetimes.look(len(self.stretches) - 1)
        self._start = now
        self.meter.reset_peak()

    @property
    def complete(self) -> bool:
        """Whether a backward was seen."""
        return any(s.kind == BACKWARD for s in self.stretches)

    # ---- the record

    def measure(self, store: Store | None) -> list[Costs]:
        """Measure what is not known of the operators' costs, and share it through the store; or compute it."""
        if self.model is not None:
            return [cost.modelled(joint, self.model) for joint in self.joints]
        where = cost_key(self.device)
        known = dict(self.known)
        for joint in self.joints:
            known.update(cost.measure(joint, known, self.meter, self.device))
        if store is not None:
            known = {**known, **store.update("costs", where, known, OperatorCost)}
        self.known = known
        return [cost.costs_of(joint, known, device_name(self.device)) for joint in self.joints]

    def record(self, costs: list[Costs]) -> StepRecord:
        """The step in its steady state: optimizer state, last step's outputs and gradients lie under it."""
        events: list[Event] = []
        first = self.stretches[0].end_bytes if self.stretches else 0
        now = first
        freed = self._waiting_gradients()
        last_backward = max((i for i, s in enumerate(self.stretches) if s.kind == BACKWARD), default=0)
        for i, stretch in enumerate(self.stretches):
            if i - 1 in freed or (i - 1 == last_backward and _NEVER in freed):
                where = i - 1 if i - 1 in freed else _NEVER
                events.append(Event(OUTSIDE, -1, -freed[where], 0, "last step's gradients"))
            if i == 0:
                continue
            if stretch.kind == OUTSIDE:
                absent = self.lifetimes.absent_bytes(i)
                delta, peak = stretch.end_bytes + absent - now, max(0, stretch.peak_bytes + absent - now)
                grown = max(0, stretch.end_bytes - stretch.start_bytes) if stretch.name else 0
                events.append(Event(OUTSIDE, -1, delta - grown, max(0, peak - grown), stretch.name))
                now = stretch.end_bytes + absent
                continue
            joint, schedule = self.joints[stretch.graph], self.schedules[stretch.graph]
            released = self.lifetimes.released(i)
            events.append(Event(stretch.kind, stretch.graph, released=released))
            known = call_footprint(joint.graph, costs[stretch.graph], schedule, released)
            now += known.saved_bytes if stretch.kind == FORWARD else known.backward_delta_bytes
            _log.debug("%s %d: simulated %d, measured %d", stretch.kind, stretch.graph, now, stretch.end_bytes)
        end = self.stretches[-1].end_bytes if self.stretches else 0
        left = max(0, end - first - self.state_bytes - self.gradient_bytes)
        if left:  # last step's outputs are held until this step's forward has given new ones
            events.insert(0, Event(OUTSIDE, -1, left, left, "last step's outputs"))
            back = next((i for i, e in enumerate(events) if e.kind == BACKWARD), len(events))
            events.insert(back, Event(OUTSIDE, -1, -left, 0, "last step's outputs"))
        if waiting := sum(freed.values()):
            events.insert(0, Event(OUTSIDE, -1, waiting, waiting, "last step's gradients"))
        weights = _bytes_of(self.parameters)
        return StepRecord(
            graphs=tuple(allowed(j, cost.as_tried(j, self.known)) for j in self.joints),
            costs=tuple(costs),
            events=tuple(events),
            base_bytes=first + self.state_bytes,
            ledger={
                "parameters": weights,
                "gradients": self.gradient_bytes,
                "optimizer state": self.state_bytes,
                "script (batch, buffers, ...)": max(0, first - weights),
            },
            device=costs[0].device if costs else device_name(self.device),
            torch_version=torch.__version__,
            exact=self.meter.exact,
        )

    def _waiting_gradients(self) -> dict[int, int]:
        """Bytes of the last step's gradients, by the stretch at whose end they are gone."""
        found: dict[int, int] = {}
        for position, parameters in self.drops:
            nbytes = sum(self._gradients.get(id(p), 0) for p in parameters)
            if nbytes and position:
                found[position] = found.get(position, 0) + nbytes
        return found


def allowed(joint: JointGraph, graph: Graph) -> Graph:
    """``graph``, in which what its weights forbid as they are now is not usable."""
    failed = joint.guards.failed()
    return graph if failed is None else without(graph, failed.implementations)


def estimated(joint: JointGraph) -> Costs:
    """Costs from bytes and flops alone, for when nothing has been measured."""
    known = {signature: cost.estimate(*timed) for signature, timed in joint.timed.items()}
    return cost.costs_of(joint, known, "estimate")


def device_name(device: torch.device) -> str:
    """``"cpu"``, or the GPU's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cost_key(device: torch.device) -> str:
    """The store's key for costs measured here: device, torch, and how many threads compute."""
    parts: list[Any] = [device_name(device), torch.__version__, torch.get_num_threads()]
    if device.type == "cuda":
        parts.append(torch.backends.cudnn.version())
    return key(*parts)


def _bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None and tensor.layout == torch.strided:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
