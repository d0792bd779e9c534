"""The largest batch of ResNet-50 on cards of several sizes: plain, and within 10% and 20% more compute.

    python recipes/batch_table.py --out recipes/results/batch_table.json

Nothing is allocated and nothing runs: the step is captured on fake tensors at two batches, and a roofline gives its
seconds. Bytes and seconds grow linearly with the batch, so that the step at any other batch follows from the two, as in
``monetrun batch``. A few budgets are planned at the larger one; a batch fits a card where the replay of one of these
schedules at that batch is within the card's memory and the overhead. More may be possible: a plan is not made for each
batch.

A step here is parameters, buffers, gradients, momentum, the batch, and all that the graph allocates. On a card, a
context, libraries and the allocator's rounding come on top, and cuDNN's workspaces, which a cost model does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
import torchvision
from rich.console import Console
from rich.table import Table

from lib import offline
from monetrun.capture import roofline
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime, ScheduleError
from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.options import Options, parse_kinds
from monetrun.core.plan import StepSchedules
from monetrun.core.step import OUTSIDE, SCRIPT, Event, StepRecord, StepTimeline, replay
from monetrun.planning import planner
from monetrun.planning.rescale import check_alike, rescaled

BATCHES = (64, 128)
SHARES = (0.7, 0.6, 0.5, 0.45, 0.4, 0.36, 0.33, 0.3, 0.28, 0.26, 0.24, 0.22, 0.2)  # of the plain peak


def step(batch: int, cost_model: str) -> StepRecord:
    """A training step of ResNet-50 on 224x224 images with SGD with momentum, in fp32."""
    with offline.fake_tensors():
        model = torchvision.models.resnet50()
        images, targets = torch.empty(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64)
        parameter_bytes = sum(p.nbytes for p in model.parameters())
        buffer_bytes = sum(b.nbytes for b in model.buffers())
        batch_bytes = images.nbytes + targets.nbytes
        joint = offline.capture(model, (images,), loss=lambda logits: F.cross_entropy(logits, targets))
    return StepRecord(
        graphs=(joint.graph,),
        costs=(offline.costs(joint, cost_model),),
        events=(Event(FORWARD, 0), Event(BACKWARD, 0), Event(OUTSIDE, -1, -parameter_bytes, 0, "SGD.step")),
        base_bytes=2 * parameter_bytes + buffer_bytes + batch_bytes,
        ledger={
            "parameters": parameter_bytes,
            "gradients": parameter_bytes,
            "optimizer state": parameter_bytes,
            SCRIPT: buffer_bytes + batch_bytes,
        },
        device=cost_model,
        torch_version=torch.__version__,
    )


def schedules(record: StepRecord, algorithm: str, options: Options) -> list[StepSchedules]:
    """The schedules of plans for a range of budgets, and the plain step without copies that it does not need."""
    base = planner.baseline(record)
    found = [StepSchedules.of(record.graphs, known) for known in (base.plain_schedules, base.frugal_schedules)]
    for share in SHARES:
        try:
            plan = planner.plan_step(record, int(share * base.plain.peak_bytes), algorithm, options, base)
        except (InfeasibleBudget, NoPlanInTime):
            break
        click.echo(f"{share:.2f} of the plain peak: {plan.overhead:+.1%} (bound {plan.bound:.1%})", err=True)
        found.append(StepSchedules(plan.graphs))
    return found


def replays(record: StepRecord, known: Sequence[StepSchedules]) -> list[StepTimeline]:
    """The step under each of these schedules that is valid at its batch."""
    found = []
    for one in known:
        try:
            found.append(replay(record, one.schedules_for(record.graphs)))
        except ScheduleError:
            continue
    return found


def largest(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, if all smaller ones do; 0 where none does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Steps:
    """The step at any batch, plain and under the schedules that are known."""

    def __init__(self, samples: Mapping[int, StepRecord], known: Sequence[StepSchedules]) -> None:
        self.samples, self.known = samples, known
        self.made: dict[int, tuple[StepTimeline, list[StepTimeline]]] = {}

    def at(self, batch: int) -> tuple[StepTimeline, list[StepTimeline]]:
        """The plain step, and the others."""
        if batch not in self.made:
            record = rescaled(self.samples, batch)
            plain = planner.baseline(record, self.known[1].schedules_for(record.graphs)).plain
            self.made[batch] = plain, replays(record, self.known)
        return self.made[batch]

    def best(self, batch: int, budget_bytes: int, overhead: float) -> StepTimeline | None:
        """The fastest step within both limits, if there is one."""
        plain, others = self.at(batch)
        fitting = [one for one in others if one.peak_bytes <= budget_bytes]
        best = min(fitting, key=lambda one: one.seconds, default=None)
        return best if best is not None and best.seconds <= (1 + overhead) * plain.seconds else None

    def row(self, gib: float, overheads: Sequence[float]) -> dict[str, Any]:
        """The largest batches on a card."""
        budget_bytes = int(gib * 2**30)
        plain_batch = largest(lambda batch: self.at(batch)[0].peak_bytes <= budget_bytes)
        within = {}
        for overhead in overheads:
            batch = largest(lambda batch, most=overhead: self.best(batch, budget_bytes, most) is not None)
            plain, best = self.at(batch)[0], self.best(batch, budget_bytes, overhead)
            within[f"{overhead:.0%}"] = {
                "batch": batch,
                "ratio": round(batch / plain_batch, 3),
                "overhead": round(best.seconds / plain.seconds - 1, 4) if best else None,
                "peak_bytes": best.peak_bytes if best else None,
                "plain_peak_bytes": plain.peak_bytes,
            }
        return {"gib": gib, "plain": plain_batch, "within": within}


@click.command()
@click.option("--cards", default="8,16,24,40,80,141", show_default=True, help="GiB, by comma.")
@click.option("--overheads", default="10,20", show_default=True, help="% of the plain step's seconds, by comma.")
@click.option("--cost-model", default="roofline:h100", show_default=True, type=click.Choice(roofline.names()[1:]))
@click.option("--implementations", default="all", show_default=True, help="Kinds that may be used.")
@click.option("--seconds", default=10.0, show_default=True, help="Time limit for a plan.")
@click.option("--algorithm", default="hierarchical", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON of all rows.")
def main(
    cards: str, overheads: str, cost_model: str, implementations: str, seconds: float, algorithm: str, out: Path | None
) -> None:
    """Find the largest batches, and print them."""
    samples = {batch: step(batch, cost_model) for batch in BATCHES}
    check_alike(samples)
    options = Options(seconds, implementations=parse_kinds(implementations))
    steps = Steps(samples, schedules(samples[max(BATCHES)], algorithm, options))
    shares = [float(share) / 100 for share in overheads.split(",")]
    rows = [steps.row(float(gib), shares) for gib in cards.split(",")]
    table = Table(
        title=f"ResNet-50, 224x224, fp32: the largest batch ({cost_model}, implementations {implementations})"
    )
    for heading in ("card", "plain", *(f"within {share}" for share in rows[0]["within"])):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = (f"{one['batch']} ({one['ratio']:.2f}x)" for one in row["within"].values())
        table.add_row(f"{row['gib']:g} GiB", str(row["plain"]), *cells)
    Console(width=100).print(table)
    if out is not None:
        found = {"network": "resnet50", "cost_model": cost_model, "algorithm": algorithm, "seconds": seconds}
        found |= {"implementations": implementations, "torch": torch.__version__, "rows": rows}
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
