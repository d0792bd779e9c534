"""What a budget of reserved bytes costs: reserved over allocated bytes, by network and budget. On a GPU or a stand-in.

    python recipes/reserved_margin.py
    STANDIN_GPU_GIB=80 python tests/support/standin_gpu python recipes/reserved_margin.py

Launches ``recipes/gpu_training.py`` at each budget.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("gpu_training.py")
NETWORKS = ("resnet50", "googlenet", "mobilenet_v2", "vgg16", "unet", "gpt")
MIB = 1 << 20
_OF_TIMES = ("planned_overhead", "measured_recomputation", "ranks")


def run(command: Sequence[str]) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code of a command, the JSON lines that it prints, and the last error on its stderr."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = [line for line in done.stderr.splitlines() if "rror" in line]
    return done.returncode, found, errors[-1] if errors else ""


def launch(network: str, budget: str, seconds: float, words: Sequence[str]) -> dict[str, Any]:
    """The figures of one launch."""
    options = ["--standalone", "--nproc-per-node=1", "--json", f"--solver-seconds={seconds:g}", "--budget", budget]
    code, found, error = run(["-m", "monetrun", *options, str(SCRIPT), network, *words])
    report = next((row for row in found if "planned_reserved_bytes" in row), {})
    row = {"network": network, "budget": budget, "exit_code": code, "error": error if code else "", **report}
    if torch.cuda.get_device_name(0).startswith("Stand-in"):  # its kernels take no time
        row = {name: value for name, value in row.items() if name not in _OF_TIMES}
    if report.get("planned_peak_bytes"):
        row["reserved_over_allocated"] = report["planned_reserved_bytes"] / report["planned_peak_bytes"]
    return row


@click.command(help=__doc__)
@click.option("--networks", default=",".join(NETWORKS), show_default=True)
@click.option("--budgets", default="0.8x,0.6x,0.5x", show_default=True)
@click.option("--solver-seconds", type=float, default=10.0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="write the figures there as JSON")
@click.argument("words", nargs=-1)
def main(networks: str, budgets: str, solver_seconds: float, out: Path | None, words: tuple[str, ...]) -> None:
    device = torch.cuda.get_device_name(0)
    rows = []
    table = Table(box=None)
    for column in ("network", "budget", "planned", "allocated", "ratio", "measured", "retries", "overhead"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for network in networks.split(","):
        for budget in budgets.split(","):
            row = launch(network, budget, solver_seconds, words)
            rows.append(row)
            if "reserved_over_allocated" not in row:
                table.add_row(network, budget, row["error"][:60] or "nothing to plan")
                continue
            table.add_row(
                network,
                budget,
                f"{row['planned_reserved_bytes'] / MIB:.0f} MiB",
                f"{row['planned_peak_bytes'] / MIB:.0f} MiB",
                f"{row['reserved_over_allocated']:.3f}",
                f"{row['measured_reserved_bytes'] / MIB:.0f} MiB",
                str(row["allocation_retries"]),
                f"{row['planned_overhead']:+.1%}" if "planned_overhead" in row else "",
            )
            if out is not None:
                out.write_text(
                    json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
                )
    Console().print(table)


if __name__ == "__main__":
    main()
