"""Plan problems of monetrun's instance format at every budget they list, and compare with the best known overheads.

    python recipes/plan_instances.py FILE... --algorithm hierarchical --seconds 10 --out DIR

For each FILE and budget it writes DIR/<name>.<column>.json = {"schedule": [operator numbers], "overhead", "bound",
"seconds"}: overhead and bound as fractions of the plain step, null where there is no schedule. The overhead comes from
``simulate``, the bound from the solver; gap = overhead - bound.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from lib import instances
from monetrun.core.graph import Graph
from monetrun.core.options import Options, parse_kinds
from monetrun.core.plan import Schedule, Solution, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import ALGORITHMS, solver


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--algorithm", default="hierarchical", show_default=True, type=click.Choice(tuple(ALGORITHMS)))
@click.option("--seconds", default=10.0, show_default=True, help="Time limit for one budget.")
@click.option("--out", default=None, type=click.Path(file_okay=False, path_type=Path), help="Folder for the schedules.")
@click.option("--columns", default="", help="Only these budgets, by comma: 0.5,0.4")
@click.option("--seed", default=0, show_default=True)
@click.option("--gap", default=0.0, show_default=True, help="Stop at this relative distance of cost and bound.")
@click.option("--solver", "mip_solver", default=Options().mip_solver, show_default=True, help="scip or highs.")
@click.option("--implementations", default="none", show_default=True, help="Kinds that may be used, if a FILE has any.")
def main(
    files: tuple[Path, ...],
    algorithm: str,
    seconds: float,
    out: Path | None,
    columns: str,
    seed: int,
    gap: float,
    mip_solver: str,
    implementations: str,
) -> None:
    """Plan every FILE at every budget that it lists."""
    table = Table(title=f"{algorithm}, {seconds:g} s per budget")
    for heading in ("problem", "budget", "overhead %", "best known %", "bound %", "gap %", "seconds", "status"):
        table.add_column(heading, justify="left" if heading in ("problem", "status") else "right")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    ratios = []
    for file in files:
        instance = instances.read(file)
        for column, budget_bytes in instance.budgets.items():
            if columns and column not in columns.split(","):
                continue
            kinds = parse_kinds(implementations)
            options = Options(seconds=seconds, gap=gap, seed=seed, mip_solver=mip_solver, implementations=kinds)
            solution = solver(algorithm)(instance.graph, instance.costs, budget_bytes, options)
            overhead, bound = measure(instance, budget_bytes, solution)
            known = instance.best_known[column]
            if overhead is not None and known:
                ratios.append(overhead / known)
            left = None if overhead is None else max(0.0, overhead - bound)
            table.add_row(
                file.stem,
                column,
                *(percent(value) for value in (overhead, known, bound, left)),
                f"{solution.seconds:.1f}",
                solution.status,
            )
            if out is not None:
                schedule = None if solution.schedule is None else written(instance.graph, solution.schedule)
                result = {"schedule": schedule, "overhead": overhead, "bound": bound, "seconds": solution.seconds}
                (out / f"{file.stem}.{column}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    Console(width=110).print(table)
    if ratios:
        click.echo(f"mean of overhead / best known over {len(ratios)} budgets: {sum(ratios) / len(ratios):.3f}")


def measure(instance: instances.Instance, budget_bytes: int, solution: Solution) -> tuple[float | None, float]:
    """Overhead (None without a schedule) and bound, as fractions of the plain step."""
    graph, costs = instance.graph, instance.costs
    plain_seconds = simulate(graph, costs, plain_schedule(graph)).seconds
    bound = max(0.0, solution.bound_seconds / plain_seconds - 1)
    if solution.schedule is None:
        return None, bound
    timeline = simulate(graph, costs, solution.schedule)
    if timeline.peak_bytes > budget_bytes:
        raise AssertionError(f"{solution.solver}: a peak of {timeline.peak_bytes} bytes, over {budget_bytes}")
    return timeline.seconds / plain_seconds - 1, bound


def written(graph: Graph, schedule: Schedule) -> list[int] | list[list[int]]:
    """The operators' numbers; if other implementations are used, pairs of operator id and implementation."""
    steps = schedule.forward + schedule.backward
    everything = {op.id for op in graph.operators if op.plain}
    if {s.operator for s in steps} == everything and all(s.implementation == 0 for s in steps):
        return instances.to_numbers(graph, schedule)
    return [[s.operator, s.implementation] for s in steps]


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


if __name__ == "__main__":
    main()
