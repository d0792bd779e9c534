"""What solvers return and what the cache keeps: steps, schedules, solutions, and the plan of a whole training step."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from monetrun.core import codec
from monetrun.core.graph import Graph, check_bytes
from monetrun.core.regions import second_runs

PLAN_SCHEMA = 3  # of a plan in JSON; goes up when an older plan cannot be read or would mean something else
STATUSES = ("optimal", "feasible", "infeasible", "unknown")


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """Run ``operator`` with its ``implementation``-th implementation."""

    operator: int
    implementation: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """Bytes that are allocated before a step and freed after it, so that what the step allocates lies elsewhere.

    Only for CUDA's caching allocator; ``planning.placement`` finds them.

    Attributes:
        step: its index in the forward's steps, followed by the backward's.
        nbytes: of the allocation.
    """

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of a forward and of a backward pass.

    The forward pass runs every forward operator once, in the graph's order. The backward pass runs every backward
    operator once, in the graph's order, and, anywhere between them, replayable forward operators again. Optional
    operators may be missing. When a tensor is freed follows from the order (after its last reader before it is next
    written), and so does what is saved from one pass for the other.

    ``holds`` do not change what runs. Those of one step are allocated in their order.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    holds: tuple[Hold, ...] = ()

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: something is held during a step that the schedule does not have, or it has no bytes.
        """
        count = len(self.forward) + len(self.backward)
        if any(not 0 <= hold.step < count or hold.nbytes <= 0 for hold in self.holds):
            raise ValueError("something is held during a step that is not there, or has no bytes")
        check_bytes(held=max((hold.nbytes for hold in self.holds), default=0))

    def runs_again(self) -> dict[int, int]:
        """How often the backward pass runs each operator that the forward pass has run."""
        forward = {step.operator for step in self.forward}
        return dict(Counter(step.operator for step in self.backward if step.operator in forward))

    def holds_by_step(self) -> dict[int, tuple[int, ...]]:
        """The bytes that are held during each step that has holds."""
        found: dict[int, tuple[int, ...]] = {}
        for hold in self.holds:
            found[hold.step] = (*found.get(hold.step, ()), hold.nbytes)
        return found


def each_once(graph: Graph) -> Schedule:
    """Every operator of the plain step once, with its default implementation."""
    steps = [Step(op.id) for op in graph.operators if op.plain]
    cut = sum(s.operator < graph.forward_count for s in steps)
    return Schedule(tuple(steps[:cut]), tuple(steps[cut:]))


def plain_schedule(graph: Graph) -> Schedule:
    """What the plain step runs: every operator once, and those of the script's checkpoint regions again.

    What it holds besides is in ``core.plain_step``.
    """
    once, before = each_once(graph), second_runs(graph)
    backward = (r for s in once.backward for r in (*map(Step, before.get(s.operator, ())), s))
    return Schedule(once.forward, tuple(backward))


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
class NamedImplementation:
    """What an implementation's index means in the graph that a schedule was made for.

    Attributes:
        operator: the operator's id.
        index: in ``Operator.implementations`` of that graph.
        name: ``Implementation.name``.
        inputs: ``Implementation.inputs``.
        in_place_of: ``Implementation.in_place_of``.
    """

    operator: int
    index: int
    name: str
    inputs: tuple[int, ...]
    in_place_of: int | None


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The schedule of one graph, in a form that can be kept.

    The indices in ``schedule`` are those of the graph that was planned. The same operator may have its implementations
    in another order, or fewer of them, in another version of monetrun or at another batch size: ``schedule_for``
    resolves them by name.

    Attributes:
        fingerprint: of the graph that was planned.
        structural_fingerprint: of the same graph.
        schedule: for that graph.
        implementations: every implementation that ``schedule`` uses beside the defaults.
    """

    fingerprint: str
    structural_fingerprint: str
    schedule: Schedule
    implementations: tuple[NamedImplementation, ...]

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule) -> GraphPlan:
        """The plan that runs ``graph`` with ``schedule``."""
        steps = (*schedule.forward, *schedule.backward)
        named = []
        for operator, index in sorted({(s.operator, s.implementation) for s in steps if s.implementation}):
            chosen = graph.operators[operator].implementations[index]
            named.append(NamedImplementation(operator, index, chosen.name, chosen.inputs, chosen.in_place_of))
        return cls(graph.fingerprint, graph.structural_fingerprint, schedule, tuple(named))

    def check(self) -> None:
        """Check what can be checked without the graph; ``simulate.judge`` checks the rest.

        Raises:
            ValueError: a step is not one of any graph, or it uses an implementation that has no name.
        """
        steps = (*self.schedule.forward, *self.schedule.backward)
        if any(s.operator < 0 or s.implementation < 0 for s in steps):
            raise ValueError("a step has a negative operator or implementation")
        used = {(s.operator, s.implementation) for s in steps if s.implementation}
        named = [(n.operator, n.index) for n in self.implementations]
        if len(named) != len(used) or used != set(named):
            raise ValueError("the schedule's implementations are not the named ones")

    def schedule_for(self, graph: Graph) -> Schedule:
        """The same steps with the indices of ``graph``, which has this plan's structural fingerprint.

        A step whose implementation ``graph`` does not have, or must not use now, runs the variant of the same name and
        inputs that is not in place, else the default. The result need not be valid or as frugal: ``simulate`` decides.
        Holds are of the graph that was planned, at its shapes.
        """
        index = {(n.operator, n.index): _index_in(graph, n) for n in self.implementations}

        def resolved(step: Step) -> Step:
            return Step(step.operator, index.get((step.operator, step.implementation), 0))

        holds = self.schedule.holds if graph.fingerprint == self.fingerprint else ()
        forward, backward = self.schedule.forward, self.schedule.backward
        return Schedule(tuple(map(resolved, forward)), tuple(map(resolved, backward)), holds)


def _index_in(graph: Graph, named: NamedImplementation) -> int:
    """The index of ``named`` in ``graph``, see ``GraphPlan.schedule_for``."""
    if not 0 <= named.operator < len(graph.operators):
        return named.index  # a damaged plan: ``simulate`` rejects its steps
    implementations = graph.operators[named.operator].implementations
    usable = [k for k, impl in enumerate(implementations) if impl.usable]
    for in_place_of in (named.in_place_of, None):
        wanted = (named.name, named.inputs, in_place_of)
        alike = [
            k
            for k in usable
            if (implementations[k].name, implementations[k].inputs, implementations[k].in_place_of) == wanted
        ]
        if alike:  # several only where a graph has the same implementation twice
            return named.index if named.index in alike else alike[0]
    return 0


@dataclass(frozen=True, slots=True)
class StepSchedules:
    """One schedule for each graph of a training step."""

    graphs: tuple[GraphPlan, ...]

    @classmethod
    def of(cls, graphs: Sequence[Graph], schedules: Sequence[Schedule]) -> StepSchedules:
        """The plans that run each of ``graphs`` with the schedule at its index."""
        return cls(tuple(GraphPlan.of(g, s) for g, s in zip(graphs, schedules, strict=True)))

    def schedules_for(self, graphs: Sequence[Graph]) -> tuple[Schedule, ...]:
        """The schedules with the indices of ``graphs``, see ``GraphPlan.schedule_for``."""
        return tuple(plan.schedule_for(g) for plan, g in zip(self.graphs, graphs, strict=True))


@dataclass(frozen=True, slots=True)
class Pool:
    """What CUDA's caching allocator holds for a planned step; ``core.requests`` derives it.

    Attributes:
        plain_bytes: what the plain run reserves.
        small_bytes: reserved for requests of up to 1 MiB.
        large_bytes: reserved for larger ones.
        other_streams_bytes: part of ``large_bytes``: reserved on streams on which no graph runs.
        plain_is_estimated: the plain run's peaks, reserved and allocated, were derived and not measured (no trial run).
    """

    plain_bytes: int
    small_bytes: int
    large_bytes: int
    other_streams_bytes: int = 0
    plain_is_estimated: bool = False

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: bytes are negative, or more than any device has.
        """
        check_bytes(plain=self.plain_bytes, small=self.small_bytes, large=self.large_bytes)
        check_bytes(other_streams=self.other_streams_bytes)

    @property
    def planned_bytes(self) -> int:
        """All that is reserved in a planned step."""
        return self.small_bytes + self.large_bytes

    def lies_in(self, other: Pool) -> bool:
        """Whether ``other`` has room for all that is reserved here."""
        return self.small_bytes <= other.small_bytes and self.large_bytes <= other.large_bytes

    def beside(self, other: Pool) -> Pool:
        """The smallest pool in which this one and ``other`` lie."""
        small, large = max(self.small_bytes, other.small_bytes), max(self.large_bytes, other.large_bytes)
        return replace(other, small_bytes=small, large_bytes=large)


@dataclass(frozen=True)
class Plan:
    """Schedules of all graphs of a training step, and what ``simulate`` and the solver found of them.

    Bytes are of the whole step on one device, with weights, optimizer state and what the script holds. Peaks are of
    allocated bytes; on CUDA ``pool`` says what is reserved for them, which is what the budget bounds there.
    ``overhead`` and ``bound`` are added seconds over the plain step's seconds, as fractions. ``keeps_parameters``: of
    modules that FSDP2 shards, by name, whether they keep their parameters between forward and backward; others do as
    the script says. ``gradients_by_turns``: as in the step's record.
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
    pool: Pool | None = None
    keeps_parameters: dict[str, bool] = field(default_factory=dict)
    gradients_by_turns: bool = False
    schema: int = PLAN_SCHEMA

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: it is of another schema, or a number cannot be right; the message names it.
        """
        if self.schema != PLAN_SCHEMA:
            raise ValueError(f"it has schema {self.schema}, this monetrun reads schema {PLAN_SCHEMA}")
        check_bytes(budget=self.budget_bytes, plain_peak=self.plain_peak_bytes, planned_peak=self.planned_peak_bytes)
        check_bytes(**{f"ledger's_{name}": abs(nbytes) for name, nbytes in self.ledger.items()})
        if self.budget_bytes == 0:
            raise ValueError("the budget is 0 bytes")
        if self.pool is None and self.planned_peak_bytes > self.budget_bytes:
            raise ValueError(
                f"the planned peak is {self.planned_peak_bytes} bytes, over the budget of {self.budget_bytes}"
            )
        if min(self.overhead, self.bound) < -1.0:  # all of the step's time
            raise ValueError(f"the overhead is {self.overhead}, its bound {self.bound}")
        if self.status not in STATUSES:
            raise ValueError(f"the status is {self.status!r}, it must be one of {', '.join(STATUSES)}")

    @cached_property
    def digest(self) -> str:
        """Hash of the plan, by which ranks check that they run the same one."""
        return hashlib.sha256(codec.dumps(self).encode()).hexdigest()[:32]

    @property
    def gap(self) -> float:
        """How far the overhead is from the optimum at most, as a fraction of the plain step."""
        return max(0.0, self.overhead - self.bound)


def parse_plan(text: str) -> Plan:
    """Read a plan that ``codec.dumps`` wrote.

    Raises:
        ValueError: not a plan, or one of another schema; the message says which.
    """
    plain = codec.parse_json(text)
    schema = plain.get("schema", PLAN_SCHEMA) if isinstance(plain, dict) else PLAN_SCHEMA
    if schema != PLAN_SCHEMA:
        raise ValueError(f"it has schema {schema!r}, this monetrun reads schema {PLAN_SCHEMA}")
    plan: Plan = codec.from_plain(Plan, plain)
    return plan
