"""Compare torch's partitioner with monetrun's planner: the same joint graphs, costs and replay, recomputation only.

    python recipes/bench_partitioner.py --models resnet50,unet --seconds 4 --out recipes/results/partitioner.json

The problems are those of recipes/capture_instances.py, under roofline:p100. Torch's points are everything that its
``activation_memory_budget`` reaches, by their true peak (``lib.partitioner``). In torch's favour:

* Its own order of operators is replayed, in the forward and the backward pass.
* Its operators run in place wherever that is legal, as the plain step's do.
* A random operator that it would rerun, drawing other numbers, is taken to draw the same.

With both, an operator that only the backward pass reads may run there alone.

Each point is compared with the cheapest plan found within the same peak; below torch's least peak there are plans for
fixed shares. A share is (peak - gradients) / (plain peak - gradients).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

import capture_instances
from lib import offline
from lib.partitioner import Partition, partition
from monetrun.capture.joint import JointGraph
from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options, parse_kinds
from monetrun.core.plan import Schedule, Solution, plain_schedule
from monetrun.core.simulate import Timeline, simulate
from monetrun.solve import hierarchical, tidy
from monetrun.solve.incumbent import Incumbent

SETTINGS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
SHARES = (0.65, 0.5, 0.4, 0.33)  # planned where they are below torch's least peak
AT_MOST = 0.7  # the wanted share of torch's overhead, at the same peak


def replayed(graph: Graph, costs: Costs, schedule: Schedule, options: Options) -> Timeline:
    """Replay a schedule, in place wherever ``options`` and the replay allow it."""
    return simulate(graph, costs, tidy.in_place_where_legal(graph, costs, schedule, options))


@dataclass(frozen=True, slots=True)
class Row:
    """One peak of one model; shares and overheads as fractions, None where there is none.

    Attributes:
        model: name of the problem.
        kinds: implementations that both may use beside the default.
        settings: torch's settings with this peak, ``("flops 0.9", ...)``; none below torch's least peak.
        share: of the plain step's peak less the gradients.
        peak_bytes: torch's, or that of the share; our plan's is no higher.
        torch_overhead: over the plain step.
        again: how many operators torch reruns.
        overhead: our plan's.
        bound: no schedule within the peak has a lower overhead.
        seconds: of planning (0 where a plan for a lower peak is no worse than torch's).
        status: the planner's.
    """

    model: str
    kinds: str
    settings: tuple[str, ...]
    share: float
    peak_bytes: int
    torch_overhead: float | None
    again: int
    overhead: float | None
    bound: float
    seconds: float
    status: str

    @property
    def ratio(self) -> float | None:
        """Our overhead over torch's."""
        if not self.torch_overhead or self.overhead is None:
            return None
        return self.overhead / self.torch_overhead

    @property
    def verdict(self) -> str:
        """Against ``AT_MOST``: ok, worse, or out of reach (by the bound); without torch, whether there is a plan."""
        if self.torch_overhead is not None:
            return verdict(self.overhead, self.torch_overhead, self.bound)
        if self.overhead is not None:
            return "plan"
        return "no schedule" if self.status == "infeasible" else "none found"


def verdict(overhead: float | None, torch_overhead: float, bound: float) -> str:
    """Whether an overhead is at most ``AT_MOST`` of torch's; if not, whether any could be, by the bound."""
    most = AT_MOST * torch_overhead
    if overhead is not None and overhead <= most:
        return "ok"
    return "out of reach" if bound > most else "worse"


@dataclass(frozen=True, slots=True)
class Plan:
    """What the planner found for a budget; overheads as fractions, None without a schedule."""

    budget_bytes: int
    peak_bytes: int
    overhead: float | None
    bound: float
    seconds: float
    status: str


@dataclass(frozen=True)
class Point:
    """One result of torch's partitioner, for one or several of its settings."""

    settings: tuple[str, ...]
    peak_bytes: int
    overhead: float
    partition: Partition


class Bench:
    """One model with its costs, under one choice of implementations."""

    def __init__(self, joint: JointGraph, costs: Costs, kinds: str, options: Options) -> None:
        self.joint, self.costs, self.kinds = joint, costs, kinds
        self.options = dataclasses.replace(options, implementations=parse_kinds(kinds))
        self.plain = replayed(joint.graph, costs, plain_schedule(joint.graph), self.options)
        self.gradient_bytes = sum(t.nbytes for t in joint.graph.tensors if t.kept)

    def share(self, peak_bytes: int) -> float:
        """The share of a peak, without the gradients."""
        return (peak_bytes - self.gradient_bytes) / (self.plain.peak_bytes - self.gradient_bytes)

    def overhead(self, timeline: Timeline) -> float:
        """Over the plain step."""
        return timeline.seconds / self.plain.seconds - 1

    def points(self, partitions: dict[str, Partition]) -> list[Point]:
        """Torch's results, from the highest peak down."""
        found: dict[tuple[int, float], list[str]] = {}
        for setting, made in partitions.items():
            timeline = replayed(made.graph, made.costs, made.schedule, self.options)
            found.setdefault((timeline.peak_bytes, self.overhead(timeline)), []).append(setting)
        return [
            Point(tuple(settings), peak_bytes, overhead, partitions[settings[0]])
            for (peak_bytes, overhead), settings in sorted(found.items(), reverse=True)
        ]

    def plan(self, budget_bytes: int, torch_overhead: float | None = None, settle_seconds: float = 0.0) -> Plan:
        """Plan, for ``settle_seconds`` more where plan and bound leave the verdict open."""
        start = time.perf_counter()
        solution = hierarchical.solve(self.joint.graph, self.costs, budget_bytes, self.options)
        plan = self._plan(budget_bytes, solution, time.perf_counter() - start)
        if torch_overhead is None or settle_seconds <= 0 or _settled(plan, torch_overhead):
            return plan
        longer = dataclasses.replace(self.options, seconds=settle_seconds, gap=0.0)
        search = Incumbent(self.joint.graph, self.costs, budget_bytes, longer)
        search.raise_bound(solution.bound_seconds)
        solution = hierarchical.run(search, () if solution.schedule is None else (solution.schedule,))
        return self._plan(budget_bytes, solution, time.perf_counter() - start)

    def _plan(self, budget_bytes: int, solution: Solution, seconds: float) -> Plan:
        bound = max(0.0, solution.bound_seconds / self.plain.seconds - 1)
        if solution.schedule is None:
            return Plan(budget_bytes, budget_bytes, None, bound, seconds, solution.status)
        timeline = simulate(self.joint.graph, self.costs, solution.schedule)
        if timeline.peak_bytes > budget_bytes:
            raise AssertionError(f"{self.joint.graph.name}: {timeline.peak_bytes} bytes planned, over {budget_bytes}")
        return Plan(budget_bytes, timeline.peak_bytes, self.overhead(timeline), bound, seconds, solution.status)

    def rows(
        self, partitions: dict[str, Partition], shares: Sequence[float], settle_seconds: float = 0.0
    ) -> Iterator[Row]:
        """Torch's points, then the shares below its least peak."""
        points = self.points(partitions)
        plans = [Plan(self.plain.peak_bytes, self.plain.peak_bytes, 0.0, 0.0, 0.0, "optimal")]
        plans += [
            self.plan(p.peak_bytes, p.overhead, settle_seconds)
            for p in points
            if p.overhead > 0 and not _dominated(p, points)
        ]
        for p in points:  # torch's dominated points: only where the plan for the dominating one is not enough
            if self._row(p.settings, p.peak_bytes, p, plans).verdict == "worse":
                plans.append(self.plan(p.peak_bytes, p.overhead, settle_seconds))
        for p in points:
            yield self._row(p.settings, p.peak_bytes, p, plans)
        least = min((p.peak_bytes for p in points), default=self.plain.peak_bytes)
        for share in shares:
            budget_bytes = self.gradient_bytes + int(share * (self.plain.peak_bytes - self.gradient_bytes))
            if budget_bytes < least:
                yield self._row((), budget_bytes, None, [self.plan(budget_bytes)])

    def _row(self, settings: tuple[str, ...], peak_bytes: int, point: Point | None, plans: list[Plan]) -> Row:
        """The cheapest plan within the peak, and the best bound that is valid there."""
        fitting = [p for p in plans if p.peak_bytes <= peak_bytes]
        best = min(fitting, key=lambda p: float("inf") if p.overhead is None else p.overhead)
        return Row(
            model=self.joint.graph.name,
            kinds=self.kinds,
            settings=settings,
            share=self.share(peak_bytes),
            peak_bytes=peak_bytes,
            torch_overhead=None if point is None else point.overhead,
            again=0 if point is None else point.partition.again,
            overhead=best.overhead,
            bound=max((p.bound for p in plans if p.budget_bytes >= peak_bytes), default=0.0),
            seconds=sum(p.seconds for p in plans if p.budget_bytes == peak_bytes),
            status=best.status,
        )


def _settled(plan: Plan, torch_overhead: float) -> bool:
    if plan.overhead is None or plan.overhead > torch_overhead:
        return False
    return verdict(plan.overhead, torch_overhead, plan.bound) != "worse"


def _dominated(point: Point, points: list[Point]) -> bool:
    """Whether another point has no higher peak and overhead: a plan for that one is enough."""
    return any(p is not point and p.peak_bytes <= point.peak_bytes and p.overhead <= point.overhead for p in points)


def bench(
    model: str,
    kinds: Sequence[str],
    settings: Sequence[float],
    estimators: Sequence[str],
    shares: Sequence[float],
    options: Options,
    settle_seconds: float,
) -> list[Row]:
    """All rows of one model."""
    joint = capture_instances.capture(model)
    costs = offline.costs(joint, "roofline:p100")
    partitions = {
        f"{estimator} {setting:g}": partition(joint, costs, setting, estimator)
        for estimator, setting in itertools.product(estimators, settings)
    }
    return [row for k in kinds for row in Bench(joint, costs, k, options).rows(partitions, shares, settle_seconds)]


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(",") if word)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def summary(rows: list[Row]) -> str:
    """The verdict on one model under one choice of implementations."""
    beside = [r for r in rows if r.torch_overhead is not None]
    missed = [r for r in beside if r.verdict != "ok"]
    ratios = [r.ratio for r in beside if r.ratio is not None]
    lower = [r for r in rows if r.torch_overhead is None]
    reached = len(beside) - len(missed)
    text = f"{rows[0].model} ({rows[0].kinds}): at most {AT_MOST} of torch's at {reached} of {len(beside)} peaks"
    if ratios:
        text += f" (largest {max(ratios):.2f})"
    if lower:
        text += (
            f"; a plan at {sum(r.overhead is not None for r in lower)} of {len(lower)} shares that torch does not reach"
        )
    return text


@click.command()
@click.option("--models", default=",".join(capture_instances.PROBLEMS), help="By comma; all by default.")
@click.option("--seconds", default=4.0, show_default=True, help="Time limit for one plan.")
@click.option(
    "--settle", default=12.0, show_default=True, help="More seconds where a plan and its bound leave it open."
)
@click.option("--settings", default=",".join(map(str, SETTINGS)), show_default=True, help="Of torch's budget.")
@click.option("--estimators", default="flops", show_default=True, help="Torch's runtime estimators: flops, testing.")
@click.option("--shares", default=",".join(map(str, SHARES)), show_default=True, help="Planned where torch has none.")
@click.option("--kinds", "kinds", default=("in-place",), multiple=True, show_default=True, help="For both.")
@click.option("--solver", "mip_solver", default="highs", show_default=True, help="scip or highs.")
@click.option(
    "--out",
    default=None,
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON; other models' rows from a like run stay.",
)
def main(
    models: str,
    seconds: float,
    settle: float,
    settings: str,
    estimators: str,
    shares: str,
    kinds: tuple[str, ...],
    mip_solver: str,
    out: Path | None,
) -> None:
    """Print torch's points, and the overheads of plans within the same peaks."""
    options = Options(seconds=seconds, gap=0.001, mip_solver=mip_solver)
    table = Table(title=f"overheads under roofline:p100, {seconds:g} s a plan")
    for heading in ("model", "kinds", "torch's setting", "share", "torch %", "ours %", "bound %", "ratio", "s", ""):
        table.add_column(heading, justify="right" if heading in ("share", "ratio", "s") or "%" in heading else "left")
    rows: list[Row] = []
    for model in models.split(","):
        found = bench(model, kinds, _numbers(settings), estimators.split(","), _numbers(shares), options, settle)
        for k in kinds:
            click.echo(summary([r for r in found if r.kinds == k]), err=True)
        rows += found
        if out is not None:  # after each model, so that an interrupted run keeps its results
            _write(rows, seconds, settle, out)
    for r in rows:
        ratio = "-" if r.ratio is None else f"{r.ratio:.2f}"
        shown = map(_percent, (r.torch_overhead, r.overhead, r.bound))
        table.add_row(
            r.model, r.kinds, _span(r.settings), f"{r.share:.3f}", *shown, ratio, f"{r.seconds:.0f}", r.verdict
        )
    Console(width=130).print(table)
    beside = [r.verdict for r in rows if r.torch_overhead is not None]
    click.echo(", ".join(f"{beside.count(v)} {v}" for v in ("ok", "worse", "out of reach")) + f" of {len(beside)}")


def _write(rows: list[Row], seconds: float, settle: float, out: Path) -> None:
    made_by = {
        "cost_model": "roofline:p100",
        "torch": torch.__version__,
        "algorithm": "hierarchical",
        "seconds": seconds,
        "settle_seconds": settle,
        "at_most": AT_MOST,
    }
    before = json.loads(out.read_text()) if out.exists() else {}
    done = {(r.model, r.kinds) for r in rows}
    stay = [r for r in before.pop("rows", []) if before == made_by and (r["model"], r["kinds"]) not in done]
    found = [
        {**asdict(r), "bound": None if r.bound == float("inf") else r.bound, "ratio": r.ratio, "verdict": r.verdict}
        for r in rows
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**made_by, "rows": stay + found}, indent=1) + "\n")


def _span(settings: tuple[str, ...]) -> str:
    return "-" if not settings else settings[0] if len(settings) == 1 else f"{settings[0]} .. {settings[-1]}"


if __name__ == "__main__":
    main()
