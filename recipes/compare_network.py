"""Train one network by all methods, each beside eager in turns, and print a line of JSON for each: see compare.py.

python recipes/compare_network.py gpt --size small --budgets 0.5,0.1
"""

from __future__ import annotations

import fnmatch
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import torch

from lib.compared_networks import NETWORKS, SIZES, Network
from lib.comparison import (
    CHANNELS_LAST,
    EXACT,
    FAMILIES,
    FULL,
    IMPLEMENTATIONS,
    RECOMPUTATION,
    bytes_of,
    cheapest,
)
from lib.other_methods import (
    EAGER,
    EAGER_CHANNELS_LAST,
    INDUCTOR_BUDGET,
    Method,
    by_hand,
    by_inductor,
    by_partitioner,
    channels_last,
    no_inductor,
    same_as,
)
from monetrun.capture.meter import meter_for
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.options import Options
from monetrun.core.plan import Plan
from monetrun.ops import kernels
from monetrun.planning import planner
from monetrun.runtime.allocation_limit import set_limit
from step_pairs import (
    Recorded,
    Reference,
    Trainer,
    first_line,
    held_now,
    measured,
    paired,
    peak_of,
    refusal,
    release_cached,
    run_planned,
)

OPTIONS: dict[str, dict[str, Any]] = {
    RECOMPUTATION: {"implementations": ()},
    IMPLEMENTATIONS: {"recompute": False},
    FULL: {},  # before EXACT: where its plan is exact, it is that one's, too
    EXACT: {"implementations": ("exact",)},
}
THIRD = "a third of the activations"
SMALLEST = "smallest"
SAME_BYTES = 0.005  # budgets that are closer to each other than this share count as one
SLACKS = (0.0, 0.01, 0.03)  # over the smallest budget, tried in turn
SEED = 7  # of dropout in the compared step


@dataclass(frozen=True, slots=True)
class Target:
    """A peak that monetrun's plans must keep: that of ``of``, in bytes of one model; ``lowest`` of all methods."""

    of: str
    nbytes: int
    lowest: bool = False


class Compared:
    """A network's eager model, and what it computes in its first step."""

    def __init__(self, name: str, size: str, device: torch.device, rounds: int, stand_in: bool) -> None:
        self.network: Network = NETWORKS[name]
        self.size, self.device, self.rounds, self.stand_in = size, device, rounds, stand_in
        self.meter = meter_for(device)
        first = self.make()
        self.initial = [t.detach().clone() for t in first.model.state_dict().values()]
        first.step()  # from now on the libraries' own workspaces are there
        del first
        release_cached()
        self.plain = Reference(self.make, self.meter)
        self.answers = self.first_step(self.plain.trainer)

    def make(self) -> Trainer:
        """A new model with the same weights, and its trainer."""
        torch.manual_seed(0)
        model, loss = self.network.build(self.size, self.device)
        return Trainer(model.train(), loss, self.meter)

    def make_channels_last(self) -> Trainer:
        """The same in this memory format."""
        trainer = self.make()
        channels_last(trainer.model)
        return trainer

    def first_step(self, trainer: Trainer) -> dict[str, list[torch.Tensor]]:
        """Loss, gradients and buffers of a step from the initial weights."""
        with torch.no_grad():
            for tensor, value in zip(trainer.model.state_dict().values(), self.initial, strict=True):
                tensor.copy_(value)
        torch.manual_seed(SEED)
        trainer.optimizer.zero_grad()
        loss = trainer.loss()
        loss.backward()
        set_limit(self.device, None)  # a plan's, which has no room for what is kept here
        found = {
            "loss": [loss.detach().clone()],
            "gradients": [
                torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trainer.model.parameters()
            ],
            "buffers": [b.detach().clone() for b in trainer.model.buffers()],
        }
        del loss
        trainer.optimizer.step()
        return found

    def sameness(self, trainer: Trainer) -> dict[str, Any]:
        """Whether a step computes bitwise what eager's does, and how far its gradients are from it."""
        if self.stand_in:
            return {}
        found = self.first_step(trainer)
        bitwise = {k: all(torch.equal(a, b) for a, b in zip(v, found[k], strict=True)) for k, v in self.answers.items()}
        return {"bitwise": bitwise, "difference": _distance(self.answers["gradients"], found["gradients"])}

    def eager_row(self) -> dict[str, Any]:
        """Of the eager model; whether it is bitwise itself tells whether the others can be."""
        plain = self.plain
        return {
            "method": EAGER,
            "setting": "",
            "allocated_bytes": plain.peak.allocated,
            "reserved_bytes": plain.peak.reserved,
            "held_bytes": plain.held_bytes,
            "seconds": plain.seconds,
            "ratio": 1.0,
            **self.sameness(plain.trainer),
        }

    def other(self, method: Method) -> dict[str, Any]:
        """Train by another method."""
        started = time.perf_counter()
        row: dict[str, Any] = {"method": method.name, "setting": method.setting}
        with method.around():
            with self.plain.trainer.aside():
                before = held_now(self.meter)
                trainer = self.make()
                row |= method.change(trainer.model)
                if row.get("checkpoints") == 0:
                    return {**row, "reason": "the network is no chain of blocks"}
                try:
                    for _ in range(method.warm_up):
                        trainer.step()
                except Exception as error:
                    if earlier := same_as(error):
                        return {**row, "same_as": earlier}
                    raise
                peak = peak_of(trainer).less(before)
            row |= measured(self.plain, peak, paired(self.plain.trainer, trainer, self.rounds))
            row |= self.sameness(trainer)
        return {**row, "seconds_until_measured": time.perf_counter() - started}

    def others(self, methods: Sequence[Method]) -> Iterator[dict[str, Any]]:
        """A row for each method; one that fails says why."""
        for method in methods:
            try:
                row = self.other(method)
            except Exception as error:  # noqa: BLE001 - a method that cannot train this network is a result
                row = {"method": method.name, "setting": method.setting, "reason": first_line(error)}
            torch._dynamo.reset()
            release_cached()
            yield row


def _distance(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The 2-norm of all differences over that of all that is expected."""
    pairs = list(zip(expected, found, strict=True))
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return math.sqrt(apart / (sum(float(a.double().square().sum()) for a, _ in pairs) or 1.0))


# ---- monetrun


class Planned:
    """The network under monetrun's plans; ``make`` makes it, ``Compared.make`` unless given."""

    def __init__(
        self, compared: Compared, solver_seconds: float, algorithm: str, make: Callable[[], Trainer] | None = None
    ) -> None:
        self.compared, self.solver_seconds, self.algorithm = compared, solver_seconds, algorithm
        started = time.perf_counter()
        with compared.plain.trainer.aside():
            self.recorded = Recorded(make or compared.make)
        self.recorded_seconds = time.perf_counter() - started
        self.plans: dict[tuple[str, str], Plan] = {}

    def others_bytes(self) -> int:
        """What lies beside the model while its peak is measured."""
        with self.compared.plain.trainer.aside():
            return self.compared.plain.others().bounded

    def options(self, method: str) -> Options:
        """Of the planner."""
        return Options(seconds=self.solver_seconds, **OPTIONS.get(method, {}))

    def smallest(self, method: str) -> int:
        """The lowest peak known to be possible, in bytes of one model."""
        options, record = self.options(method), self.recorded.record
        base = self.recorded.baseline(options)
        if method == FULL:
            base = planner.more_frugal(record, base, options)
        lowest = planner.BudgetBelowSmallest(record, 0, base).smallest_bytes
        return lowest - self.others_bytes()

    def row(self, method: str, target: Target) -> dict[str, Any]:
        """Plan for the target and train."""
        compared, started = self.compared, time.perf_counter()
        row: dict[str, Any] = {"method": method, "setting": target.of, "target_bytes": target.nbytes}
        if method == EXACT and (full := self.plans.get((FULL, target.of))) and self.exact(full):
            return {**row, "same_as": FULL}
        others = self.others_bytes()
        try:
            plan = self.recorded.plan(target.nbytes + others, self.algorithm, self.options(method))
        except (InfeasibleBudget, NoPlanInTime) as error:
            return {**row, "reason": refusal(error, target.nbytes, others)}
        self.plans[method, target.of] = plan
        row["solver_seconds"] = time.perf_counter() - started
        try:
            row |= run_planned(compared.plain, self.recorded, plan, compared.rounds, compared.sameness)
        except Exception as error:  # noqa: BLE001 - a plan that cannot train is a result
            return {**row, "reason": first_line(error)}
        return row

    def exact(self, plan: Plan) -> bool:
        """Whether all implementations that the plan uses are bitwise identical to eager's."""
        for graph, planned in zip(self.recorded.record.graphs, plan.graphs, strict=True):
            schedule = planned.schedule_for(graph)
            for step in (*schedule.forward, *schedule.backward):
                if not graph.operators[step.operator].implementations[step.implementation].exact:
                    return False
        return True


def targets(plain: Reference, others: Sequence[dict[str, Any]]) -> list[Target]:
    """The peaks that monetrun must keep: eager's, those the other methods reach, and a third of the activations."""
    eager = Target(EAGER, plain.peak.bounded)
    found = [eager, Target(THIRD, plain.held_bytes + plain.activation_bytes // 3)]
    for family in FAMILIES:
        useful = [r for method in family for r in cheapest(others, method)]
        lowest = min((bytes_of(r) for r in useful), default=0)
        for row in useful:
            nbytes = bytes_of(row)
            if nbytes < eager.nbytes:
                name = " ".join(filter(None, (row["method"], row["setting"])))
                found.append(Target(f"as {name}", nbytes, nbytes == lowest))
    kept: list[Target] = []
    for target in sorted(found, key=lambda t: t.nbytes):
        if kept and target.nbytes - kept[-1].nbytes < SAME_BYTES * kept[-1].nbytes:
            kept[-1] = replace(kept[-1], of=f"{kept[-1].of}; {target.of}", lowest=kept[-1].lowest or target.lowest)
        else:
            kept.append(target)
    return kept


def planned_rows(planned: Planned, found: Sequence[Target], wanted: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """All of monetrun's rows, from the highest peak down; the ablations have few."""
    for method in filter(wanted, OPTIONS):
        for target in reversed(found):
            ablation = method == IMPLEMENTATIONS or (method == RECOMPUTATION and not target.lowest)
            if not ablation:
                yield planned.row(method, target)
        smallest = planned.smallest(method)
        row: dict[str, Any] = {}
        for slack in SLACKS:  # none is left for bytes that this process has come to hold since the step was recorded
            row = planned.row(method, Target(SMALLEST, int(smallest * (1 + slack))))
            if "reason" not in row:
                break
        yield row


def rows_beside_inductor(
    compared: Compared, inductors: Sequence[dict[str, Any]], settings: tuple[float, str], wanted: Callable[[str], bool]
) -> Iterator[dict[str, Any]]:
    """Our rows at the peaks of inductor's, of the network as it is and channels-last; ``settings``: Planned's.

    Where there are convolutions, inductor chooses that format for them; eager's step in it has a row, too.
    """
    eager_bytes = compared.plain.peak.bounded
    useful = cheapest(inductors, INDUCTOR_BUDGET)
    peaks = [Target(f"as {r['method']} {r['setting']}", min(bytes_of(r), eager_bytes)) for r in useful]
    if wanted(FULL) and peaks:
        planned = Planned(compared, *settings)
        yield from (planned.row(FULL, target) for target in peaks)
        del planned  # would lie beside the next
    modules = compared.plain.trainer.model.modules()
    if sum(isinstance(m, torch.nn.Conv2d) for m in modules) < 2:  # one makes the patches of a transformer
        return
    if wanted(EAGER_CHANNELS_LAST):
        yield from compared.others([Method(EAGER_CHANNELS_LAST, "", channels_last)])
    if wanted(CHANNELS_LAST) and peaks:
        planned = Planned(compared, *settings, compared.make_channels_last)
        yield from (planned.row(CHANNELS_LAST, target) for target in peaks)


@click.command(help=__doc__)
@click.argument("name", metavar="NETWORK", type=click.Choice(list(NETWORKS)))
@click.option("--size", type=click.Choice(SIZES), default=SIZES[0], show_default=True)
@click.option("--budgets", default="0.5,0.1", show_default=True, help="Of torch's activation_memory_budget.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Pairs of steps for a ratio.")
@click.option("--solver-seconds", type=float, default=2.0, show_default=True, help="For each of monetrun's plans.")
@click.option("--algorithm", default="hierarchical", show_default=True)
@click.option("--only", multiple=True, default=("*",), metavar="METHODS", help="Methods, as patterns.")
@click.option("--inductor", is_flag=True, help="Only what inductor compiles, and plans at its peaks.")
@click.option("--threads", type=int, default=0, help="Of torch; 0: its own choice.")
def main(
    name: str,
    size: str,
    budgets: str,
    rounds: int,
    solver_seconds: float,
    algorithm: str,
    only: Sequence[str],
    inductor: bool,
    threads: int,
) -> None:
    """Train NETWORK by all methods."""
    if threads:
        torch.set_num_threads(threads)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    missing = NETWORKS[name].missing or (no_inductor(device) if inductor else "")
    if missing:
        click.echo(json.dumps({"skipped": missing}))
        return

    def wanted(method: str) -> bool:
        return any(fnmatch.fnmatchcase(method, pattern) for pattern in only)

    kernels.load()
    stand_in = device.type == "cuda" and torch.cuda.get_device_name(device) == "Stand-in GPU"
    compared = Compared(name, size, device, 1 if stand_in else rounds, stand_in)
    if not compared.meter.exact:
        raise SystemExit("peaks cannot be counted here: the counting allocator needs a C++ compiler")
    numbers = [float(word) for word in budgets.split(",") if word]
    methods = by_inductor(numbers[-1:]) if inductor else [*by_hand(compared.network), *by_partitioner(numbers)]
    rows = [compared.eager_row()]
    _say(rows[0])
    for row in compared.others([m for m in methods if wanted(m.name)]):
        rows.append(row)
        _say(row)
    if inductor:
        for row in rows_beside_inductor(compared, rows, (solver_seconds, algorithm), wanted):
            _say(row)
        return
    if not any(map(wanted, OPTIONS)):
        return
    planned = Planned(compared, solver_seconds, algorithm)
    for row in planned_rows(planned, targets(compared.plain, rows), wanted):
        _say(row)


def _say(row: dict[str, Any]) -> None:
    click.echo(json.dumps({"row": row}))


if __name__ == "__main__":
    main()
