"""MONeT's table of memory and overhead (arXiv 2010.14501), planned for the same GPU with the cost model.

    python recipes/paper_table.py --seconds 120 --out recipes/results/paper_table.json

The networks and batch sizes are the paper's; the problems are recipes/instances/ (fp32, roofline:p100), with all their
implementations. The paper measured on a 16 GB P100 and gives memory in GB of 2**30 bytes: parameters, activations,
gradients and convolution workspaces. Here memory is parameters, buffers, and everything that the graph allocates
(activations, gradients, the loss), without workspaces, which a cost model does not know, and without optimizer state.
So the plain step is 1 to 8% smaller here. Each row is therefore planned twice:

* ratio: for the same share of the plain step's memory as in the paper; this is compared with the paper.
* absolute: for the paper's bytes.

The plain step is that of the paper's torch, where the backward of an in-place ReLU6 reads its output. Today eager
copies the input first, which raises MobileNet-V2's plain step from 13.7 to 19.8 GB.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from lib import instances
from lib.presets import PAPER
from monetrun.core.graph import Graph
from monetrun.core.options import Options, parse_kinds
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import ALGORITHMS, solver, tidy

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Row:
    """One budget of one network; overheads and bounds in % of the plain step, None where nothing was found."""

    network: str
    reading: str
    paper_gb: float
    paper_plain_gb: float
    paper_overhead: float
    plain_gb: float
    budget_gb: float
    planned_gb: float | None
    overhead: float | None
    bound: float | None
    gap: float | None
    status: str
    seconds: float

    @property
    def verdict(self) -> str:
        """Compared with the paper's overhead: ok (no worse), worse, or out of reach by the cost model's bound."""
        if self.overhead is not None and self.overhead <= self.paper_overhead + 0.005:
            return "ok"
        if self.status == "infeasible" or (self.bound is not None and self.bound > self.paper_overhead):
            return "out of reach"
        return "worse"


# how the paper's torch ran a ReLU6 in place: (implementation, whether in place of an operand)
PAPERS_RELU6 = {
    "aten.hardtanh.default": ("in-place", True),
    "aten.hardtanh_backward.default": ("output", False),
}


def papers_schedule(graph: Graph) -> Schedule:
    """The plain schedule with ReLU6 in place as the paper's torch ran it: no copy, and its backward from its output."""

    def step(plain: Step) -> Step:
        operator = graph.operators[plain.operator]
        wanted = PAPERS_RELU6.get(operator.target)
        found = (k for k, i in enumerate(operator.implementations) if (i.name, i.in_place_of is not None) == wanted)
        return Step(plain.operator, next(found, 0))

    plain = plain_schedule(graph)
    steps = Schedule(tuple(step(s) for s in plain.forward), tuple(step(s) for s in plain.backward))
    return tidy.without_dead_runs(graph, steps)


def plan(network: str, readings: list[str], algorithm: str, options: Options) -> list[Row]:
    """The paper's rows for one network."""
    path = HERE / "instances" / f"{network}.json"
    problem = instances.read(path)
    fixed = json.loads(path.read_text())["parameter_bytes"]
    graph, costs = problem.graph, problem.costs
    plain = simulate(graph, costs, papers_schedule(graph))
    plain_gb = (fixed + plain.peak_bytes) / 2**30
    paper_plain_gb, targets = PAPER[network]
    rows = []
    for paper_gb, paper_overhead in targets:
        for reading in readings:
            budget_gb = paper_gb if reading == "absolute" else paper_gb / paper_plain_gb * plain_gb
            start = time.perf_counter()
            solution = solver(algorithm)(graph, costs, int(budget_gb * 2**30) - fixed, options)
            seconds = time.perf_counter() - start
            overhead = planned_gb = gap = bound = None
            if math.isfinite(solution.bound_seconds):  # infinite where nothing is feasible
                bound = 100 * (solution.bound_seconds / plain.seconds - 1)
            if solution.schedule is not None:
                timeline = simulate(graph, costs, solution.schedule)
                planned_gb = (timeline.peak_bytes + fixed) / 2**30
                overhead = 100 * (timeline.seconds / plain.seconds - 1)
                gap = max(0.0, overhead - (bound or 0.0))
            rows.append(
                Row(
                    network,
                    reading,
                    paper_gb,
                    paper_plain_gb,
                    paper_overhead,
                    plain_gb,
                    budget_gb,
                    planned_gb,
                    overhead,
                    bound,
                    gap,
                    solution.status,
                    seconds,
                )
            )
    return rows


@click.command()
@click.option("--networks", default=",".join(PAPER), show_default=True)
@click.option("--readings", default="ratio,absolute", show_default=True)
@click.option("--algorithm", default="hierarchical", show_default=True, type=click.Choice(tuple(ALGORITHMS)))
@click.option("--seconds", default=20.0, show_default=True, help="Time limit for one row.")
@click.option("--implementations", default="all", show_default=True, help="Kinds that may be used.")
@click.option("--out", default=None, type=click.Path(dir_okay=False, path_type=Path), help="JSON of all rows.")
def main(networks: str, readings: str, algorithm: str, seconds: float, implementations: str, out: Path | None) -> None:
    """Plan the paper's rows, and print them beside the paper's."""
    options = Options(seconds=seconds, implementations=parse_kinds(implementations))
    rows = [row for network in networks.split(",") for row in plan(network, readings.split(","), algorithm, options)]
    table = Table(title=f"{algorithm}, {seconds:g} s per row, implementations: {implementations}")
    for heading in ("network", "budget", "paper GB", "of", "GB", "of", "paper %", "%", "bound %", "gap %", "s", ""):
        table.add_column(heading, justify="right" if "%" in heading or "GB" in heading or heading == "s" else "left")
    for r in rows:
        sizes = (r.paper_gb, r.paper_plain_gb, r.budget_gb, r.plain_gb, r.paper_overhead, r.overhead, r.bound, r.gap)
        shown = ["-" if value is None else f"{value:.2f}" for value in sizes]
        table.add_row(r.network, r.reading, *shown, f"{r.seconds:.0f}", r.verdict)
    Console(width=120).print(table)
    for reading in readings.split(","):
        verdicts = [r.verdict for r in rows if r.reading == reading]
        click.echo(f"{reading}: {verdicts.count('ok')} of {len(verdicts)} rows no worse than the paper's")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "cost_model": "roofline:p100",
            "algorithm": algorithm,
            "seconds": seconds,
            "implementations": implementations,
            "rows": [{**asdict(r), "verdict": r.verdict} for r in rows],
        }
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
