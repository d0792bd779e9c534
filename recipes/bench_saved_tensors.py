"""``monetrun.SavedTensors`` beside the solvers of torch's partitioner: true peaks, and what runs twice.

    python recipes/bench_saved_tensors.py --out recipes/results/saved_tensors.json

Each choice is compiled by ``aot_eager``, whose kernels are eager's, or by inductor, and its step's peak is counted by
the allocator. Seconds are those of a cost model, in monetrun's plans as well, so that noise decides nothing. The model
knows no workspaces, so that true peaks are above monetrun's settings by those; with measured costs they are planned.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch._functorch import config, partitioners

import monetrun
from lib.networks import GPT, SmallResNet, images, tokens
from monetrun.capture import cost, cpu_allocator, roofline
from monetrun.capture.joint import capture

COST_MODEL = "roofline:p100"
TORCH_BUDGETS = (0.8, 0.6, 0.4, 0.2, 0.05)
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
ASK_THE_SOLVER = 0.001  # torch decides by itself where this is larger


@dataclass(frozen=True)
class Row:
    """One choice of saved tensors.

    Attributes:
        model: its name.
        backend: that compiled it.
        solver: of torch's partitioner; ``"min-cut"``: torch's default, without a budget.
        setting: torch's budget, or monetrun's.
        peak_bytes: of the forward and backward, by the allocator, above what is held before.
        twice: operators that run again in the backward.
        twice_share: their seconds over those of all operators.
        largest_difference: of any gradient from eager's.
    """

    model: str
    backend: str
    solver: str
    setting: str
    peak_bytes: int
    twice: int
    twice_share: float
    largest_difference: float


class Gpt(GPT):
    """A small GPT and its loss."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        return super().forward(batch)["loss"]


class ResNet(SmallResNet):
    """A small residual network and its loss."""

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        return F.cross_entropy(super().forward(batch[0]), batch[1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "gpt": (lambda: Gpt(layers=4, length=128, dropout=0.0), lambda: tokens(8, 128, 1)),
    "resnet": (lambda: ResNet(channels=32, blocks=4), lambda: images(8, 48)),
}


class Twice:
    """What a compiled step runs twice, seen as its joint graph is partitioned."""

    def __init__(self) -> None:
        self.count, self.share = 0, 0.0
        self._partition = partitioners.min_cut_rematerialization_partition

    def __call__(self, module: fx.GraphModule, inputs: Any, *args: Any, **options: Any) -> Any:
        """Partition as torch does; ``count`` and ``share`` are set."""
        static = options.get("static_lifetime_input_indices") or ()
        copied = fx.GraphModule(module, copy.deepcopy(module.graph))
        joint = capture(copied, options["num_fwd_outputs"], "model", static)
        costs = cost.modelled(joint, roofline.parse(COST_MODEL))
        modules = self._partition(module, inputs, *args, **options)
        forward, backward = ({n.name for n in made.graph.nodes if n.op == "call_function"} for made in modules)
        seconds = [row[0] for row in costs.seconds]
        twice = [op.id for op in joint.graph.operators if joint.nodes[op.id].name in forward & backward]
        self.count, self.share = len(twice), sum(seconds[i] for i in twice) / sum(seconds)
        return modules


def measured(model: str, backend: str, solver: str, setting: str, choice: dict[str, Any]) -> Row:
    """Compile, run and meter one choice."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, given = MODELS[model]
    net, batch = made(), given()
    net(batch).backward()
    eager = [p.grad for p in net.parameters()]
    twice = Twice()
    partition = f"{_PARTITIONS[backend]}.min_cut_rematerialization_partition"
    with config.patch(**choice), mock.patch(partition, twice):
        step = torch.compile(net, backend=backend, dynamic=False)
        net.zero_grad()
        step(batch).backward()
    difference = max(float((a - p.grad).abs().max()) for a, p in zip(eager, net.parameters(), strict=True))
    peaks = []
    for _ in range(3):
        net.zero_grad()
        before = cpu_allocator.allocated_bytes()
        cpu_allocator.reset_peak()
        step(batch).backward()
        peaks.append(cpu_allocator.peak_bytes() - before)
    return Row(model, backend, solver, setting, max(peaks), twice.count, twice.share, difference)


# where a backend has torch's partitioner from
_PARTITIONS = {"aot_eager": "torch._dynamo.backends.debugging", "inductor": "torch._inductor.compile_fx"}


def choices(seconds: float) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Solver, setting, and torch's settings for them."""
    yield "min-cut", "1", {"activation_memory_budget": 1.0}
    for solver in ("dp", "greedy"):
        for b in TORCH_BUDGETS:
            yield solver, f"{b:g}", {"activation_memory_budget": b, "activation_memory_budget_solver": solver}
    for share in SHARES:
        ours = monetrun.SavedTensors(f"{share}x", seconds=seconds, cost_model=COST_MODEL)
        settings = {"activation_memory_budget": ASK_THE_SOLVER, "activation_memory_budget_solver": ours}
        yield "monetrun", f"{share}x", settings


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--backends", default="aot_eager", show_default=True, help="aot_eager, inductor.")
@click.option("--seconds", default=8.0, show_default=True, help="Of monetrun's planner, for a graph.")
@click.option("--out", default=None, type=click.Path(dir_okay=False, path_type=Path), help="JSON.")
def main(models: str, backends: str, seconds: float, out: Path | None) -> None:
    """Print true peaks and what runs twice."""
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    table = Table(title=f"what runs twice: seconds under {COST_MODEL}")
    for heading in ("model", "backend", "solver", "setting", "peak MiB", "twice", "of all s", "gradients"):
        table.add_column(heading)
    rows = []
    for model in models.split(","):
        for backend in backends.split(","):
            for choice in choices(seconds):
                rows.append(row := measured(model, backend, *choice))
                peak, share = f"{row.peak_bytes / 2**20:.2f}", f"{row.twice_share:.1%}"
                difference = f"{row.largest_difference:.1g}"
                words = (model, backend, row.solver, row.setting, peak, str(row.twice), share, difference)
                table.add_row(*words)
                click.echo(" ".join(words), err=True)
    Console(width=120).print(table)
    if out is not None:
        made_by = {"torch": torch.__version__, "cost_model": COST_MODEL, "seconds": seconds}
        out.write_text(json.dumps({**made_by, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
