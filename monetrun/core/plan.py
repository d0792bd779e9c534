"""What a solver returns and what is kept: steps, schedules, solutions, and the plan of a whole training step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from monetrun.core import codec
from monetrun.core.graph import Graph

SCHEMA = 1


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """Run ``operator`` with its ``implementation``-th implementation."""

    operator: int
    implementation: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of a forward and of a backward pass.

    The forward pass runs every forward operator once, in the graph's order. The backward pass runs every backward
    operator once, in the graph's order, and, anywhere between them, replayable forward operators again. Optional
    operators may be missing. When a tensor is freed is derived (after its last reader before it is next written), and
    so is what crosses from one pass to the other.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


def plain_schedule(graph: Graph) -> Schedule:
    """Every operator once, with its default implementation: what the plain step runs."""
    steps = [Step(op.id) for op in graph.operators if op.plain]
    cut = sum(s.operator < graph.forward_count for s in steps)
    return Schedule(tuple(steps[:cut]), tuple(steps[cut:]))


@dataclass(frozen=True, slots=True)
class Solution:
    """What every solver returns.

    Attributes:
        schedule: a valid schedule within the budget, or None when none was found.
        bound_seconds: no schedule within the budget can cost less than this (0.0 when nothing is known).
        status: ``"optimal"``, ``"feasible"``, ``"infeasible"`` (proven) or ``"unknown"`` (none found in time).
        solver: which algorithm.
        seconds: how long it took.
    """

    schedule: Schedule | None
    bound_seconds: float
    status: str
    solver: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepSchedules:
    """One schedule for each graph of a training step."""

    schedules: tuple[Schedule, ...]


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """One captured graph's share of the plan."""

    fingerprint: str
    structural_fingerprint: str
    schedule: Schedule


@dataclass(frozen=True)
class Plan:
    """Schedules of all graphs of a training step, and what is claimed of them.

    Bytes are of the whole step on one device: base (weights, optimizer state, what the script holds) included.
    ``overhead`` and ``bound`` are added seconds over the plain step's seconds, as fractions.
    """

    graphs: tuple[GraphPlan, ...]
    budget_bytes: int
    plain_peak_bytes: int
    planned_peak_bytes: int
    overhead: float
    bound: float
    status: str
    solver: str
    device: str
    torch_version: str
    ledger: dict[str, int] = field(default_factory=dict)
    schema: int = SCHEMA

    @cached_property
    def digest(self) -> str:
        """Hash that all ranks must agree on."""
        return hashlib.sha256(codec.dumps(self).encode()).hexdigest()[:32]

    @property
    def gap(self) -> float:
        """How far the overhead may be from the optimum, as a fraction of the step."""
        return max(0.0, self.overhead - self.bound)
