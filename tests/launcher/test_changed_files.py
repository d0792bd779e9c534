"""Plans and cache files that were damaged or edited: refused or missed, or what they hold is sound and trains the same.

Each file is changed at random (``support.mutations``); the header of a changed cache file is written anew, so that its
checksum holds. What is read must be a miss with a warning, a ``PlanMismatch``, or a plan whose schedules ``simulate``
accepts for the captured graph; those are run, and give the plain step's outputs and gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from monetrun.capture import cost, cpu_allocator, execute
from monetrun.capture.cost import OperatorCost
from monetrun.capture.joint import JointGraph
from monetrun.core import codec
from monetrun.core.budget import parse
from monetrun.core.errors import InfeasibleBudget, MonetrunError, PlanMismatch, ScheduleError
from monetrun.core.graph import BACKWARD, FORWARD, Graph
from monetrun.core.options import Options
from monetrun.core.plain import PlainPeaks
from monetrun.core.plan import GraphPlan, Plan, Schedule, Step, StepSchedules, plain_schedule
from monetrun.core.simulate import judge, simulate
from monetrun.core.step import OUTSIDE, Event, StepRecord
from monetrun.launcher.kept import kept_plan, kept_record, kept_schedules
from monetrun.launcher.plan_file import read_plan
from monetrun.machine.entry_file import header
from monetrun.machine.store import Store
from monetrun.planning import planner
from monetrun.planning.intervals import Interval, MeasuredStep, RankIntervals
from monetrun.runtime.engine import Engine
from monetrun.runtime.reporter import Reporter
from monetrun.runtime.settings import Settings
from monetrun.solve import timing
from support.captured import captured, computed
from support.kernel_cases import DEVICE
from support.mutations import mutated

SEED = 20
BUDGET = parse("0.9x")


class Net(nn.Module):
    """Convolution, batch norm, ReLU in place, dropout and a branch: other implementations, and what must not rerun."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.other, self.drop = nn.Conv2d(4, 4, 1), nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        y = self.drop(torch.sigmoid(self.other(y)) * y)
        return self.head(y.mean((2, 3)))


@dataclasses.dataclass
class Surroundings:
    """A captured graph, its step and plan, the store, and what ran so far."""

    joint: JointGraph
    known: dict[str, OperatorCost]
    record: StepRecord
    plan: Plan
    store: Store
    folder: Path
    values: Sequence[object] = ()
    expected: Sequence[object] = ()
    runs_left: int = 0
    plans_left: int = 0
    ran: set[Schedule] = dataclasses.field(default_factory=set)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    logger = logging.getLogger("monetrun")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # a warning for each miss
    torch.manual_seed(0)
    joint = captured(Net(), torch.randn(4, 3, 8, 8))
    known = {s: OperatorCost(1e-3 + 1e-5 * i, 64 * (i % 3)) for i, s in enumerate(sorted(joint.timed))}
    costs = cost.costs_of(joint, known, "cpu")
    outside = (Event(OUTSIDE, -1, 256, 512), Event(OUTSIDE, -1, -256, 0, "SGD.step"))
    events = (Event(FORWARD, 0), outside[0], Event(BACKWARD, 0), outside[1])
    record = StepRecord((joint.graph,), (costs,), events, 4096, {"parameters": 4096}, "cpu", torch.__version__)
    with timing.override(frugal_seconds=0.05, patience=1.0):
        base = planner.baseline(record)
        plan = planner.plan_step(record, int(0.9 * base.plain.peak_bytes), "greedy", Options(seconds=0.5), base)
        folder = tmp_path_factory.mktemp("changed")
        made = Surroundings(joint, known, record, plan, Store(folder / "cache"), folder)
        environment = computed(joint, torch.float32)
        placeholders = joint.module.graph.find_nodes(op="placeholder")
        made.values = [environment[node] for node in placeholders]
        made.expected = results_of(made, plain_schedule(joint.graph))
        yield made
    logger.setLevel(level)


def results_of(near: Surroundings, schedule: Schedule) -> list[object]:
    """Outputs, gradients, and the inputs that the step changes (running statistics), under ``schedule``."""
    joint = near.joint
    forward, backward = execute.build(joint, schedule)
    values = [v.clone() if isinstance(v, torch.Tensor) else v for v in near.values]
    primals, tangents = values[: len(joint.primals)], values[len(joint.primals) :]
    torch.manual_seed(1)
    with torch.no_grad():
        found = execute.boxed(forward)(list(primals))
        outputs, saved = found[: len(joint.outputs)], found[len(joint.outputs) :]
        gradients = execute.boxed(backward)([*saved, *tangents])
    return [*outputs, *gradients, *primals]


def check_sound(near: Surroundings, schedule: Schedule) -> None:
    """``simulate`` accepts the schedule, and, if it is among the first, it computes what the plain one does."""
    graph = near.joint.graph
    simulate(graph, near.record.costs[0], schedule)
    if schedule in near.ran or not near.runs_left:
        return
    near.ran.add(schedule)
    near.runs_left -= 1
    steps = (*schedule.forward, *schedule.backward)
    exact = all(graph.operators[s.operator].implementations[s.implementation].exact for s in steps)
    for found, expected in zip(results_of(near, schedule), near.expected, strict=True):
        if isinstance(expected, torch.Tensor):
            same = torch.equal(found, expected) if exact else torch.allclose(found, expected, 1e-4, 1e-5)
            assert same, schedule


def chosen(near: Surroundings, plan: Plan, given: bool) -> Schedule | None:
    """The schedule that a worker runs for the captured graph; None where it refuses a given plan, or nothing fits."""
    settings = Settings(plan_given=given, solver_seconds=0.05, quiet=True)
    try:
        engine = Engine(settings, torch.device(DEVICE), list, Reporter(settings), plan)
    except PlanMismatch:
        return None
    engine.known.update(near.known)
    try:
        return engine.choose(near.joint)[1]
    except InfeasibleBudget:
        return None
    except PlanMismatch:
        if not given:
            raise
        return None
    finally:
        engine.close()


# ---- one changed file of each sort


def plan_file(near: Surroundings, change: Callable[[str], bytes]) -> str:
    path = near.folder / "p.json"
    path.write_bytes(change(codec.dumps(near.plan)))
    try:
        plan = read_plan(str(path))
    except PlanMismatch:
        return "refused"
    schedule = chosen(near, plan, given=True)
    if schedule is None:
        return "refused by the worker"
    check_sound(near, schedule)
    return "run"


def written(near: Surroundings, kind: str, value: object, change: Callable[[str], bytes], type_name: str = "") -> None:
    """A changed entry under the key ``k``: a third of the files keeps the header of the value that was stored."""
    text = codec.dumps(value)
    body = change(text)
    name = type_name or type(value).__name__
    signed = text.encode() if len(body) % 3 == 0 else body
    path = near.store.path(kind, "k")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header(kind, "k", name, signed) + body + b"\n")


def cached_plan(near: Surroundings, change: Callable[[str], bytes]) -> str:
    written(near, "plan", near.plan, change)
    plan = kept_plan(near.store, "k", near.record, BUDGET, None)
    if plan is None:
        return "missed"
    assert (plan.budget_bytes, plan.planned_peak_bytes) == (near.plan.budget_bytes, near.plan.planned_peak_bytes)
    schedule = chosen(near, plan, given=False)
    assert schedule is not None
    check_sound(near, schedule)
    return "run"


def cached_schedules(near: Surroundings, change: Callable[[str], bytes]) -> str:
    written(near, "plan", StepSchedules.of([near.joint.graph], [near.plan.graphs[0].schedule]), change)
    found = kept_schedules(near.store, "k", [near.joint.graph])
    if found is None:
        return "missed"
    check_sound(near, found[0])
    return "run"


def cached_record(near: Surroundings, change: Callable[[str], bytes]) -> str:
    written(near, "probe", near.record, change)
    record = kept_record(near.store, "k")
    if record is None:
        return "missed"
    if near.plans_left:
        near.plans_left -= 1
        try:
            base = planner.baseline(record)
            plan = planner.plan_step(record, near.plan.budget_bytes, "greedy", Options(seconds=0.05), base)
        except MonetrunError:
            return "not planned"
        schedule = chosen(near, codec.loads(Plan, codec.dumps(plan)), given=False)
        if schedule is not None:
            check_sound(near, schedule)
    return "read"


def cached_measurements(near: Surroundings, change: Callable[[str], bytes]) -> str:
    step = MeasuredStep((RankIntervals(0, (Interval(FORWARD, "net", 1, 2, 3, 4),)),))
    for kind, value in (("measured", step), ("plain", PlainPeaks(5, 6, 0, 2))):
        written(near, kind, value, change)
        near.store.get(kind, "k", type(value))
    written(near, "costs", dict(list(near.known.items())[:2]), change, "mapping")
    found = near.store.get_mapping("costs", "k", OperatorCost)
    assert all(0 <= c.seconds < 1e9 and c.workspace_bytes >= 0 for c in found.values())
    return "read" if found else "missed"


SORTS = (plan_file, plan_file, cached_plan, cached_plan, cached_schedules, cached_record, cached_measurements)


def change_many(near: Surroundings, seed: int, count: int) -> None:
    near.counts.clear()
    near.ran.clear()
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        sort = SORTS[number % len(SORTS)]
        started = time.process_time()
        try:
            near.count(f"{sort.__name__}: {sort(near, partial(mutated, chance=chance))}")
            assert time.process_time() - started < 20.0, "it takes too long"
        except Exception as error:
            raise AssertionError(f"{sort.__name__}, seed {seed}, number {number}: {error!r}") from error


def engine_with(near: Surroundings, schedule: Schedule, given: bool, **changes: object) -> Engine:
    graph_plan = dataclasses.replace(GraphPlan.of(near.joint.graph, schedule), **changes)
    budget_bytes = near.plan.budget_bytes if given else 4 << 30
    plan = dataclasses.replace(near.plan, graphs=(graph_plan,), budget_bytes=budget_bytes)
    settings = Settings(plan_given=given, solver_seconds=0.05)
    engine = Engine(settings, torch.device(DEVICE), list, Reporter(settings), plan)
    engine.known.update(near.known)
    return engine


DOUBLED, READ_AGAIN = "runs after operator", "is read again by step"


def unsound_schedules(near: Surroundings) -> dict[str, Schedule]:
    """A forward with every step doubled, and one whose batch norm's input, which is read later, is overwritten."""
    graph = near.joint.graph
    plain = plain_schedule(graph)
    found = {DOUBLED: Schedule(tuple(s for s in plain.forward for _ in (0, 1)), plain.backward)}
    for place, step in enumerate(plain.forward):
        for k, implementation in enumerate(graph.operators[step.operator].implementations):
            steps = (*plain.forward[:place], Step(step.operator, k), *plain.forward[place + 1 :])
            schedule = Schedule(steps, plain.backward)
            if implementation.in_place_of is not None and READ_AGAIN in reason_against(graph, schedule):
                found[READ_AGAIN] = schedule
    return found


def reason_against(graph: Graph, schedule: Schedule) -> str:
    try:
        judge(graph, schedule)
    except ScheduleError as error:
        return error.message
    return ""


@pytest.mark.parametrize("rule", [DOUBLED, READ_AGAIN])
def test_a_given_plan_whose_schedule_breaks_a_rule_is_a_mismatch_and_a_cached_one_is_made_anew(
    surroundings, rule, caplog
):
    schedule = unsound_schedules(surroundings)[rule]
    with contextlib.closing(engine_with(surroundings, schedule, given=True)) as engine:
        with pytest.raises(PlanMismatch, match=f"the plan's schedule of case cannot run: step .*{rule}") as refused:
            engine.choose(surroundings.joint)
        assert "monetrun plan" in refused.value.hint
    logging.getLogger("monetrun").setLevel(logging.WARNING)
    with contextlib.closing(engine_with(surroundings, schedule, given=False)) as engine:
        _, other = engine.choose(surroundings.joint)
    logging.getLogger("monetrun").setLevel(logging.CRITICAL)
    (warning,) = [r.getMessage() for r in caplog.records if "cannot run" in r.getMessage()]
    assert warning.endswith("another one is made now")
    surroundings.runs_left = 1
    check_sound(surroundings, other)


def test_a_foreign_plans_budget_is_not_kept_before_it_is_refused(surroundings):
    plain = plain_schedule(surroundings.joint.graph)
    too_much = 4 * surroundings.plan.budget_bytes
    foreign = {"fingerprint": "f" * 32, "structural_fingerprint": "s" * 32}
    with contextlib.closing(engine_with(surroundings, plain, given=True, **foreign)) as engine:
        torch.empty(too_much, dtype=torch.uint8)
        with pytest.raises(PlanMismatch, match=r"a graph of \d+ operators that the plan does not have"):
            engine.choose(surroundings.joint)
        torch.empty(too_much, dtype=torch.uint8)
    with contextlib.closing(engine_with(surroundings, plain, given=True)) as engine:
        assert engine.choose(surroundings.joint)[1] == plain
        engine.optimizer_begins(again=False)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(too_much, dtype=torch.uint8)


def test_a_changed_plan_or_cache_file_is_refused_or_sound(surroundings):
    surroundings.runs_left, surroundings.plans_left = 12, 4
    change_many(surroundings, SEED, 1000)
    assert surroundings.counts["plan_file: run"] > 10
    assert surroundings.counts["plan_file: refused by the worker"] > 10
    assert surroundings.counts["cached_plan: run"] > 5


@pytest.mark.nightly
def test_ten_thousand_changed_files_are_refused_or_sound(surroundings):
    surroundings.runs_left, surroundings.plans_left = 1000, 200
    change_many(surroundings, SEED + 1, 10_000)
    assert len(surroundings.ran) > 50
