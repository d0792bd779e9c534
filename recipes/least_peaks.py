"""The smallest feasible peak of each network of compare.py: the lowest that is known, and a bound on every schedule's.

    python recipes/least_peaks.py --seconds 60 --out recipes/results/least_peaks.json

Peaks are of the training step, with weights, gradients and optimizer state, in bytes of the CPU's allocator. Nothing is
timed: other work on the machine does not matter. ``docs/comparison.md`` shows the bound beside what is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from lib.compared_networks import DEFAULT, NETWORKS, SIZES
from monetrun.capture.meter import meter_for
from monetrun.ops import kernels
from monetrun.planning import planner
from step_pairs import Recorded, Trainer, release_cached


def least_peak(name: str, size: str, seconds: float) -> dict[str, Any]:
    """A network's plain peak, the lowest peak known, and the bound, in bytes."""
    device = torch.device("cpu")
    meter = meter_for(device)
    release_cached()  # what the network before has left
    before = meter.current_bytes()

    def make() -> Trainer:
        torch.manual_seed(0)
        model, loss = NETWORKS[name].build(size, device)
        return Trainer(model.train(), loss, meter)

    recorded = Recorded(make)
    smallest, bound = recorded.least_peaks(seconds)
    row = {"network": name, "plain_bytes": planner.baseline(recorded.record).plain.peak_bytes - before}
    return {**row, "smallest_bytes": smallest - before, "bound_bytes": bound - before}


@click.command(help=__doc__.replace("\n\n    python", "\n\n\b\n    python", 1))
@click.option("--networks", default=",".join(DEFAULT), show_default=True, help="By comma.")
@click.option("--size", type=click.Choice(SIZES), default=SIZES[0], show_default=True)
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Of search, for each network.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there as JSON.")
def main(networks: str, size: str, seconds: float, out: Path | None) -> None:
    """Search, and print a line for each network."""
    kernels.load()
    rows: list[dict[str, Any]] = []
    for name in networks.split(","):
        if NETWORKS[name].missing:
            click.echo(f"{name}: {NETWORKS[name].missing}", err=True)
            continue
        rows.append(least_peak(name, size, seconds))
        click.echo(json.dumps(rows[-1]), err=True)
        if out is not None:
            out.write_text(json.dumps({"torch": torch.__version__, "size": size, "rows": rows}, indent=1) + "\n")
    table = Table("network", "plain", "smallest known", "bound", "gap", box=None)
    for row in rows:
        mib = (f"{row[key] / 2**20:.1f} MiB" for key in ("plain_bytes", "smallest_bytes", "bound_bytes"))
        table.add_row(row["network"], *mib, f"{row['smallest_bytes'] / row['bound_bytes'] - 1:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
