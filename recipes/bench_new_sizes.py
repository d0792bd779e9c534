"""What a new input size costs in training: sequences of other lengths, in seconds of the first step that has one.

    python recipes/bench_new_sizes.py
    STANDIN_GPU_GIB=16 python tests/support/standin_gpu python recipes/bench_new_sizes.py

The language model of ``gpt.py`` trains on random tokens, each length twice, in processes that take turns: as torchrun
runs it (``plain``), under a budget with sizes left open as they are by default (``open``), and with each size traced
anew (``traced``). The step with a new length, less the second one with it, is what the length costs. On a stand-in GPU
kernels cost nothing, so that it is the host's time alone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from lib.paper_networks import Transformer
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings

WAYS = ("plain", "open", "traced")
VOCABULARY, WIDTH, LAYERS, HEADS, BATCH = 2000, 256, 6, 8, 8
LENGTHS = (128, 96, 160, 112, 144, 104, 152, 120, 136, 88)


def train(way: str, budget: str) -> list[tuple[float, float]]:
    """Seconds of the first and of the second step of each length, after those that record, plan and open sizes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    session = None
    if way != "plain":
        session = Session(Settings(mode=RUN, budget=budget, cost_model="roofline:p100"))
        session.watch_process()
    torch._dynamo.config.automatic_dynamic_shapes = way != "traced"
    model = Transformer(VOCABULARY, max(LENGTHS), WIDTH, LAYERS, HEADS, causal=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(length: int) -> float:
        tokens = torch.randint(VOCABULARY, (BATCH, length), device=device)
        began = time.perf_counter()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for length in (*LENGTHS[:3], *LENGTHS[:3]):
        step(length)
    found = [(step(length), step(length)) for length in LENGTHS[3:]]
    if session is not None:
        session.close()
    return found


@click.command(help=__doc__)
@click.option("--budget", default="0.8x", show_default=True)
@click.option("--rounds", default=3, show_default=True, help="processes of each way, in turns")
@click.option("--way", type=click.Choice(WAYS), hidden=True, help="train so in this process")
@click.option("--out", type=click.Path(path_type=Path), help="write the figures there as JSON")
def main(budget: str, rounds: int, way: str | None, out: Path | None) -> None:
    if way is not None:
        print(json.dumps(train(way, budget)))
        return
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name in WAYS:
            command = [sys.executable, __file__, "--way", name, "--budget", budget]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seconds[name] += json.loads(done.stdout.splitlines()[-1])
    rows = {
        name: {
            "known_size_seconds": statistics.median(second for _, second in pairs),
            "new_size_seconds": statistics.median(first for first, _ in pairs),
            "cost_of_a_size_seconds": statistics.median(first - second for first, second in pairs),
        }
        for name, pairs in seconds.items()
    }
    table = Table("way", "step of a known size", "of a new size", "a new size costs", box=None)
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.3f} s" for value in row.values()))
    Console().print(table)
    if out is not None:
        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
        about = {"device": device, "torch": torch.__version__, "budget": budget, "sizes": len(LENGTHS) - 3}
        out.write_text(json.dumps({**about, "ways": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
