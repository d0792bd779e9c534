"""What the host spends on a training step beside eager's: dispatching operators, not running kernels.

    STANDIN_GPU_GIB=64 python tests/support/standin_gpu python recipes/bench_host_time.py

On a stand-in GPU, where kernels cost nothing, a step's time is the host's; on a real one only the processor's is. The
networks of ``gpu_training.py`` train, small, in two processes that take turns, which are started anew several times,
since one process can be a tenth slower than the next one of the same code: eagerly, with the allocator's settings as
torch has them, and as a worker of a launch does. ``auto`` is a budget that the plain step fits with room, so that
nothing is planned; under ``full``, which it fits too, the step is planned all the same. ``cpu`` is what the process
took of its processors, in all threads; ``wall`` is the clock. Of the steps in a turn the least counts: on a shared
machine others' work adds to most of them, and to the planned ones no less than to eager's. Costs come from a data
sheet, so that every run has the same plan; where that guesses too little of what an operator takes, a step under a
share runs out of memory, and the row is left out. Rows of other networks and budgets that the file has already stay in
it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import gpu_training
from monetrun.capture import program
from monetrun.launcher.allocator import allocator_variables
from monetrun.runtime.plain_run import PlainRun
from monetrun.runtime.session import Session
from monetrun.runtime.settings import PLAIN, RUN, Settings

EAGER = "eager"
AUTO = "auto"  # as a launch runs what fits with room: no plan, and a limit
FULL = "full"  # a budget that the plain step fits, and a plan
WARM_UP_STEPS = 20  # compilation, the early calls that are timed one by one, and the backwards that are looked at


# ---- one of the two processes


def work(name: str, budget: str, connection: Connection) -> None:
    """Train under ``budget``; then make so many steps for each number that comes, and tell their seconds."""
    torch.manual_seed(0)
    network = gpu_training.NETWORKS[name]
    observer = None if budget == EAGER else observing(budget)
    if observer is not None:
        observer.watch_process()
    model = network.make(network.small).cuda().train()
    training = gpu_training.Training(model, network.small, "fp32")
    for _ in range(WARM_UP_STEPS):
        training.step()
    overhead = 0.0
    if isinstance(observer, Session):
        assert observer.engine is not None
        assert observer.engine.plan is not None
        overhead = observer.engine.plan.overhead
    connection.send({"overhead": overhead, "operators": operators(training.step)})
    while steps := connection.recv():
        connection.send(seconds(training.step, steps))


def observing(budget: str) -> Session | PlainRun:
    """What a launch's worker has, for a budget of this name."""
    most = torch.cuda.get_device_properties(0).total_memory * 9 // 10
    if budget == AUTO:
        return PlainRun(Settings(mode=PLAIN, budget_bytes=most))
    bound = f"{most}B" if budget == FULL else budget
    return Session(Settings(mode=RUN, budget=bound, strict=True, solver_seconds=10, cost_model="roofline:h100"))


def seconds(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """The wall's and the processor's seconds of a step, the least of ``steps``."""
    walls, cpus = [], []
    for _ in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def operators(step: Callable[[], object]) -> int:
    """How many operators a step dispatches, those within others included."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return sum(event.count for event in found.key_averages() if event.key.startswith(("aten::", "monet::")))


# ---- both


@contextlib.contextmanager
def worker(name: str, budget: str) -> Iterator[Connection]:
    """Such a process; it ends with the context."""
    ours, theirs = multiprocessing.Pipe()
    environment = {} if budget in (EAGER, AUTO) else allocator_variables("cuda", Settings())
    with contextlib.ExitStack() as undo:
        for key, value in environment.items():
            undo.callback(os.environ.pop, key)
            os.environ[key] = value
        process = multiprocessing.get_context("spawn").Process(target=work, args=(name, budget, theirs), daemon=True)
        process.start()
    theirs.close()  # so that its end is seen here
    try:
        yield ours
        ours.send(0)
        process.join()
    finally:
        process.kill()


def bench(name: str, budget: str, starts: int, pairs: int, steps: int) -> dict[str, Any]:
    """One network under one budget: the medians of both steps and of their ratio, paired."""
    rows = []
    for _ in range(starts):
        with worker(name, EAGER) as eager, worker(name, budget) as planned:
            counts, found = eager.recv(), planned.recv()
            for i in range(pairs):
                both = (eager, planned) if i % 2 == 0 else (planned, eager)
                taken = {}
                for one in both:
                    one.send(steps)
                    taken[one] = one.recv()
                rows.append((*taken[eager], *taken[planned]))
    plain_wall, plain_cpu, wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "network": name,
        "budget": budget,
        "planned_overhead": found["overhead"],
        "eager_cpu_seconds": plain_cpu,
        "cpu_seconds": cpu,
        "cpu_ratio": statistics.median(row[3] / row[1] for row in rows),
        "eager_wall_seconds": plain_wall,
        "wall_seconds": wall,
        "wall_ratio": statistics.median(row[2] / row[0] for row in rows),
        "eager_operators": counts["operators"],
        "operators": found["operators"],
        "starts": starts,
        "pairs_in_each": pairs,
        "steps_in_each": steps,
    }


@click.command(help=__doc__)
@click.option("--networks", default="resnet50,mobilenet_v2,unet,gpt", show_default=True)
@click.option("--budgets", default=f"{AUTO},{FULL},0.6x", show_default=True)
@click.option("--starts", type=click.IntRange(1), default=3, show_default=True, help="pairs of processes")
@click.option("--pairs", type=click.IntRange(1), default=8, show_default=True, help="turns of each pair")
@click.option("--steps", type=click.IntRange(1), default=40, show_default=True, help="steps of each in a pair")
@click.option("--out", type=click.Path(path_type=Path), help="write the figures there as JSON")
def main(networks: str, budgets: str, starts: int, pairs: int, steps: int, out: Path | None) -> None:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if out is not None and out.exists():
        rows = {(row["network"], row["budget"]): row for row in json.loads(out.read_text())["rows"]}
    found = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "compiled": not program.unavailable_reason(),
    }
    table = Table(box=None)
    for column in ("network", "budget", "overhead", "cpu", "eager's", "ratio", "wall ratio", "operators", "eager's"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name in networks.split(","):
        for budget in budgets.split(","):
            try:
                row = rows[name, budget] = bench(name, budget, starts, pairs, steps)
            except (EOFError, BrokenPipeError):
                click.echo(f"{name} under {budget}: a process ended", err=True)
                continue
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
                out.write_text(json.dumps({**found, "rows": list(rows.values())}, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
