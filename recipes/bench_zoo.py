"""What the plans of recipes/zoo give: plans of their networks with and without them, after so many seconds of solver.

    python recipes/bench_zoo.py --out recipes/results/zoo.json

On costs that none of them was made for (a V100's data sheet), with AdamW: a launch measures its own costs, too.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import make_zoo
from lib import offline
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.options import Options
from monetrun.core.step import StepRecord
from monetrun.machine import archive
from monetrun.machine.store import Store
from monetrun.planning import planner
from monetrun.planning.known import known_schedules


def planned(record: StepRecord, share: float, seconds: float, store: Store | None) -> dict[str, Any]:
    """One plan, as a launch makes it: overhead (None where there is no plan) and the seconds that it takes."""
    options, began = Options(seconds), time.perf_counter()
    base = planner.baseline(record, budget_of=lambda plain_bytes: int(share * plain_bytes))
    known = known_schedules(store, base.searched.graphs, options)
    overhead = None
    try:
        budget_bytes = int(share * base.plain.peak_bytes)
        overhead = round(planner.plan_step(record, budget_bytes, "hierarchical", options, base, known).overhead, 4)
    except (InfeasibleBudget, NoPlanInTime):
        pass
    return {"known": len(known), "overhead": overhead, "seconds": round(time.perf_counter() - began, 2)}


def shown(plan: dict[str, Any]) -> str:
    """The cell of a plan."""
    overhead = "none" if plan["overhead"] is None else f"{plan['overhead']:+.1%}"
    return f"{overhead} {plan['seconds']:.1f} s"


@click.command()
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--networks", default="", help="By comma; default: all.")
@click.option("--cost-model", default="roofline:v100", show_default=True)
@click.option("--budget", default=0.5, show_default=True, help="Of the plain step's peak.")
@click.option("--seconds", default="0.2,20", show_default=True, help="Time limits, by comma.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON of all rows.")
def main(device: str, networks: str, cost_model: str, budget: float, seconds: str, out: Path | None) -> None:
    """Plan with and without, and print both."""
    limits = [float(text) for text in seconds.split(",")]
    table = Table(title=f"{cost_model}, {budget:g}x: overhead after so many seconds")
    for heading in ("network", *(f"{name} {limit:g} s" for limit in limits for name in ("none", "known"))):
        table.add_column(heading, justify="right")
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        archive.import_(store, make_zoo.ZOO / f"{device}.tar.xz")
        for name in networks.split(",") if networks else make_zoo.NAMES[device]:
            joint, parameter_bytes, other_bytes = make_zoo.captured(name, device)
            record = make_zoo.step(joint, offline.costs(joint, cost_model), parameter_bytes, other_bytes)
            record = replace(record, base_bytes=record.base_bytes + parameter_bytes)  # AdamW has two states
            planned(record, budget, 2.0, store)  # imports and compiles
            row = {f"{limit:g}": [planned(record, budget, limit, s) for s in (None, store)] for limit in limits}
            rows[name] = row
            table.add_row(name, *(shown(plan) for both in row.values() for plan in both))
    Console(width=120).print(table)
    if out is not None:
        out.write_text(json.dumps({"cost_model": cost_model, "budget": budget, "networks": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
