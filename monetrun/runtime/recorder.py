"""Records the first training step, run on schedules of the least peak, as the ``StepRecord`` to plan from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from monetrun.capture import cost, cost_store, roofline
from monetrun.capture.arriving_strides import Arriving
from monetrun.capture.cost import OperatorCost
from monetrun.capture.joint import JointGraph
from monetrun.capture.lifetimes import GivenFirst, Lifetimes
from monetrun.capture.meter import CudaMeter, Meter
from monetrun.core import last_gradients
from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.budget import BYTES, SHARE_OF_PLAIN, Budget
from monetrun.core.call_footprint import call_footprint
from monetrun.core.event import Action
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.keeping import as_scripted
from monetrun.core.last_outputs import with_last_outputs
from monetrun.core.left_out import without, without_reading_again
from monetrun.core.plain_step import plain_timeline
from monetrun.core.plan import Schedule
from monetrun.core.sharding import ShardedModule, Sharding
from monetrun.core.step import BUCKETS, LIBRARIES, OUTSIDE, SCRIPT, Break, DeviceMemory, Event, StepRecord
from monetrun.machine.busy import OthersWork
from monetrun.machine.store import Store
from monetrun.planning.intervals import Stretch
from monetrun.runtime import ddp, holdings, sharding
from monetrun.runtime.beside_operators import BesideOperators
from monetrun.runtime.device_recorder import DeviceRecorder
from monetrun.runtime.gradients_before import GradientsBefore
from monetrun.runtime.optimizer_steps import OptimizerSteps
from monetrun.runtime.resharding import ShardingRecorder, with_lingering_copies
from monetrun.runtime.ruled_out import changeable, usable_now
from monetrun.runtime.stretches import StretchMeter, WithoutCaptures
from monetrun.runtime.zeroed import ZeroedGradients
from monetrun.solve import greedy


class Recorder(WithoutCaptures):
    """Gives every captured graph the schedule of the least peak, and measures what the step allocates between calls.

    Args:
        meter: of the device that the model is on.
        device: that device.
        known: costs measured before, by signature.
        model: of the device to plan for, where it is not this one and nothing can be measured.
        plain_settings: of CUDA's allocator in the plain run; None: the present ones.
        budget: of the step, where it is known.

    Attributes:
        joints: the captured graphs, in the order of their first calls.
        schedules: of each.
        known: costs, by signature; ``measure`` adds to it.
        arriving: the graphs as they are measured.
        memory, sharding: what the device's allocator does (CUDA only), and FSDP2.
        parameters, gradients: what the optimizers train, once known; of each, bytes by the number of the storage.
        zeroed, before: when the script zeroes gradients, and those that were there before.
        given_first: what the step's first call was given.
    """

    def __init__(
        self,
        meter: Meter,
        device: torch.device,
        known: Mapping[str, OperatorCost],
        model: roofline.Device | None = None,
        plain_settings: AllocatorSettings | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.meter, self.device, self.known, self.model, self._budget = meter, device, dict(known), model, budget
        self.joints: list[JointGraph] = []
        self.schedules: list[Schedule] = []
        self._numbers: dict[str, int] = {}  # index of a graph, by its fingerprint
        self._stretch_meter = StretchMeter(meter)
        self._lifetimes = Lifetimes(first_inputs_only=isinstance(meter, CudaMeter))
        self._all_gradients_bytes, self._state_before, self._others_share = 0, 0, 0.0
        self.parameters: list[torch.Tensor] = []
        self.gradients: dict[int, dict[int, int]] = {}  # by the parameter: bytes of storages, by their number
        self.zeroed, self.before = ZeroedGradients(), GradientsBefore()
        self._parallel: Any = None  # the DistributedDataParallel around the model
        self._given: dict[tuple[int, int], None] = {}  # (graph, tensor) of the gradients of weights, in order
        self.memory = DeviceRecorder(device, plain_settings) if isinstance(meter, CudaMeter) else None
        self._beside, self.arriving = BesideOperators(), list[Arriving]()
        self.optimizers = OptimizerSteps(self._stretch_meter, self._end_stretch, self.memory, self._beside)
        self.sharding = ShardingRecorder(self._action_begins, self._action_ended)
        self._actions, self.given_first = dict[int, Action](), GivenFirst()  # the former by the stretch

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's number, and the schedule of the least peak that is known for it."""
        number = self._numbers.setdefault(joint.graph.fingerprint, len(self.joints))
        if number == len(self.joints):
            self.joints.append(joint)
            self.schedules.append(_most_frugal(joint, self._budget, self.meter.current_bytes()))
        return number, self.schedules[number]

    # ---- what happens in the step

    def forward_begins(self, arguments: Iterable[Any]) -> None:
        """A model is called whose hooks allocate before its first graph runs: they are of the step."""
        if not self.stretches:
            _step_begins(self, given := list(arguments))
            if self.memory is not None:
                self.memory.begin_before_graphs(given)
            self._stretch_meter.begin()
            self._end_stretch(OUTSIDE)

    def call_begins(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        """A graph's call begins, and what the script did since the last one has ended."""
        if not self.stretches:
            _step_begins(self, arguments)
            if self.memory is not None:
                self.memory.begin(self.joints, self.joints[graph], arguments)
            self._stretch_meter.begin()
        self._end_stretch(OUTSIDE)
        if phase == FORWARD:
            self._parallel = DistributedDataParallel._get_active_ddp_module() or self._parallel
            self._lifetimes.forward_begins(self.joints[graph], len(self.stretches), arguments)
        else:
            self._lifetimes.backward_begins(self.joints[graph], len(self.stretches), arguments)
            self._beside.gradients_come(graph, self.joints[graph], arguments)

    def call_ended(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        """A graph's call has ended."""
        if phase == FORWARD:
            self._lifetimes.forward_ended(results)
        self.optimizers.call_ended()
        self._end_stretch(phase, graph)

    def gradients_given(self, graph: int, operator: int, nodes: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Its backward, which runs, is about to give ``gradients`` (see ``CallObserver``)."""
        joint = self.joints[graph]
        self._lifetimes.gradients_given(joint, len(self.stretches), nodes, gradients)
        self.optimizers.gradients_given(graph, joint.graph, operator, gradients)
        of_weights = _of_weights(joint)
        for gradient in ((graph, joint.storage[node]) for node in nodes if node in of_weights):
            self._given.pop(gradient, None)  # reduced after the last backward
            self._given[gradient] = None

    def optimizer_begins(self) -> None:
        """An optimizer's step begins."""
        if self.stretches:
            self.optimizers.begins()

    def optimizer_ended(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        """It has ended; what it leaves allocated is the optimizer's state. ``parameters``: all that are trained."""
        self.parameters = list(parameters)
        self.gradients = {id(p): _storages([p.grad]) for p in ddp.outside_buckets(self._parallel, self.parameters)}
        self._all_gradients_bytes = self.gradients_bytes()
        if self.stretches:
            self.optimizers.ended(name)
            self.given_first.look()

    def zeroing_gradients(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script calls ``zero_grad``."""
        if self.stretches:
            self._end_stretch(OUTSIDE)
        self.zeroed.zeroing(parameters, set_to_none, max(len(self.stretches) - 1, 0))

    def gradients_bytes(self) -> int:
        """Bytes of the gradients that are there now, of what the optimizers train, without those in DDP's buckets."""
        return _bytes_of(p.grad for p in ddp.outside_buckets(self._parallel, self.parameters))

    def _action_begins(self) -> bool:
        if found := bool(self.stretches):
            self._end_stretch(OUTSIDE)
        return found

    def _action_ended(self, action: Action) -> None:
        self._actions[len(self.stretches)] = action
        self._end_stretch(OUTSIDE)

    @property
    def complete(self) -> bool:
        """Whether a backward was seen."""
        return any(s.kind == BACKWARD for s in self.stretches)

    @property
    def stretches(self) -> list[Stretch]:
        """Of the step, so far."""
        return self._stretch_meter.stretches

    def _end_stretch(self, kind: str, graph: int = -1, name: str = "") -> None:
        self.meter.synchronize()
        self._stretch_meter.end(kind, graph, name)
        self._lifetimes.look(len(self.stretches) - 1, kind == OUTSIDE)
        self.before.look(len(self.stretches) - 1, kind == OUTSIDE)
        if self.memory is not None:
            self.memory.stretch_ended(kind)

    # ---- the record

    def measure(self, store: Store | None) -> list[Costs]:
        """The costs of all graphs: measured, with what ``store`` has and for it, or those of the modelled device."""
        if self.model is not None:
            return [cost.modelled(joint, self.model) for joint in self.joints]
        if self.memory is not None:
            self.memory.stop()
        self.arriving, name = self._beside.arriving(self.joints, self._lifetimes), cost_store.device_name(self.device)
        others = OthersWork() if self.memory is None else None  # a GPU times its operators itself
        joints = [a.joint for a in self.arriving]
        self.known = cost_store.measure(joints, self.known, self.meter, self.device, store, others)
        self._others_share = cost.others_share(joints, self.known)
        return [a.with_copies(cost.costs_of(a.joint, self.known, name)) for a in self.arriving]

    def record(self, costs: list[Costs], breaks: Iterable[Break] = ()) -> StepRecord:
        """The step in its steady state: with optimizer state, and the last step's outputs and gradients."""
        first, end = (self.stretches[0].end_bytes, self.stretches[-1].end_bytes) if self.stretches else (0, 0)
        first -= self.before.freed_bytes
        gradients, state = self.zeroed.freed(self.stretches, self.gradients), self.optimizers.state_bytes
        events = _events(self, costs := self._beside.costs(costs), gradients)
        held = [(self.joints.index(j), j.graph.tensors[t].nbytes) for j, t in self._lifetimes.held()]
        # less is there at the end than at the start, beside the outputs, where inputs were freed (see ``second_step``)
        more = end - first - state - self._all_gradients_bytes
        events = with_last_outputs(events, max(more, sum(nbytes for _, nbytes in held)), held)
        if waiting := sum(gradients.values()) + self.before.freed_bytes:
            events.insert(0, last_gradients.are_there(waiting))
        libraries = 0 if self.memory is None else self.memory.end()
        modules = self.sharding.stop()
        events = with_lingering_copies(events, modules, self.device)
        memory = None if self.memory is None else self.memory.memory(self.before.freed_places)
        return as_scripted(
            StepRecord(
                graphs=tuple(_known_of(self, joint) for joint in self.joints),
                costs=tuple(costs),
                events=tuple(events),
                base_bytes=first + state,
                ledger=_ledger(self, first, state, libraries),
                device=costs[0].device if costs else cost_store.device_name(self.device),
                torch_version=torch.__version__,
                exact=self.meter.exact,
                memory=memory,
                breaks=tuple(breaks),
                reductions=ddp.reductions(self._parallel, self._given),
                sharding=_sharding(modules, events, memory),
                others_share=self._others_share,
            )
        )


def _step_begins(recorder: Recorder, arguments: Sequence[Any]) -> None:
    recorder.given_first, recorder._state_before = GivenFirst(arguments), holdings.state_bytes(recorder.device)
    recorder.before = GradientsBefore(holdings.gradient_storages(recorder.device))


def _ledger(recorder: Recorder, first: int, state: int, libraries: int) -> dict[str, int]:
    """What the ``first`` bytes, there when the step begins, gradients and the ``state`` that it adds consist of."""
    weights, before = _bytes_of(recorder.parameters), recorder._state_before
    kept = recorder.before.kept_bytes(recorder.gradients.values())
    rest = max(0, first - weights - before - kept - libraries)
    buckets = min(ddp.bucket_bytes(recorder._parallel), rest)
    return {
        "parameters": weights,
        "gradients": recorder._all_gradients_bytes,
        "optimizer state": before + state,
        **{name: nbytes for name, nbytes in ((LIBRARIES, libraries), (BUCKETS, buckets)) if nbytes},
        SCRIPT: rest - buckets,
    }


def _sharding(modules: tuple[ShardedModule, ...], events: list[Event], memory: DeviceMemory | None) -> Sharding | None:
    between = None if memory is None else memory.between
    return Sharding(modules, tuple(events), between=between) if modules else None


def _known_of(recorder: Recorder, joint: JointGraph) -> Graph:
    """The graph of ``joint`` with what the step has shown of it."""
    graph = cost.as_tried(joint, recorder.known)
    if recorder.arriving:  # an implementation may fail with the strides with which gradients arrive
        arriving = recorder.arriving[recorder.joints.index(joint)].joint
        graph = cost.as_tried(replace(arriving, graph=graph), recorder.known)
    return without_reading_again(usable_now(joint, graph), recorder._lifetimes.not_to_read_again(joint))


def _events(recorder: Recorder, costs: Sequence[Costs], gradients: Mapping[int, int]) -> list[Event]:
    """The stretches from the first call on; ``gradients``: bytes of the last step's that are freed after each."""
    events: list[Event] = []
    now = recorder.stretches[0].end_bytes if recorder.stretches else 0  # as ``replay`` will have it
    absent_bytes = recorder._lifetimes.absent_bytes(len(recorder.stretches))
    for i, stretch in enumerate(recorder.stretches[1:], 1):
        freed_now = sum(recorder.before.freed.get(i - 1, {}).values())
        if freed := freed_now + gradients.get(i - 1, 0):
            events.append(last_gradients.are_freed(freed))
            now -= freed_now
        if stretch.kind == OUTSIDE:
            absent = absent_bytes[i]
            delta, peak = stretch.end_bytes + absent - now, stretch.peak_bytes + absent - now
            grown = max(0, stretch.end_bytes - stretch.start_bytes) if stretch.name else 0
            found, index = recorder._lifetimes.dropped(i), recorder.joints.index
            dropped = tuple((index(joint), t) for joint, t, _ in found)
            read_as = tuple(tuple((index(joint), t) for joint, t in also) for _, _, also in found)
            tensors = [recorder.joints[k].graph.tensors[t] for k, t in dropped]
            seen = {} if recorder.memory is None else recorder.memory.seen_outside(i, tensors)
            high, action = max(0, peak - grown - sum(t.nbytes for t in tensors)), recorder._actions.get(i)
            # at the peak of an optimizer's step there may be less of its state than later
            if passing := recorder.optimizers.passing_bytes.get(i):
                high = max(high, passing + stretch.start_bytes + absent - now)
            seen["read_as"] = read_as if any(read_as) else ()
            events.append(Event(OUTSIDE, -1, delta - grown, high, stretch.name, dropped=dropped, action=action, **seen))
            now = stretch.end_bytes + absent
            continue
        joint, schedule = recorder.joints[stretch.graph], recorder.schedules[stretch.graph]
        released = recorder._lifetimes.released(i)
        events.append(Event(stretch.kind, stretch.graph, released=released))
        simulated = call_footprint(joint.graph, costs[stretch.graph], schedule, released)
        now += simulated.saved_bytes if stretch.kind == FORWARD else simulated.backward_delta_bytes
        now += recorder.optimizers.state_within[i]
    return events


def is_forgotten(recorder: object) -> TypeGuard[Recorder]:
    """Whether models were called, and the script has let go of what they gave: those calls are no training step."""
    return isinstance(recorder, Recorder) and not recorder.complete and recorder._lifetimes.forgotten()


def begun_anew(recorder: Recorder, other: Recorder) -> Recorder:
    """``other``, new, in the place of ``recorder``: compiled graphs know their numbers there."""
    if recorder.memory is not None:
        recorder.memory.stop()
    recorder.sharding.stop()
    other.joints, other.schedules, other._numbers = recorder.joints, recorder.schedules, recorder._numbers
    return other


def _of_weights(joint: JointGraph) -> set[fx.Node]:
    """The gradients that are of parameters."""
    pairs = zip(joint.primals, joint.gradients, strict=False)
    return {g for p, g in pairs if isinstance(g, fx.Node) and joint.storage.get(p) not in joint.transient}


def _most_frugal(joint: JointGraph, budget: Budget | None, held_bytes: int) -> Schedule:
    """The schedule of the least peak without what needs a guard, since the weights are not known here.

    What is not known to be exact is left out, too, and neither a batch nor an output is read again, since the script
    may change it after the forward. A schedule far below the budget ends the search.

    Args:
        joint: the graph.
        budget: of the step, if it is known.
        held_bytes: what is allocated now, beside the graph.
    """
    unknown = {(g.operator, g.implementation) for g in joint.guards.guards}
    for op in joint.graph.operators:
        unknown.update((op.id, k) for k, impl in enumerate(op.implementations) if not impl.exact)
    costs, enough = estimated(joint), 0.0
    if budget is not None and budget.kind == BYTES:
        enough = 0.5 * (budget.value - held_bytes)
    elif budget is not None and budget.kind == SHARE_OF_PLAIN:
        enough = 0.5 * budget.value * plain_timeline(joint.graph, costs).peak_bytes
    allowed = without_reading_again(without(joint.graph, unknown), changeable(joint))
    return greedy.most_frugal(allowed, costs, enough_bytes=max(0, int(enough)))


def estimated(joint: JointGraph) -> Costs:
    """Costs from bytes and flops alone, for when nothing has been measured."""
    known = {signature: cost.estimate(*timed) for signature, timed in joint.timed.items()}
    return cost.costs_of(joint, known, "estimate")


def _bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(_storages(tensors).values())


def _storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """Bytes of the storages of these tensors, by the number of each."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None and tensor.layout == torch.strided:
            storage = sharding.local(tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return storages
