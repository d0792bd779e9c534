"""How long it takes to plan a GPT-2 XL for a cluster that is not here, and what is found.

    python recipes/bench_cluster.py --out recipes/results/cluster.json

It times ``monetrun plan`` as a command, without a cache: the model is traced on fake tensors, planned on a roofline's
seconds, and its all-reduces are laid on a link.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

SCRIPT = Path(__file__).resolve().with_name("gpt.py")
MODEL = "--layers 48 --width 1600 --heads 25 --length 1024 --batch-size 8 --bf16"


def planned(nodes: int, gpus: int, link: str, budget: str, cost_model: str) -> dict[str, Any]:
    """A row: the command's seconds, and what it says."""
    cluster = f"--nodes {nodes} --gpus {gpus} --link {link} --cost-model {cost_model} --budget {budget}"
    words = [*cluster.split(), "--no-cache", "--json", str(SCRIPT), *MODEL.split()]
    command = [sys.executable, "-m", "monetrun", "plan", *words]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:  # for plan.json
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=folder)
    seconds = time.perf_counter() - start
    plan = json.loads(done.stdout)
    names = ("plain_peak_bytes", "budget_bytes", "planned_peak_bytes", "overhead", "bound", "step")
    return {
        "model": "GPT-2 XL",
        "command": f"monetrun plan {cluster} --no-cache recipes/{SCRIPT.name} {MODEL}",
        "nodes": nodes,
        "gpus": gpus,
        "seconds": round(seconds, 1),
        **{name: plan[name] for name in names},
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", default=16, show_default=True)
@click.option("--gpus", default=8, show_default=True)
@click.option("--link", default="400Gbps,5us", show_default=True)
@click.option("--budget", default="60GiB", show_default=True)
@click.option("--cost-model", default="roofline:h100", show_default=True)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(nodes: int, gpus: int, link: str, budget: str, cost_model: str, out: Path) -> None:
    """Time ``monetrun plan`` of a GPT-2 XL for a cluster."""
    row = planned(nodes, gpus, link, budget, cost_model)
    out.write_text(json.dumps({"torch": torch.__version__, "cores": os.cpu_count(), "rows": [row]}, indent=1) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
