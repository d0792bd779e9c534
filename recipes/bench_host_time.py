"""What the host spends on a step under a plan beside eager's: dispatching operators, not running kernels.

    STANDIN_GPU_GIB=64 python tests/support/standin_gpu python recipes/bench_host_time.py

On a stand-in GPU, where kernels cost nothing, a step's time is the host's; on a real one only the processor's is. The
networks of ``gpu_training.py`` train, small, in one process: eagerly and under a plan, in turns. ``cpu`` is what the
process took of its processors, in all threads; ``wall`` is the clock, which on a shared machine counts others' work.
Costs come from a data sheet, so that every run has the same plan.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import gpu_training
from monetrun.capture import program
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings

FULL = "full"  # a budget that the plain step fits
WARM_UP_STEPS = 8  # compilation, and the early calls that are timed one by one


def training(name: str) -> gpu_training.Training:
    """A network of its own, trained on data of its own."""
    torch.manual_seed(0)
    network = gpu_training.NETWORKS[name]
    return gpu_training.Training(network.make(network.small).cuda().train(), network.small, "fp32")


def seconds(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """The wall's and the processor's seconds of one step, a mean of ``steps``."""
    torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def operators(step: Callable[[], object]) -> int:
    """How many operators a step dispatches, those within others included."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return sum(event.count for event in found.key_averages() if event.key.startswith(("aten::", "monet::")))


def budget_beside(budget: str) -> str:
    """A budget for another such network, which trains in this process too: a share is of what the first one took."""
    if budget == FULL:
        return f"{torch.cuda.get_device_properties(0).total_memory * 9 // 10}B"
    share = float(budget.removesuffix("x"))
    return f"{torch.cuda.memory_allocated() + int(share * torch.cuda.max_memory_reserved())}B"


def bench(name: str, budget: str, pairs: int, steps: int) -> dict[str, Any]:
    """One network under one budget: the medians of both steps and of their ratio, paired."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plain = training(name)
    for _ in range(3):
        plain.step()
    bound = budget_beside(budget)
    session = Session(Settings(mode=RUN, budget=bound, strict=True, solver_seconds=10, cost_model="roofline:h100"))
    session.watch_process()
    try:
        planned = training(name)
        session.optimizer_made(planned.optimizer)
        session.put_triggers([planned.model])
        for _ in range(WARM_UP_STEPS):
            planned.step()
        assert session.engine is not None
        assert session.engine.plan is not None
        overhead = session.engine.plan.overhead
        rows = []
        for i in range(pairs):
            both = (plain, planned) if i % 2 == 0 else (planned, plain)
            found = {one: seconds(one.step, steps) for one in both}
            rows.append((*found[plain], *found[planned]))
        counts = operators(plain.step), operators(planned.step)
    finally:
        session.close()
        torch._dynamo.reset()
    plain_wall, plain_cpu, wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "network": name,
        "budget": budget,
        "planned_overhead": overhead,
        "eager_cpu_seconds": plain_cpu,
        "cpu_seconds": cpu,
        "cpu_ratio": statistics.median(row[3] / row[1] for row in rows),
        "eager_wall_seconds": plain_wall,
        "wall_seconds": wall,
        "wall_ratio": statistics.median(row[2] / row[0] for row in rows),
        "eager_operators": counts[0],
        "operators": counts[1],
        "pairs": pairs,
        "steps_in_each": steps,
    }


@click.command(help=__doc__)
@click.option("--networks", default="resnet50,mobilenet_v2,unet,gpt", show_default=True)
@click.option("--budgets", default=f"{FULL},0.6x", show_default=True, help="full: more than the plain step takes")
@click.option("--pairs", type=click.IntRange(1), default=20, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="steps of each in a pair")
@click.option("--out", type=click.Path(path_type=Path), help="write the figures there as JSON")
def main(networks: str, budgets: str, pairs: int, steps: int, out: Path | None) -> None:
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "compiled": not program.unavailable_reason(),
        "rows": [],
    }
    table = Table(box=None)
    for column in ("network", "budget", "overhead", "cpu", "eager's", "ratio", "wall ratio", "operators", "eager's"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name in networks.split(","):
        for budget in budgets.split(","):
            row = bench(name, budget, pairs, steps)
            found["rows"].append(row)
            table.add_row(
                name,
                budget,
                f"{row['planned_overhead']:+.1%}",
                f"{row['cpu_seconds'] * 1e3:.2f} ms",
                f"{row['eager_cpu_seconds'] * 1e3:.2f} ms",
                f"{row['cpu_ratio']:.3f}",
                f"{row['wall_ratio']:.3f}",
                str(row["operators"]),
                str(row["eager_operators"]),
            )
            if out is not None:
                out.write_text(json.dumps(found, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
