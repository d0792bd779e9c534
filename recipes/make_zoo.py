"""Plans of well-known networks, made on fake tensors: recipes/zoo/*.tar.xz, for ``monetrun cache import``.

    python recipes/make_zoo.py --device cpu
    python recipes/make_zoo.py --device cuda                                      # on a machine with a GPU
    STANDIN_GPU_GIB=16 python tests/support/standin_gpu python recipes/make_zoo.py --device cuda       # or without one

A network's graph is captured as a launch captures it: its forward and backward, the loss left to the script, in fp32
and for a GPU also under autocast. Graphs of a CPU and of a GPU differ: cuDNN's batch norm, attention. Nothing is
allocated, and nothing runs. A step is planned for each data sheet at each share of the plain step; where that is not
feasible, for the smallest budget that is. The plans of one device are where those of the next begin.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import torchvision
from torch import nn

import gpu_training
from lib import offline
from lib.paper_networks import Transformer
from monetrun.capture.joint import JointGraph
from monetrun.core.errors import NoPlanInTime
from monetrun.core.graph import BACKWARD, FORWARD, Costs
from monetrun.core.options import Options
from monetrun.core.plan import StepSchedules
from monetrun.core.step import OUTSIDE, Event, StepRecord, replay
from monetrun.machine import archive
from monetrun.machine.store import Store
from monetrun.planning import planner
from monetrun.planning.known import KnownSchedules, known_key

ZOO = Path(__file__).parent / "zoo"
COST_MODELS = ("p100", "a100", "h100", "h200")
# Of the plain step's peak: a little below 0.8, 0.6, 0.5 and 0.4, of which a script with a loss of its own has less.
SHARES = (0.79, 0.59, 0.49, 0.39)
LOSS_COPIES = 3  # of the logits, while the script computes a cross entropy and its gradient

Network = Callable[[str], tuple[nn.Module, tuple[Any, ...]]]
NETWORKS: dict[str, Network] = {}


def network(function: Network) -> Network:
    NETWORKS[function.__name__] = function
    return function


def _images(name: str, batch: int) -> None:
    def build(device: str) -> tuple[nn.Module, tuple[Any, ...]]:
        return torchvision.models.get_model(name), (torch.empty(batch, 3, 224, 224, device=device),)

    NETWORKS[name] = build


# ---- the paper's five, at its batch sizes


def _of_the_paper(name: str) -> None:
    def build(device: str) -> tuple[nn.Module, tuple[Any, ...]]:
        known = gpu_training.NETWORKS[name]
        return known.make(known.paper), (torch.empty(known.paper.batch, 3, *known.paper.example, device=device),)

    NETWORKS[name] = build


for _name in ("resnet50", "googlenet", "mobilenet_v2", "vgg16", "unet"):
    _of_the_paper(_name)


# ---- transformers


_images("vit_b_16", 64)
_images("convnext_tiny", 64)
_images("swin_t", 64)


@network
def gpt(device: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """GPT-2 small as recipes/gpt.py writes it."""
    tokens = torch.zeros(8, 1024, dtype=torch.int64, device=device)
    return Transformer(50257, 1024, 768, 12, 12, causal=True), (tokens,)


# ---- planning


BFLOAT16 = ":bf16"  # of a name: under autocast
AUTOCAST = tuple(name + BFLOAT16 for name in ("resnet50", "vit_b_16", "convnext_tiny", "swin_t", "gpt"))
NAMES = {"cpu": tuple(NETWORKS), "cuda": (*NETWORKS, *AUTOCAST)}


def captured(name: str, device: str) -> tuple[JointGraph, int, int]:
    """The graph of a network, the bytes of its parameters, and those of its buffers and inputs."""
    network, _, precision = name.partition(":")
    with offline.fake_tensors(), torch.device(device), torch.autocast(device, torch.bfloat16, bool(precision)):
        module, arguments = NETWORKS[network](device)
        parameter_bytes = sum(p.nbytes for p in module.parameters())
        other_bytes = sum(t.nbytes for t in (*module.buffers(), *arguments))
        return offline.capture(module, arguments, name=name), parameter_bytes, other_bytes


def step(joint: JointGraph, costs: Costs, parameter_bytes: int, other_bytes: int) -> StepRecord:
    """A training step of the graph, with a loss of the script's own and SGD with momentum."""
    logits_bytes = sum(n.meta["val"].nbytes for n in joint.outputs if isinstance(n, torch.fx.Node))
    return StepRecord(
        graphs=(joint.graph,),
        costs=(costs,),
        events=(
            Event(FORWARD, 0),
            Event(OUTSIDE, -1, logits_bytes, LOSS_COPIES * logits_bytes, "loss"),
            Event(BACKWARD, 0),
            Event(OUTSIDE, -1, -logits_bytes - parameter_bytes, 0, "SGD.step"),
        ),
        base_bytes=2 * parameter_bytes + other_bytes,
        ledger={},
        device=costs.device,
        torch_version=torch.__version__,
    )


def plans(record: StepRecord, options: Options, found: list[StepSchedules]) -> list[dict[str, Any]]:
    """Plan the step at each of ``SHARES``, add the schedules to ``found``, and say what they give."""
    rows = []
    for share in SHARES:
        began = time.perf_counter()
        base = planner.baseline(record, budget_of=lambda plain_bytes, share=share: int(share * plain_bytes))
        plain = base.plain
        budget_bytes, bound = int(share * plain.peak_bytes), None
        starts = [known.schedules_for(base.searched.graphs) for known in found]
        try:
            plan = planner.plan_step(record, budget_bytes, "hierarchical", options, base, starts)
            schedules, bound = StepSchedules(plan.graphs), plan.bound
        except planner.BudgetBelowSmallest as refused:
            schedules = refused.smallest_schedules
        except NoPlanInTime:
            continue
        seconds = time.perf_counter() - began
        timeline = replay(record, schedules.schedules_for(record.graphs))
        found.append(schedules)
        rows.append(
            {
                "cost_model": record.device,
                "budget": share,
                "peak": round(timeline.peak_bytes / plain.peak_bytes, 4),
                "overhead": round(timeline.seconds / plain.seconds - 1, 4),
                "bound": None if bound is None else round(bound, 4),
                "seconds": round(seconds, 1),
            }
        )
        if bound is None:
            break
    return rows


def each_once(found: Sequence[StepSchedules]) -> KnownSchedules:
    """Those that differ."""
    return KnownSchedules(tuple(dict.fromkeys(found)))


@click.command()
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--networks", default="", help="By comma; default: all.")
@click.option("--seconds", default=10.0, show_default=True, help="Time limit for a plan.")
@click.option("--out", default=ZOO, show_default=True, type=click.Path(file_okay=False, path_type=Path))
def main(device: str, networks: str, seconds: float, out: Path) -> None:
    """Plan the networks, and put their plans into OUT's archive, in place of those that are there."""
    out.mkdir(parents=True, exist_ok=True)
    file, table = out / f"{device}.tar.xz", out / f"{device}.json"
    rows = json.loads(table.read_text())["networks"] if table.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        if file.is_file():
            archive.import_(store, file)
        for name in networks.split(",") if networks else NAMES[device]:
            joint, *sizes = captured(name, device)
            found: list[StepSchedules] = []
            made = []
            for model in COST_MODELS[BFLOAT16 in name :]:  # the P100 has no bfloat16
                record = step(joint, offline.costs(joint, f"roofline:{model}"), *sizes)
                made += plans(record, Options(seconds), found)
                own = [row for row in made if row["cost_model"] == record.device]
                click.echo(f"{name:18} {model} " + "  ".join(f"{r['peak']:.2f} {r['overhead']:+.1%}" for r in own))
            store.put("plan", known_key([joint.graph.structural_fingerprint]), each_once(found))
            rows[name] = {"graph": joint.graph.structural_fingerprint, "plans": made}
            archive.export(store, file)
            about = {"torch": torch.__version__, "seconds": seconds, "networks": rows}
            table.write_text(json.dumps(about, indent=1) + "\n")
        click.echo(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
