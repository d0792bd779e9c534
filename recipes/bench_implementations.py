"""How much memory other implementations of operators save: alone, and with recomputation (fp32, on a CPU).

    python recipes/bench_implementations.py --out recipes/results/implementations.json
    python recipes/bench_implementations.py --kinds joint --most-share 0.4 --solver-seconds 30 --pairs 25 \
        --out recipes/results/third.json

Four tables, the last of which is the second command's alone:

* alone: no operator runs twice; at most 3% more time is allowed.
* joint: both, at 0.6 of the activation peak; at most 6% more time.
* against recomputation: both together, and recomputation with eager's operators alone, at half of the activation peak;
  the overhead of both together should be at most 0.7 of the other, as planned and as measured.
* a third: both, at a third of the activation peak, at most 16% more time: what MONeT's paper claims for these five
  networks. Where there is no plan, a bound on the peak of every schedule tells by how much it is missed at least.

The activation peak is the peak of an eager step, less what stays allocated after it (weights, buffers, gradients,
optimizer state, batch). A budget is a share of the activation peak, plus what stays. Each network's operators are timed
once, so that all of its plans use the same costs; the planned and the eager model then train in turns in one process.
Seconds are medians over the pairs, and peaks are the CPU allocator's (step_pairs.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from lib import networks, paper_networks
from monetrun.capture import cpu_allocator
from monetrun.capture.meter import CpuMeter
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.options import Options
from monetrun.ops import kernels
from step_pairs import Peak, Recorded, Reference, Trainer, refusal, run_planned

METER = CpuMeter()
RECOMPUTE, IMPLEMENTATIONS, JOINT = "recomputation", "implementations", "joint"
OPTIONS = {
    RECOMPUTE: {"implementations": ()},
    IMPLEMENTATIONS: {"recompute": False},
    JOINT: {},
}


@dataclass(frozen=True, slots=True)
class Target:
    """A row: the kind of plan, its share of the activation peak, and the limit of its time over the eager step's."""

    network: str
    kind: str
    share: float
    at_most: float | None


CONVOLUTIONS = ("resnet50", "mobilenet_v2", "googlenet", "unet", "vgg16")
PAPERS_NETWORKS = ("resnet50", "mobilenet_v2", "googlenet", "papers_unet", "vgg16")
PAPERS_SHARE, PAPERS_LIMIT = 1 / 3, 1.16
TARGETS = (
    Target("vgg16", IMPLEMENTATIONS, 0.8, 1.03),
    Target("googlenet", IMPLEMENTATIONS, 0.85, 1.03),
    Target("gpt", IMPLEMENTATIONS, 0.88, 1.03),
    *(Target(network, JOINT, 0.6, 1.06) for network in ("resnet50", "mobilenet_v2", "googlenet")),
    *(Target(network, kind, 0.5, None) for network in CONVOLUTIONS for kind in (RECOMPUTE, JOINT)),
    *(Target(network, JOINT, PAPERS_SHARE, PAPERS_LIMIT) for network in PAPERS_NETWORKS),
)
LESS_THAN_RECOMPUTATION = 0.7
LEAST_SECONDS = 60.0  # of the search for a bound on all peaks


def of_images(make: Callable[[], nn.Module], batch: int, size: int, classes: int = 10) -> Callable[[float], Trainer]:
    """A classifier's trainer, given a factor on the batch."""

    def build(scale: float) -> Trainer:
        torch.manual_seed(0)
        model = make()
        x, y = networks.images(max(2, round(batch * scale)), size, classes)
        return Trainer(model, lambda: F.cross_entropy(model(x), y), METER)

    return build


def unet(scale: float) -> Trainer:
    torch.manual_seed(0)
    model = networks.UNet()
    x, _ = networks.images(max(2, round(8 * scale)), 128)
    y = (x.sum(1) > 0).long()
    return Trainer(model, lambda: F.cross_entropy(model(x), y), METER)


def papers_unet(scale: float) -> Trainer:
    """With the channels of the paper's, on smaller images."""
    torch.manual_seed(0)
    model = paper_networks.UNet()
    x, _ = networks.images(max(1, round(2 * scale)), 144)
    y = (x[:, :1] > 0).float()
    return Trainer(model, lambda: F.binary_cross_entropy_with_logits(model(x), y), METER)


def gpt(scale: float) -> Trainer:
    torch.manual_seed(0)
    model = networks.GPT()
    batch = networks.tokens(max(2, round(8 * scale)), 256, 0)
    return Trainer(model, lambda: model(batch)["loss"], METER)


tv = torchvision.models
NETWORKS: dict[str, Callable[[float], Trainer]] = {
    "vgg16": of_images(lambda: tv.vgg16(num_classes=10), 16, 128),
    "googlenet": of_images(lambda: tv.googlenet(num_classes=10, aux_logits=False, init_weights=False), 16, 112),
    "gpt": gpt,
    "resnet50": of_images(lambda: tv.resnet50(num_classes=10), 16, 128),
    "mobilenet_v2": of_images(lambda: tv.mobilenet_v2(num_classes=10), 16, 112),
    "unet": unet,
    "papers_unet": papers_unet,
}


def bench(name: str, targets: list[Target], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one network."""
    plain = Reference(lambda: NETWORKS[name](args.scale), METER)
    recorded = Recorded(lambda: NETWORKS[name](args.scale))
    rows = []
    for target in targets:
        options = Options(seconds=args.solver_seconds, **OPTIONS[target.kind])  # type: ignore[arg-type]
        others, budget = plain.others().allocated, plain.held_bytes + int(target.share * plain.activation_bytes)
        found: dict[str, Any] = {
            "network": name,
            "kind": target.kind,
            "share": target.share,
            "at_most": target.at_most,
            "eager_peak_bytes": plain.peak.allocated,
            "activation_bytes": plain.activation_bytes,
        }
        started = time.perf_counter()
        try:
            plan = recorded.plan(others + budget, args.algorithm, options)
        except (InfeasibleBudget, NoPlanInTime) as error:
            found |= {"status": "no plan", "reason": refusal(error, budget, others)}
            if target.at_most is not None:
                least, bound = recorded.least_peaks(LEAST_SECONDS)
                found["least_share"] = plain.share(Peak(least - others, None))
                found["bound_share"] = plain.share(Peak(bound - others, None))
        else:
            found |= {"status": "ok", "solver_seconds": time.perf_counter() - started}
            found |= run_planned(plain, recorded, plan, args.pairs)
            if target.at_most is not None:
                found["met"] = found["ratio"] <= target.at_most and found["measured_share"] <= target.share
        rows.append(found)
        print(line(found), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    start = f"{row['network']:13}{row['kind']:16}{row['share']:.2f}  "
    if row["status"] != "ok":
        least = f"; no schedule is below {row['bound_share']:.3f}" if "bound_share" in row else ""
        return f"{start}{row['status']}: {row['reason']}{least}"
    verdict = "" if row["at_most"] is None else f" (at most x{row['at_most']:.2f}: {'met' if row['met'] else 'MISSED'})"
    return (
        f"{start}planned {row['planned_share']:.3f} x{row['planned_ratio']:.3f}, "
        f"measured {row['measured_share']:.3f} x{row['ratio']:.3f} of {row['eager_seconds']:.3f} s{verdict}"
    )


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The joint plan's overhead as a share of the recompute-only plan's, planned and measured, for each network.

    The share is 0 where recomputation alone has no plan, and None where it has no overhead.
    """
    found = []
    by_key = {(r["network"], r["share"], r["kind"]): r for r in rows}
    for (network, share, kind), joint in by_key.items():
        other = by_key.get((network, share, RECOMPUTE))
        if kind != JOINT or joint["status"] != "ok" or other is None:
            continue
        shares = {}
        for name, field in (("planned", "planned_ratio"), ("measured", "ratio")):
            overhead = other[field] - 1 if other["status"] == "ok" else math.inf
            shares[name] = (joint[field] - 1) / overhead if overhead > 0 else None
        met = {k: v is not None and v <= LESS_THAN_RECOMPUTATION for k, v in shares.items()}
        found.append({"network": network, "share": share, "at_most": LESS_THAN_RECOMPUTATION, **shares, "met": met})
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--kinds", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--most-share", type=float, default=1.0, help="leave out what takes more of the peak")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--solver-seconds", type=float, default=8.0)
    parser.add_argument("--algorithm", default="hierarchical")
    parser.add_argument("--scale", type=float, default=1.0, help="of the batches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if not cpu_allocator.install():
        raise SystemExit(f"peaks cannot be counted: {cpu_allocator.unavailable_reason()}")
    document: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]) if argv is None else "",
        "torch": torch.__version__,
        "threads": args.threads,
        "native_kernels": kernels.load(),
    }
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for name in args.networks:
        targets = [t for t in TARGETS if t.network == name and t.kind in args.kinds and t.share <= args.most_share]
        if targets:
            rows += bench(name, targets, args)
            gc.collect()
    against = compared(rows)
    for row in against:
        shares = ", ".join(f"{k} {row[k]:.2f}" if row[k] is not None else f"{k} -" for k in ("planned", "measured"))
        print(f"{row['network']:13}joint overhead / recomputation's: {shares}  (at most {row['at_most']})", flush=True)
    document |= {"seconds": time.perf_counter() - started, "rows": rows, "joint_to_recomputation": against}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


if __name__ == "__main__":
    main()
