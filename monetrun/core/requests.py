"""A training step as the caching allocator sees it: request by request. See ``reserved``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.event import calls_of_graphs, is_optimizer_step
from monetrun.core.freed import freed_after
from monetrun.core.graph import BACKWARD, FORWARD, Graph, Operator
from monetrun.core.last_gradients import last_gradients_bytes
from monetrun.core.last_outputs import dropped_later
from monetrun.core.plan import Schedule
from monetrun.core.replayed_blocks import (
    Block,
    LastGradients,
    LastOutputs,
    ReplayedBatch,
    blocks_at,
    free_all,
    free_latest,
    free_some,
    load_base,
    serve,
)
from monetrun.core.simulate import last_reads
from monetrun.core.step import LAST_GRADIENTS, LAST_OUTPUTS, DeviceMemory, Event, StepRecord, events_under


@dataclass(slots=True)
class _Call:
    """A forward whose backward has not come yet.

    Attributes:
        last: for each step of the schedule and each of its outputs, the last step that reads it.
        addresses: of tensors that are alive.
        until: the step after which each of them is freed, but for kept ones.
    """

    last: list[tuple[int, ...]]
    addresses: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)


class StepReplay:
    """Training steps, one after the other.

    Attributes:
        batch: the present step's.
        gradients: what backward passes of the present step have left.
        outputs: what its forward passes, and the script, have left.
    """

    def __init__(self, record: StepRecord, schedules: Sequence[Schedule], allocator: CachingAllocator) -> None:
        self.record = record
        self.allocator = allocator
        self.gradients: list[Block] = []
        self.outputs: list[Block] = []
        self._calls: dict[int, list[_Call]] = {}
        self.batch = ReplayedBatch(() if record.memory is None else record.memory.batch, allocator)
        self._script: dict[int, Block] = {}  # by the number of the request
        self.follow(schedules)

    def follow(self, schedules: Sequence[Schedule]) -> None:
        """Steps run under these schedules from now on."""
        self.schedules = schedules
        self._events = events_under(self.record, schedules)
        self._without_backward = _without_backward(self._events)
        self._holds = [schedule.holds_by_step() for schedule in schedules]
        self._last = [last_reads(g, s.forward + s.backward) for g, s in zip(self.record.graphs, schedules, strict=True)]

    def begin_with(self, memory: DeviceMemory) -> Mapping[int, int]:
        """The first step finds its blocks, gradients, outputs and the batch among them: bytes by address."""
        base = load_base(memory, self.allocator)
        self.gradients, self.outputs = blocks_at(memory.gradients, base), blocks_at(memory.outputs, base)
        self.batch.find(base, (*self.gradients, *self.outputs))
        return base

    def step(self, *, first: bool) -> None:
        """One step; in the first one nothing of an earlier step is held, and the optimizer allocates its state."""
        between = None if self.record.memory is None else self.record.memory.between
        last_gradients = LastGradients(self.gradients, last_gradients_bytes(self.record), self.allocator)
        last_outputs = LastOutputs(self.outputs, dropped_later(self._events), self.allocator)
        requests, backward, self.gradients, self.outputs = 0, False, [], []
        if not first and between is None:
            self.batch.replace()
        held_over = {event.name for event in self._events if event.delta_bytes > 0}
        for event in self._events:
            if event.kind == FORWARD:
                self._forward(event.graph)
            elif event.kind == BACKWARD:
                self._backward(event)
                backward = True
            elif event.name == LAST_GRADIENTS:
                last_gradients.free(-event.delta_bytes)
            elif event.name == LAST_OUTPUTS:
                last_outputs.drop(-event.delta_bytes, later=backward)
            else:
                self._outside(event, requests, first)
                requests += sum(n > 0 for n in event.requests)
        last_gradients.free_all()
        last_outputs.drop_all()
        _end_calls(self.allocator, self._calls, self._without_backward)
        if between is not None:
            self._outside(between, requests, first=False)
        self.batch.is_last_of(self._script, requests)
        self.outputs += self._script.values()
        self._script.clear()
        for name, blocks in ((LAST_GRADIENTS, self.gradients), (LAST_OUTPUTS, self.outputs)):
            if name not in held_over:
                free_all(self.allocator, blocks)

    # ---- the script

    def _outside(self, event: Event, requests: int, first: bool) -> None:
        """The script's own requests; where they were not recorded, what it allocates is one block."""
        before = self._held_bytes()
        state = is_optimizer_step(event.kind, event.name)
        freed_here = {-n for n in event.requests if n < 0}
        end = len(event.requests)
        after = event.dropped_after or (end,) * len(event.dropped)
        batch_bytes = 0
        for i, n in enumerate(event.requests):
            self._drop(t for t, place in zip(event.dropped, after, strict=True) if place == i)
            self._free_sizes(nbytes for nbytes, place in event.freed or () if place == i)
            batch_bytes += self.batch.free(part for part, place in event.batch_freed if place == i)
            if n < 0:
                block = self._script.pop(-n, None)
                if block is not None:
                    self.allocator.free(block.address)
                continue
            requests += 1
            if not state or requests in freed_here:
                self._script[requests] = self._new(n)
            elif first:
                self._new(n)  # the optimizer's state
        if not event.requests:
            temporary = self._new(max(0, event.peak_bytes - max(0, event.delta_bytes)))
            if (more := event.delta_bytes - event.elsewhere_bytes) > 0:
                self.outputs.append(self._new(more))
            self.allocator.free(temporary.address)
        batch_bytes += self.batch.free(part for part, place in event.batch_freed if place >= end)
        self._free_sizes(nbytes for nbytes, place in event.freed or () if place >= end)
        if event.freed is None:  # beside its own requests: gradients that were added to others, then outputs
            surplus = self._held_bytes() - before - (event.delta_bytes + batch_bytes - event.elsewhere_bytes)
            for blocks in (self.gradients, self.outputs):
                surplus -= free_some(self.allocator, blocks, surplus)
        self._drop(t for t, place in zip(event.dropped, after, strict=True) if place >= end)

    def _drop(self, outputs: Iterable[tuple[int, int]]) -> None:
        """Free outputs (graph, id) that the script holds no more."""
        for k, t in outputs:
            call = next((c for c in reversed(self._calls.get(k, ())) if t in c.addresses), None)
            if call is not None:
                self.allocator.free(call.addresses.pop(t))

    def _free_sizes(self, sizes: Iterable[int]) -> None:
        """Free a block of each of these sizes: the latest gradient, else the latest output."""
        for nbytes in sizes:
            free_latest(self.allocator, nbytes, self.gradients, self.outputs)

    def _held_bytes(self) -> int:
        return sum(b.nbytes for blocks in (self.gradients, self.outputs, self._script.values()) for b in blocks)

    def _new(self, nbytes: int) -> Block:
        return Block(self.allocator.allocate(nbytes), nbytes)

    def _forward(self, k: int) -> None:
        call = _Call(self._last[k])
        for i in range(len(self.schedules[k].forward)):
            self.run_step(k, call, i)
        self._calls.setdefault(k, []).append(call)

    def _backward(self, event: Event) -> None:
        k = event.graph
        graph, schedule = self.record.graphs[k], self.schedules[k]
        pending = self._calls.get(k)
        if not pending:
            return  # recorded without its forward
        call = pending.pop()
        cut, end = len(schedule.forward), len(schedule.forward) + len(schedule.backward)
        leaving = _leaving(event, graph, schedule)
        for t in leaving.get(cut - 1, ()):
            self._release(call, graph, t)
        for i in range(cut, end):
            self.run_step(k, call, i)
            for t in leaving.get(i, ()):
                self._release(call, graph, t)
        for t, address in call.addresses.items():
            of = self.gradients if graph.operators[graph.writer[t]].phase == BACKWARD else self.outputs
            of.append(Block(address, graph.tensors[t].nbytes))

    def _release(self, call: _Call, graph: Graph, t: int) -> None:
        """Free an output of this graph; of an external tensor (a tangent, an input) the latest block of its size."""
        if t in call.addresses:
            self.allocator.free(call.addresses.pop(t))
            return
        nbytes = graph.tensors[t].nbytes
        if free_latest(self.allocator, nbytes, self.gradients, self.outputs):
            return
        for number in reversed(self._script):
            if self._script[number].nbytes == nbytes:
                self.allocator.free(self._script.pop(number).address)
                return
        self.batch.free_one(nbytes)

    def run_step(self, k: int, call: _Call, i: int) -> None:
        """The ``i``-th step of the schedule of graph ``k``, and what is held beside it."""
        held = [self.allocator.allocate(nbytes) for nbytes in self._holds[k].get(i, ())]
        self._run(k, call, i)
        for address in held:
            self.allocator.free(address)

    def results_allocated(self, operator: Operator) -> None:
        """``operator`` runs, and has its results."""

    def _run(self, k: int, call: _Call, i: int) -> None:
        """One step of a schedule: the call of its operator, then what is read no more is freed."""
        graph, schedule = self.record.graphs[k], self.schedules[k]
        cut = len(schedule.forward)
        step = schedule.forward[i] if i < cut else schedule.backward[i - cut]
        op = graph.operators[step.operator]
        implementation = op.implementations[step.implementation]
        again: list[int] = []
        new = op.outputs[0 if implementation.in_place_of is None else 1 :]
        addresses = serve(self.allocator, self.record.costs[k], step, [graph.tensors[t].nbytes for t in new])
        self.results_allocated(op)
        if implementation.in_place_of is not None:
            addresses.insert(0, call.addresses.pop(implementation.in_place_of))
            call.until.pop(implementation.in_place_of, None)
        for t, until, address in zip(op.outputs, call.last[i], addresses, strict=True):
            if graph.tensors[t].kept:
                if t in call.addresses:
                    again.append(address)
                    continue
            else:
                call.until[t] = until
            call.addresses[t] = address
        for address in again:
            self.allocator.free(address)
        for t in dict.fromkeys((*implementation.inputs, *op.outputs)):
            if call.until.get(t) == i:
                del call.until[t]
                self.allocator.free(call.addresses.pop(t))


def held_by_calls(replay: StepReplay) -> list[list[int]]:
    """For each forward whose backward has not come yet, the addresses of what it saves."""
    return [list(call.addresses.values()) for of_graph in replay._calls.values() for call in of_graph]


def _end_calls(allocator: CachingAllocator, calls: Mapping[int, list[_Call]], without_backward: Counter[int]) -> None:
    """What forwards save of which no backward comes is freed with the script's last reference to their outputs."""
    for k, n in without_backward.items():
        of_graph = calls.get(k, [])
        for call in of_graph[:n]:
            for address in call.addresses.values():
                allocator.free(address)
        del of_graph[: max(0, n)]


def _without_backward(events: Sequence[Event]) -> Counter[int]:
    """How many forwards of each graph have no backward."""
    counts = calls_of_graphs(events)
    counts.subtract(e.graph for e in events if e.kind == BACKWARD)
    return counts


def _leaving(event: Event, graph: Graph, schedule: Schedule) -> dict[int, list[int]]:
    """The tensors that are released after each step."""
    cut = len(schedule.forward)
    leaving: dict[int, list[int]] = {}
    for t, i in freed_after(graph, schedule, event.released).items():
        leaving.setdefault(cut + i, []).append(t)
    return leaving
