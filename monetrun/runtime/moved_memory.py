"""Plans for steps that are not as recorded: more is held before them, or their plain run takes more."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from monetrun.capture.allocator_history import blocks, segments
from monetrun.capture.joint import JointGraph
from monetrun.core.budget import SHARE_OF_PLAIN, format_budget, format_bytes, parse, resolve
from monetrun.core.errors import BudgetExceeded, InfeasibleBudget, NoPlanInTime, own_faults
from monetrun.core.last_gradients import last_gradients_bytes
from monetrun.core.last_outputs import with_more_outputs
from monetrun.core.options import Options
from monetrun.core.plain_heap import PlainHeap
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import Plan, Pool, Schedule
from monetrun.core.reserved import reserved
from monetrun.core.step import HELD_SINCE, DeviceMemory, StepRecord, replay
from monetrun.core.step_changes import with_more_held
from monetrun.planning import planner
from monetrun.runtime import adaptation, holdings
from monetrun.runtime.room import Shortage
from monetrun.runtime.settings import Settings
from monetrun.runtime.short_of_memory import as_out_of_memory

# A new shape, or more held before a step than planned, is solved within a training step: no longer than this.
_SECONDS = 2.0
# A plan leaves at least this much for what may come to be held beside what is there: the budget >> 7, 0.8% of it.
LEAST_COVER_SHIFT = 7
# Below this a share of the plain peak does not follow it: the plain run's peak is known to 0.5% only.
_GROWTH = 1.002
# Plain steps of graphs at other shapes: of the last ones.
_STEPS_KEPT = 16


@dataclass(frozen=True)
class Replanned:
    """A plan, the step that it is of, and the most frugal schedules of its graphs where they were searched for."""

    plan: Plan
    record: StepRecord
    frugal: tuple[Schedule, ...] | None


def options_within_a_step(settings: Settings) -> Options:
    """The solver's options where a training step waits for it."""
    return settings.solver_options(min(_SECONDS, settings.solver_seconds))


def plain_peak(step: StepRecord) -> int:
    """Bytes that the plain step has allocated at most."""
    return replay(*plain_step(step)).peak_bytes


def plain_bytes(plan: Plan) -> int:
    """What the plain run takes, in the bytes that the budget bounds."""
    return plan.plain_peak_bytes if plan.pool is None else plan.pool.plain_bytes


def with_plain_peak_of(plan: Plan, other: Plan) -> Plan:
    """``other``, with what the plain run takes as ``plan`` has it."""
    pool = other.pool
    if pool is not None and plan.pool is not None:
        pool = replace(pool, plain_bytes=plan.pool.plain_bytes)
    return replace(other, plain_peak_bytes=plan.plain_peak_bytes, pool=pool)


def allocated_limit(plan: Plan) -> int:
    """What a step may have allocated: the budget, on CUDA less what is reserved beyond it."""
    if plan.pool is None:
        return plan.budget_bytes
    return plan.budget_bytes - max(0, plan.pool.planned_bytes - plan.planned_peak_bytes)


def limit_of(step: StepRecord, plan: Plan) -> int:
    """What ``step``, of a graph that ``plan`` does not have, may take, see ``adaptation.taken_bytes``."""
    return allocated_limit(plan) if step.memory is None else plan.budget_bytes


def pool_of(step: StepRecord, schedule: Schedule, plan: Plan) -> Pool | None:
    """What is reserved in ``step``, of a graph that ``plan`` does not have; None where that is not known."""
    if step.memory is None or plan.pool is None:
        return None
    taken = reserved(step, [schedule])
    return replace(plan.pool, small_bytes=taken.small_bytes, large_bytes=taken.large_bytes)


def allocated_beyond(allocated_bytes: int, plan: Plan, pool: Pool | None) -> int:
    """What a step that allocates so much in this pool may have beyond ``allocated_limit``; negative where less."""
    if pool is None:
        return 0
    unused = max(0, pool.planned_bytes - allocated_bytes)
    return plan.budget_bytes - unused - allocated_limit(plan)


def memory_now(
    device: torch.device, record: StepRecord | None, freed_bytes: int, outputs: Collection[int] = ()
) -> DeviceMemory | None:
    """The memory of ``device`` as it is; None where a trial run told nothing.

    Args:
        device: of the step.
        record: of the planned step.
        freed_bytes: of the last step's gradients, which the step frees.
        outputs: addresses of the last step's outputs, which it drops.
    """
    known = None if record is None else record.memory
    if known is None:
        return None
    freed = _gradients_of(device, freed_bytes)
    there = sorted(blocks(device)) if freed or outputs else []
    return DeviceMemory(
        known.settings,
        known.plain_settings,
        known.device_bytes,
        base=segments(device),
        excess_bytes=known.excess_bytes,
        other_streams_bytes=known.other_streams_bytes,
        gradients=tuple(i for i, address in enumerate(there) if address in freed),
        outputs=tuple(i for i, address in enumerate(there) if address in outputs),
    )


def _gradients_of(device: torch.device, nbytes: int) -> set[int]:
    """Addresses of gradients that are there now, of so many bytes together."""
    found = set()
    for address, of_it in holdings.gradients(device).items():
        if nbytes >= of_it:
            nbytes -= of_it
            found.add(address)
    return found


def is_share(budget: str) -> bool:
    """Whether ``budget``, in ``--budget``'s grammar or empty, is a share of the plain peak."""
    return bool(budget) and parse(budget).kind == SHARE_OF_PLAIN


class PlainReserved:
    """What the plain run reserves where it allocates more than the recorded step.

    Args:
        device: a CUDA device, or one where nothing is reserved.
        record: of the planned step, where known.
    """

    def __init__(self, device: torch.device, record: StepRecord | None) -> None:
        self.device = device
        self._record = record
        self._steps: dict[str, StepRecord] = {}  # plain steps, by the fingerprint of their graph; the last ones
        self._heap: PlainHeap | None = None
        self._found: dict[str, tuple[int, int]] = {}  # by fingerprint: allocated, and what is reserved for it

    def step_is(self, step: StepRecord) -> None:
        """The graph of ``step``, a plain one, is not in the record."""
        if step.memory is not None:
            self._steps[step.graphs[0].fingerprint] = step
            if len(self._steps) > _STEPS_KEPT:
                self._found.pop(oldest := next(iter(self._steps)), None)
                del self._steps[oldest]

    def bytes_at(self, fingerprint: str, plan: Plan, plain_allocated_bytes: int) -> int:
        """At a forward of this graph, in whose plain step so much is allocated.

        Without what a trial run tells of the allocator, what is reserved is taken to grow as what is allocated does.
        """
        assert plan.pool is not None
        step = self._steps.get(fingerprint, self._record)
        if step is None or self._record is None or self._record.memory is None:
            return plan.pool.plain_bytes * plain_allocated_bytes // max(1, plan.plain_peak_bytes)
        tried_bytes, found_bytes = self._found.get(fingerprint, (0, 0))
        if plain_allocated_bytes > tried_bytes * _GROWTH:  # a replay takes a tenth of a second
            if self._heap is None:
                self._heap = PlainHeap(self._record)
            self._heap.run(step, _held_beside(step, self.device))
            found_bytes = self._heap.reserved_bytes
            self._found[fingerprint] = plain_allocated_bytes, found_bytes
        return max(plan.pool.plain_bytes, found_bytes, plain_allocated_bytes)


def _held_beside(step: StepRecord, device: torch.device) -> list[int]:
    """Bytes of the blocks in use, by address, without those gradients of the last step that ``step`` frees itself."""
    freed = _gradients_of(device, last_gradients_bytes(step))
    return [nbytes for address, nbytes in sorted(blocks(device).items()) if address not in freed]


def plan_at_plain_peak(
    plan: Plan, budget: str, plain_allocated_bytes: int, fingerprint: str, reserved: PlainReserved
) -> Plan | None:
    """The plan with the budget that is a share of the largest plain peak seen; None where that does not grow.

    Args:
        plan: as it is.
        budget: in ``--budget``'s grammar; empty where the plan came with its own.
        plain_allocated_bytes: the plain step's peak now.
        fingerprint: of the graph that begins its forward.
        reserved: on CUDA, the same of reserved bytes.
    """
    if not is_share(budget) or plain_allocated_bytes <= plan.plain_peak_bytes:
        return None
    # grown by less, a step for which 8 bytes were lacking would find no schedule at ``1.0x``
    plain_allocated_bytes = max(plain_allocated_bytes, int(plan.plain_peak_bytes * _GROWTH) + 1)
    pool = plan.pool
    if pool is not None:
        pool = replace(pool, plain_bytes=reserved.bytes_at(fingerprint, plan, plain_allocated_bytes))
    grown = replace(plan, plain_peak_bytes=plain_allocated_bytes, pool=pool)
    budget_bytes = resolve(parse(budget), None, plain_bytes(grown))
    return replace(grown, budget_bytes=budget_bytes) if budget_bytes > plan.budget_bytes else None


def plain_peak_beside(shortage: Shortage, measured_bytes: int) -> int:
    """The plain step's peak with what is held now.

    What forwards without a backward have left is held until the script has the next loss.

    ``measured_bytes``: peak of steps of which not all is known, such as their optimizer's; the plain run takes as much.
    """
    others, need = shortage.held_bytes - shortage.left_bytes, shortage.need
    with_it = others + shortage.plain_left_bytes + need.plain_forward_bytes if shortage.plain_left_bytes else 0
    return max(others + need.plain_bytes, with_it, measured_bytes)


@own_faults()
def plan_with_more_held(
    record: StepRecord,
    plan: Plan,
    shortage: Shortage,
    settings: Settings,
    frugal: tuple[Schedule, ...] | None = None,
) -> Replanned:
    """A plan within the same budget for a step before which more is held.

    It has room for twice as much, where that is possible: memory that grows steadily is planned for a few times only.
    The most frugal schedules are searched for at length only where nothing is found from the plan's.

    Args:
        record: of the step that ``plan`` is of.
        plan: that does not fit.
        shortage: what is held.
        settings: of the process.
        frugal: the most frugal schedules known of the record's graphs; None: they were not searched for yet.

    Raises:
        InfeasibleBudget, NoPlanInTime: nothing fits.
    """
    before = record.ledger.get(HELD_SINCE, 0)
    total = before + shortage.excess_bytes
    generous = max(2 * total, total + (plan.budget_bytes >> LEAST_COVER_SHIFT))
    options = options_within_a_step(settings)
    starts: list[tuple[Schedule, ...]] = [tuple(g.schedule for g in plan.graphs)]

    def planned(held_bytes: int, left_bytes: int = 0) -> Replanned:
        more = with_more_outputs(with_more_held(record, held_bytes - left_bytes - before), left_bytes)
        base = planner.baseline(more, starts[0] if frugal is None else frugal)
        made = planner.plan_step(more, plan.budget_bytes, settings.algorithm, options, base, starts)
        return Replanned(with_plain_peak_of(plan, made), more, frugal)

    def found() -> Replanned:
        amounts = [(generous, 0), (total, 0), *[(total, left) for left in (shortage.left_bytes,) if left]]
        for amount in amounts[:-1]:
            with contextlib.suppress(InfeasibleBudget, NoPlanInTime):
                return planned(*amount)
        return planned(*amounts[-1])

    try:
        return found()
    except (InfeasibleBudget, NoPlanInTime):
        if frugal is not None:
            raise
        frugal = planner.baseline(record).frugal_schedules
        return found()


# Much more is held than in the recorded step.
_ALIVE = (
    "; or free it before: a skipped step, or an evaluation with gradients, keeps its graph until its loss is deleted"
)


def refused_step(
    plan: Plan, shortage: Shortage, failure: InfeasibleBudget | NoPlanInTime, device: torch.device
) -> BudgetExceeded:
    """Why a step before which more is held cannot run: the bytes by kind, and the budget that would do."""
    held, planned = format_bytes(shortage.held_bytes), format_bytes(shortage.need.held_bytes)
    now = holdings.holdings(device, shortage.held_bytes)
    smallest = failure.smallest_bytes if isinstance(failure, InfeasibleBudget) else 0
    refused = BudgetExceeded(
        f"{held} are held before a forward, {planned} were planned, and no schedule fits beside them"
        f" within {format_bytes(plan.budget_bytes)}\n{holdings.table(now, plan.ledger, shortage.need.held_bytes)}",
        (f"fits: --budget {format_budget(smallest)}" if smallest else "give a larger --budget")
        + (_ALIVE if shortage.excess_bytes > shortage.need.held_bytes >> 2 else ""),
        smallest_bytes=smallest,
    )
    return as_out_of_memory(refused, device.type)


def refused_shape(joint: JointGraph, step: StepRecord, plan: Plan, refused: InfeasibleBudget) -> InfeasibleBudget:
    """Why a graph at shapes that the plan does not have cannot run."""
    beside = plan.budget_bytes - allocated_limit(plan)
    smallest = refused.smallest_bytes + beside
    plain = plain_peak(step) + beside
    held = step.base_bytes + last_gradients_bytes(step)
    return InfeasibleBudget(
        f"{joint.graph.name} with inputs of {adaptation.input_shapes(joint)} needs"
        f" {format_bytes(smallest, exact=True)} at least: {format_bytes(held)} are held before it;"
        f" the budget is {format_bytes(plan.budget_bytes)}",
        f"fits: --budget {format_budget(smallest)} (the plain step takes {format_bytes(plain)}), or smaller batches",
        budget_bytes=plan.budget_bytes,
        smallest_bytes=smallest,
        plain_bytes=plain,
        operator=refused.operator,
    )
