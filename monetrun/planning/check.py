"""What ``monetrun check`` finds: values of a planned step beside the plain one's, and its operators' seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from monetrun.core.budget import format_bytes
from monetrun.core.plan import Schedule, Step
from monetrun.core.step import StepRecord
from monetrun.planning.explain import module_of

LOSS, GRADIENT, BUFFER = "loss", "gradient", "buffer"

# A value may be so many times as far from float64's as the plain step's is. Two roundings of one small tensor can be a
# few times apart by chance; wrong values are hundreds of times as far in float32.
FACTOR = 10.0
# Where the plain step's gradients are farther than this from float64's, as a share, that run was another step: it drew
# other random numbers, or took another branch.
_ANOTHER_STEP = 0.5
# A plain value that is farther from float64's, as a share of itself, has no digits to compare.
_MOSTLY_ROUNDING = 0.1


@dataclass(frozen=True, slots=True)
class OperatorSeconds:
    """Seconds that an operator took in a call of its graph's forward or backward.

    Attributes:
        graph: index in the step's record.
        phase: the pass in which it ran; a forward operator may run again in the backward.
        operator: its id.
        implementation: its index.
        seconds: of all its runs in the pass.
    """

    graph: int
    phase: str
    operator: int
    implementation: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """What a run of the script leaves beside the values of its first step.

    Attributes:
        weights: hash of the models' parameters and buffers when they were first called.
        inputs: of what they were first called with.
        random: of torch's generators then.
        steps: how many it made.
        peak_bytes: the most allocated in a step under a plan; None where that was not counted.
        reserved_bytes: the most that CUDA's allocator reserved; None on a CPU.
        operators: seconds of each operator under a plan.
        as_compiled: code of a model was told that it is being compiled, and may compute something else than in eager.
        warnings: what a launch would warn of.
    """

    weights: str
    inputs: str
    random: str
    steps: int
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    operators: tuple[OperatorSeconds, ...] = ()
    as_compiled: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """A value of the planned step beside the same one of the plain step. Norms are 2-norms.

    Attributes:
        kind: ``LOSS``, ``GRADIENT`` or ``BUFFER``.
        name: of the parameter or buffer.
        bitwise: whether all bits are the same.
        max_abs: the largest difference of two elements; infinite where only one is a number, or shapes differ.
        distance: norm of the difference.
        elements: how many it has.
        norm: of the plain value.
        epsilon: of its dtype: what one rounding may change, as a share; 0 for integers.
        planned_float64: norm of the planned value's difference from float64's; None where there is none.
        plain_float64: the same of the plain value.
        repeats: whether a second plain run gave the same bits; True where none was made.
        allowed: how large ``planned_float64``, or without it ``distance``, may be; set by ``judged``.
    """

    kind: str
    name: str
    bitwise: bool
    max_abs: float
    distance: float
    elements: int
    norm: float
    epsilon: float
    planned_float64: float | None = None
    plain_float64: float | None = None
    repeats: bool = True
    allowed: float = 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference, as a share of the plain value's."""
        return self.share(self.distance)

    @property
    def within(self) -> bool:
        """Whether the difference is allowed."""
        found = self.distance if self.planned_float64 is None else self.planned_float64
        return self.bitwise or found <= self.allowed  # false for NaN

    def share(self, distance: float) -> float:
        """A distance as a share of the plain value's norm."""
        if distance == 0:
            return 0.0
        return distance / self.norm if self.norm and math.isfinite(self.norm) else math.inf

    @property
    def mostly_rounding(self) -> bool:
        """Whether the plain value is mostly rounding: in float64 it is about 0, or another one."""
        return self.plain_float64 is not None and self.plain_float64 > _MOSTLY_ROUNDING * self.norm

    @property
    def finite(self) -> bool:
        """Whether the plain value, and its distance from float64's, are: one infinity or NaN makes norms infinite."""
        return math.isfinite(self.norm) and math.isfinite(self.plain_float64 or 0.0)


def is_another_step(differences: Sequence[Difference]) -> bool:
    """Whether the float64 run's gradients are so far from the plain ones that it was another step."""
    gradients = [d for d in differences if d.kind == GRADIENT and d.plain_float64 is not None]
    gradients = [d for d in gradients if math.isfinite(d.norm)]  # others overflow in the model's own precision
    far, whole = math.hypot(*(d.plain_float64 or 0.0 for d in gradients)), math.hypot(*(d.norm for d in gradients))
    return not far <= _ANOTHER_STEP * whole


def judged(differences: Sequence[Difference], *, bitwise: bool) -> tuple[Difference, ...]:
    """The differences with what is allowed.

    Args:
        differences: of one step.
        bitwise: whether the plan promises the plain step's bits. It cannot keep that where the plain step itself does
            not (``repeats``): there, and otherwise, the planned value may be ``FACTOR`` times as far from float64's as
            the plain one is, or as all plain ones of its kind are as a share of their norm (where rounding moves the
            input of a ReLU across zero, gradients jump), or as one rounding of a value of its size. Without float64
            both may differ by the root of the dtype's epsilon, as a share. A value's size is its norm, or that of as
            many elements of average size: a gradient that is zero but for rounding has none of its own. A value that is
            not ``finite`` has no size: there, bits are demanded, and it is no part of what others are measured by.
    """
    totals: dict[str, tuple[float, float, int]] = {}
    for d in differences:
        if d.finite:
            far, norm, elements = totals.get(d.kind, (0.0, 0.0, 0))
            far, norm = math.hypot(far, d.plain_float64 or 0.0), math.hypot(norm, d.norm)
            totals[d.kind] = far, norm, elements + d.elements

    def allowed(d: Difference) -> float:
        if not d.finite or (bitwise and d.repeats):
            return -1.0
        far, norm, elements = totals[d.kind]
        size = max(d.norm, norm * math.sqrt(d.elements / max(1, elements)))
        if d.plain_float64 is None:
            return math.sqrt(d.epsilon) * size
        share = far / norm if norm else 0.0
        return FACTOR * max(d.plain_float64, share * d.norm, d.epsilon * size)

    return tuple(replace(d, allowed=allowed(d)) for d in differences)


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Planned and measured seconds of one operator in one pass.

    Attributes:
        name: the operator's.
        module: its module's path.
        phase: the pass.
        implementation: its name.
        runs: how often it runs in the pass.
        planned_seconds: of all of these.
        measured_seconds: the same, in the planned step.
    """

    name: str
    module: str
    phase: str
    implementation: str
    runs: int
    planned_seconds: float
    measured_seconds: float

    @property
    def difference(self) -> float:
        """Seconds measured beyond the planned ones."""
        return self.measured_seconds - self.planned_seconds


def operator_times(
    record: StepRecord, schedules: Sequence[Schedule], measured: Sequence[OperatorSeconds]
) -> tuple[OperatorTime, ...]:
    """The operators that were measured, those farthest from their planned seconds first.

    Args:
        record: of the planned step.
        schedules: of its graphs.
        measured: what the run measured; steps that are not in the schedules are left out.
    """
    runs: Counter[tuple[int, str, Step]] = Counter()
    for graph, schedule in enumerate(schedules):
        runs.update((graph, "forward", step) for step in schedule.forward)
        runs.update((graph, "backward", step) for step in schedule.backward)
    found = []
    for m in measured:
        count = runs[m.graph, m.phase, Step(m.operator, m.implementation)]
        if not count:
            continue
        op = record.graphs[m.graph].operators[m.operator]
        planned = count * record.costs[m.graph].seconds[m.operator][m.implementation]
        name = op.implementations[m.implementation].name
        found.append(OperatorTime(op.name, module_of(op.name), m.phase, name, count, planned, m.seconds))
    return tuple(sorted(found, key=lambda t: abs(t.difference), reverse=True))


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The answer of ``monetrun check``.

    Attributes:
        budget_bytes: of the plan.
        planned_peak_bytes: of allocated bytes.
        measured_peak_bytes: the same, measured; None where that was not counted.
        planned_reserved_bytes: on CUDA, where the budget bounds them.
        measured_reserved_bytes: the same, measured.
        steps: in which bytes and seconds were measured.
        not_bitwise: why the plan does not promise the plain step's bits; empty: it does.
        no_float64: why there is no float64 run; empty: there is one.
        differences: judged.
        missing: values that only one of the two steps has.
        operators: see ``operator_times``.
        warnings: of the planned run.
    """

    budget_bytes: int
    planned_peak_bytes: int
    measured_peak_bytes: int | None
    planned_reserved_bytes: int | None
    measured_reserved_bytes: int | None
    steps: int
    not_bitwise: str
    no_float64: str
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]
    operators: tuple[OperatorTime, ...]
    warnings: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The differences that are not allowed, the largest first."""
        found = [d for d in self.differences if not d.within]
        return tuple(sorted(found, key=lambda d: d.relative, reverse=True))

    @property
    def bounded_bytes(self) -> int | None:
        """What was measured of the bytes that the budget bounds."""
        return self.measured_peak_bytes if self.planned_reserved_bytes is None else self.measured_reserved_bytes

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the check fails; empty: it passes."""
        found = []
        if self.wrong:
            first = self.wrong[0]
            of = f"{len(self.wrong)} of {len(self.differences)} values of the planned step"
            found.append(f"{of} are not the plain step's, most of all {first.kind} {first.name}")
        if self.missing:
            found.append(f"only one of the two steps has {', '.join(self.missing[:3])}")
        if (taken := self.bounded_bytes) is not None and taken > self.budget_bytes:
            found.append(f"the planned step takes {format_bytes(taken)} of {format_bytes(self.budget_bytes)}")
        if not self.differences:
            found.append("no value of the step could be compared")
        return tuple(found)
