"""Compares what is held when a forward begins with what its step still needs."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from monetrun.capture.meter import Meter
from monetrun.core.graph import BACKWARD, FORWARD, Graph
from monetrun.core.plan import Schedule
from monetrun.core.step import OUTSIDE, StepRecord
from monetrun.planning.forward_needs import ForwardNeed, forward_needs, needs_by_place
from monetrun.planning.intervals import optimizer_steps
from monetrun.runtime.optimizer_turns import OptimizerTurns
from monetrun.runtime.step_outputs import StepOutputs

# A call is planned again so often at most: where compiling it anew takes memory each time, it runs as it is.
_MOST_REPEATS = 3
# Outputs of so little, the limit >> 10, may as well be the script's own, such as a loss.
_NOTHING_SHIFT = 10


@dataclass(frozen=True, slots=True)
class Shortage:
    """A forward before which so much is held that its step does not fit.

    Attributes:
        fingerprint: of the forward's graph.
        held_bytes: allocated now, and what of the last step's outputs is not there, though it was as planned.
        need: what its step needs, and what is held before it as planned.
        missing_bytes: part of ``held_bytes``: those outputs.
        left_bytes: part of ``held_bytes``: what forwards have saved that no backward followed, such as that of a loss
            which is not finite; the script holds it until it has the next loss.
        plain_left_bytes: what those would have saved in the plain step.
    """

    fingerprint: str
    held_bytes: int
    need: ForwardNeed
    missing_bytes: int = 0
    left_bytes: int = 0
    plain_left_bytes: int = 0

    @property
    def excess_bytes(self) -> int:
        """Held now beyond what was planned."""
        return self.held_bytes - self.need.held_bytes


@dataclass(frozen=True, slots=True)
class _Open:
    """A forward: one of its saved values, and what it leaves allocated, as planned and in the plain step."""

    storage: StorageWeakRef
    nbytes: int
    plain_bytes: int


def _one_by_one(record: StepRecord) -> bool:
    kinds = [event.kind for event in record.events if event.kind != OUTSIDE]
    return all({a, b} == {FORWARD, BACKWARD} for a, b in pairwise(kinds))


def _left(forwards: Iterable[_Open], most: int) -> tuple[int, int]:
    """What forwards without a backward have left, as planned, but at most so many bytes, and in the plain step."""
    there = [one for one in forwards if not one.storage.expired()]
    left, plain = sum(one.nbytes for one in there), sum(one.plain_bytes for one in there)
    return (left, plain) if left <= most else (most, plain * most // left)


class Room:
    """Of one process. Only the first graph of a model's call is looked at: what has run cannot be taken back.

    Args:
        meter: of the device.

    Attributes:
        limit_bytes: what a step may have allocated; see ``limit_of``.
        excess_bytes: held at the last forward of the plan's graphs beyond what is planned; None where not looked at.
        began: the graphs whose forward has begun in the model's present call.
        outputs: of the present step and of the last one.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.limit_bytes = 0
        self.excess_bytes: int | None = None
        self.began: list[str] = []
        self.outputs = StepOutputs()
        self._needs: dict[str, tuple[ForwardNeed, ...]] = {}
        self._beyond: dict[str, int] = {}  # of graphs at other shapes: what a step may have beyond ``limit_bytes``
        self._in_python = False
        self._by_place = False  # needs are known by the place of a pass in the step, not by the calls of its graph
        self._calls: Counter[str] = Counter()  # of each graph, in the present step
        self._dropped: Counter[str] = Counter()  # of these, calls whose gradients the script has dropped
        self._structures: dict[str, str] = {}  # of graphs, by their fingerprints
        self._turns = OptimizerTurns()
        self._counts_outputs = True
        self._first = self._evaluated = False
        self._repeated = 0  # calls for which there was no room, one after the other
        self._open: dict[int, _Open] = {}  # forwards whose backward has not run, by the number of a storage
        self._one_by_one = False  # each forward's backward comes before the next one

    def plan_is(self, record: StepRecord | None, schedules: Mapping[str, Schedule], limit_bytes: int) -> None:
        """Another plan runs from now on; needs are known of the graphs of ``record``."""
        self.limit_bytes = limit_bytes
        self._needs.clear()
        self._beyond.clear()
        self._by_place = False
        self._one_by_one = record is not None and _one_by_one(record)
        self._in_python = record is not None and any(b.in_python for b in record.breaks)
        if record is not None:
            self._turns.are(optimizer_steps(record))
            of_graphs = [schedules[g.fingerprint] for g in record.graphs]
            by_place = None if self._in_python else needs_by_place(record, of_graphs)
            self._by_place = by_place is not None
            self._structures |= {g.fingerprint: g.structural_fingerprint for g in record.graphs}
            for k, needs in (forward_needs(record, of_graphs) if by_place is None else by_place).items():
                self._needs[record.graphs[k].fingerprint] = needs

    def other_shapes(self, step: StepRecord, schedule: Schedule, beyond_bytes: int) -> None:
        """The graph of ``step``, which the plan's record does not have, runs under ``schedule``.

        ``beyond_bytes``: what it may have allocated beyond ``limit_bytes``; negative where less.
        """
        fingerprint = step.graphs[0].fingerprint
        self._needs[fingerprint], self._beyond[fingerprint] = forward_needs(step, [schedule])[0], beyond_bytes

    def forget(self, fingerprint: str) -> None:
        """Steps of this graph are not looked at any more."""
        self._needs.pop(fingerprint, None)
        self._beyond.pop(fingerprint, None)
        self._structures.pop(fingerprint, None)

    def limit_of(self, fingerprint: str) -> int:
        """What a step of this graph may have allocated."""
        return self.limit_bytes + self._beyond.get(fingerprint, 0)

    def call_begins(self) -> None:
        """A model is called in training."""
        self._first, self.began = True, []

    def optimizer_ended(self, optimizer: int) -> None:
        """An optimizer's step (its ``id``) has ended."""
        if self._turns.ended(optimizer):
            self.step_left()
            self.outputs.step_ended()
            self._evaluated = False

    def saved(self, fingerprint: str, tensor: torch.Tensor) -> None:
        """A graph's forward has saved this for its backward, and nothing else holds it."""
        self._open = {number: one for number, one in self._open.items() if not one.storage.expired()}
        if needs := self._needs.get(fingerprint):
            storage = StorageWeakRef(tensor.untyped_storage())
            once = storage.cdata not in self._open  # else it is a constant of the graph
            self._open[storage.cdata] = _Open(storage, once * needs[0].saved_bytes, once * needs[0].plain_saved_bytes)

    def evaluates(self) -> None:
        """A planned model is evaluated, or called without gradients."""
        self._evaluated = True

    def calls_like(self, graph: Graph) -> int:
        """Of graphs with this structure, in the present step so far; from now on the graph counts as one."""
        structure = self._structures[graph.fingerprint] = graph.structural_fingerprint
        return sum(n for fingerprint, n in self._calls.items() if self._structures.get(fingerprint) == structure)

    def calls(self) -> dict[str, int]:
        """Of each graph, in the present step so far."""
        return dict(self._calls)

    def call_failed(self, calls: Mapping[str, int]) -> None:
        """A call has failed, and the script may go on: the step has had ``calls``."""
        self._calls = Counter(calls)

    def step_left(self) -> None:
        """The script has left the step: what it has called so far is no part of the next one."""
        self._calls.clear()
        self._dropped.clear()

    def gradients_dropped(self) -> None:
        """The script sets all gradients to nothing after a backward: a part of each step, or no optimizer steps."""
        self._dropped = self._calls.copy()

    def takes_another_way(self, fingerprint: str) -> bool:
        """A graph's forward begins: whether a model that runs in Python calls it more often than in the known step."""
        needs = self._needs.get(fingerprint)
        if not self._in_python or needs is None:
            return False
        if self._calls[fingerprint] >= len(needs) and self._dropped[fingerprint]:
            self._calls -= self._dropped  # the optimizer has skipped that step
            self._dropped.clear()
        return self._calls[fingerprint] >= len(needs)

    def held_before(self, fingerprint: str) -> Shortage | None:
        """A graph's forward begins in a step that is not bounded: what is held, where that is more than planned."""
        need = self._need(fingerprint)
        found = None if need is None else self._found(fingerprint, need)
        return found if found is not None and found.excess_bytes > 0 else None

    def shortage(self, fingerprint: str) -> Shortage | None:
        """A graph's forward begins: whether too much is held for its step, also after a garbage collection."""
        need = self._need(fingerprint)
        if need is None or self._repeated >= _MOST_REPEATS:
            self._repeated = 0
            return None
        found = self._found(fingerprint, need)
        if found.held_bytes + need.planned_bytes <= self.limit_of(fingerprint):
            self._repeated = 0
            return None
        gc.collect()
        found = self._found(fingerprint, need)
        return found if found.held_bytes + need.planned_bytes > self.limit_of(fingerprint) else None

    def has_room_for_plain(self, fingerprint: str, share: float) -> bool:
        """A model's call begins: whether the plain step of this graph fits a share of the limit; then it counts."""
        need = self._need(fingerprint)
        limit = int(min(self.limit_bytes, self.limit_of(fingerprint)) * share)
        if need is not None and self.meter.current_bytes() + need.plain_bytes <= limit:
            return True
        self._calls[fingerprint] -= 1
        self.call_begins()
        return False

    def call_repeats(self, fingerprint: str) -> None:
        """The forward of a graph that began, and for which there is no room, begins again."""
        self._calls[fingerprint] -= 1
        self._repeated += 1

    def call_is_let_be(self) -> None:
        """The call for which there was no room runs without a plan."""
        self._repeated = 0

    def does_without(self, shortage: Shortage) -> bool:
        """No schedule fits: outputs that may be missing are counted no more. Gives whether that changes anything."""
        self._counts_outputs &= not shortage.missing_bytes
        return shortage.missing_bytes > 0

    def _found(self, fingerprint: str, need: ForwardNeed) -> Shortage:
        """What is held, and with it what ``need`` takes to be freed soon and is not there: the last step's outputs.

        The first step of an epoch has none where the script's loop is a function: what else is held then stays, and
        would be taken for what is freed. Where as much is held as planned, it is there, though no graph gave it (the
        mean of ``F.mse_loss`` keeps all of its terms' memory), unless it may be the outputs of an evaluation.
        """
        missing = self.outputs.missing_bytes(need.last_outputs_bytes) if self._counts_outputs else 0
        held, nothing = self.meter.current_bytes(), self.limit_bytes >> _NOTHING_SHIFT
        if missing <= nothing or (not self._evaluated and abs(held - need.held_bytes) <= nothing):
            missing = 0
        self.excess_bytes = None if fingerprint in self._beyond else held + missing - need.held_bytes
        excess = held + missing - need.held_bytes
        left = _left(self._open.values(), excess if self._one_by_one and excess > nothing else 0)
        return Shortage(fingerprint, held + missing, need, missing, *left)

    def _need(self, fingerprint: str) -> ForwardNeed | None:
        """What the step of a forward that begins needs; None where it is not looked at."""
        number, self.excess_bytes = self._calls[fingerprint], None
        self.began.append(fingerprint)
        place = sum(self._calls.values()) if self._by_place else number
        self._calls[fingerprint] += 1
        needs = self._needs.get(fingerprint)
        first, self._first = self._first, False
        if not first or not needs or not self.meter.exact:
            return None
        if number and fingerprint in self._beyond:
            return None  # what a step's further calls hold is beside the first one
        return needs[min(place, len(needs) - 1)]
