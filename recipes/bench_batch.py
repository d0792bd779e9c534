"""ResNet-50 at more than twice the batch that a limit lets the plain step have, run under that limit (fp32, on a CPU).

    python recipes/bench_batch.py --out recipes/results/batch.json

The limit is the peak of the plain step at ``--batch``: weights, buffers, gradients, momentum, batch and activations.
Under it, one image more runs out of memory. ``--times`` as many images are then trained under a plan for it while the
allocator enforces it, in turns with the plain step at that larger batch, which has no limit there. Peaks are the
allocator's; a ratio of seconds is the median over the pairs (step_pairs.py).
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
import torchvision

from lib import networks
from monetrun.capture import cpu_allocator
from monetrun.capture.meter import CpuMeter
from monetrun.core.budget import format_bytes
from monetrun.core.options import Options
from monetrun.ops import kernels
from monetrun.runtime.allocation_limit import set_limit
from step_pairs import Recorded, Reference, Trainer, first_line, held_now, run_planned

METER = CpuMeter()
CPU = torch.device("cpu")


def trainer(network: str, batch: int, side: int) -> Callable[[], Trainer]:
    """Makes a classifier of torchvision and its batch."""

    def make() -> Trainer:
        torch.manual_seed(0)
        model = torchvision.models.get_model(network)
        x, y = networks.images(batch, side, 1000)
        return Trainer(model, lambda: F.cross_entropy(model(x), y), METER)

    return make


def plainly_within(make: Callable[[], Trainer], limit_bytes: int) -> str | None:
    """Train plainly under a limit: what the error says that ends it; None where none does."""
    set_limit(CPU, held_now(METER).allocated + limit_bytes)
    try:
        one = make()
        for _ in range(2):
            one.step()
    except torch.OutOfMemoryError as error:
        return first_line(error)
    finally:
        set_limit(CPU, None)
    return None


def peak(make: Callable[[], Trainer]) -> int:
    """Bytes of a plain step."""
    return Reference(make, METER).peak.allocated


def measure(network: str, side: int, batch: int, times: float, pairs: int, options: Options) -> dict[str, Any]:
    """Both batches under the limit.

    Raises:
        InfeasibleBudget, NoPlanInTime: there is no plan for the larger batch.
    """
    larger = math.ceil(times * batch)
    limit = peak(trainer(network, batch, side))
    found: dict[str, Any] = {
        "network": network,
        "side": side,
        "batch": batch,
        "limit_bytes": limit,
        "plainly": plainly_within(trainer(network, batch, side), limit),
        "plainly_one_more": plainly_within(trainer(network, batch + 1, side), limit),
        "larger_batch": larger,
    }
    plain, recorded = Reference(make := trainer(network, larger, side), METER), Recorded(make)
    plan = recorded.plan(plain.others().allocated + limit, "hierarchical", options)
    return found | {"plain_bytes": plain.peak.allocated, **run_planned(plain, recorded, plan, pairs)}


def lines(found: dict[str, Any]) -> list[str]:
    """What was measured, in words."""
    one_more = found["plainly_one_more"]
    return [
        f"{found['network']}, {found['side']}x{found['side']}, limit {format_bytes(found['limit_bytes'])}",
        f"  plain, batch {found['batch']}: {'trains' if found['plainly'] is None else found['plainly']}",
        f"  plain, batch {found['batch'] + 1}: {'trains' if one_more is None else one_more}",
        f"  plain, batch {found['larger_batch']}, no limit: {format_bytes(found['plain_bytes'])}",
        f"  planned, batch {found['larger_batch']}: {found['refused_by_the_cap'] or 'trains'},"
        f" {format_bytes(found['allocated_bytes'])}, {found['ratio']:.3f} of the plain step's seconds"
        f" (planned {found['planned_ratio']:.3f})",
    ]


@click.command()
@click.option("--network", default="resnet50", show_default=True, help="A classifier of torchvision.")
@click.option("--side", default=224, show_default=True, help="Pixels of the images.")
@click.option("--batch", default=8, show_default=True, help="That the limit is made for.")
@click.option("--times", default=2.3, show_default=True, help="The larger batch, as a multiple.")
@click.option("--pairs", default=9, show_default=True)
@click.option("--seconds", default=20.0, show_default=True, help="Time limit for the plan.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON of what was measured.")
def main(network: str, side: int, batch: int, times: float, pairs: int, seconds: float, out: Path | None) -> None:
    """Measure, and print it."""
    if not cpu_allocator.install() or kernels.load() is None:
        raise click.ClickException(cpu_allocator.unavailable_reason() or "monetrun's kernels are not there")
    found = measure(network, side, batch, times, pairs, Options(seconds))
    click.echo("\n".join(lines(found)))
    if out is not None:
        found |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
