"""Steps under DistributedDataParallel on a link of a given speed: plain ones and planned ones, paired, interleaved.

    python recipes/bench_overlap.py --cases resnet gpt --shares 1.0 0.6 --out recipes/results/overlap.json
    python recipes/bench_overlap.py --reduced-after --out recipes/results/overlap.json

Two ranks share a link that takes its time and no core (``lib.timed_group``). In each rank the plain model and the
planned one train in turn, step by step. The link passes on all gradients in 0.5, 1 and 2 times the seconds of the plain
backward without communication. Ratios are medians over the pairs, the slower rank's. ``starts`` says when each bucket's
all-reduce begins, ``waits`` how long the backward waits after the last one has begun, in seconds of that backward.
``--reduced-after`` is what monetrun does not do: plain steps whose buckets are reduced once the backward has
ended, beside plain ones. It is what overlapping is worth, and goes into the file that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lib import networks, timed_group
from monetrun.capture import cpu_allocator
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings

RANKS = 2
WARM_UP_STEPS = 12  # the recorded step, compilation, the timed calls, and the first ones after them
BUCKET_MB = {"resnet": 4, "gpt": 1}  # the models are small: five to seven buckets, as ResNet-50 has at 25 MB


class NarrowResNet50(torchvision.models.ResNet):
    """ResNet-50 with half of its channels."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__(torchvision.models.resnet.Bottleneck, [3, 4, 6, 3])
        self.fc = nn.Linear(1024, classes)

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 2, *args, **kwargs)


def resnet() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    x, y = networks.images(8, 112, 100, seed=dist.get_rank())
    return NarrowResNet50(), lambda model: F.cross_entropy(model(x), y)


def gpt() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    batch = networks.tokens(12, 128, dist.get_rank())
    return networks.GPT(length=128), lambda model: model(batch)["loss"]


CASES = {"resnet": resnet, "gpt": gpt}


@dataclass(frozen=True, slots=True)
class Timing:
    """One step's seconds: all of it, its backward, when each bucket began, and the wait after the last one did."""

    step: float
    backward: float
    starts: tuple[float, ...]
    wait: float


class Trainer:
    """A model under DistributedDataParallel, and its optimizer."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model, self.loss = CASES[case]()
        self.parallel = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MB[case], gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self) -> Timing:
        """Train once."""
        transfers = timed_group.default().transfers
        dist.barrier()
        transfers.clear()
        begun = time.monotonic()
        self.optimizer.zero_grad()
        backward = self.gradients()
        ended = time.monotonic()
        self.optimizer.step()
        starts = tuple(t.posted - backward for t in transfers)
        return Timing(time.monotonic() - begun, ended - backward, starts, ended - backward - max(starts, default=0.0))

    def gradients(self) -> float:
        """Compute and reduce them; gives when the backward began."""
        loss = self.loss(self.parallel)
        backward = time.monotonic()
        loss.backward()
        return backward


class ReducedAfter(Trainer):
    """As plain, but the buckets are reduced when the backward has ended."""

    def gradients(self) -> float:
        """Compute them, then reduce them; gives when the backward began."""
        with self.parallel.no_sync():
            backward = super().gradients()
        gradients = [p.grad for p in reversed(list(self.model.parameters())) if p.grad is not None]
        most = int(BUCKET_MB[self.case] * (1 << 20))
        works = []
        for bucket in torch._utils._take_tensors(gradients, most):
            flat = torch._utils._flatten_dense_tensors(bucket)
            works.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in works:
            work.wait()
            flat /= RANKS
            for gradient, reduced in zip(bucket, torch._utils._unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(reduced)
        return backward


def paired(plain: Trainer, planned: Trainer, pairs: int) -> list[tuple[Timing, Timing]]:
    """Both models' steps, in turns; who begins a pair changes from one to the next."""
    rows = []
    for i in range(pairs):
        done = {t: t.step() for t in ((plain, planned) if i % 2 == 0 else (planned, plain))}
        rows.append((done[plain], done[planned]))
    return rows


def median_of(rows: list[float]) -> float:
    """The median, the largest of all ranks'."""
    value = torch.tensor([statistics.median(rows)], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def work(case: str, share: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What one rank does for one case; all ranks return the same rows."""
    torch.set_num_threads(1)
    group = timed_group.default()
    before = cpu_allocator.allocated_bytes()
    plain = Trainer(case)
    plain.step()
    cpu_allocator.reset_peak()
    for _ in range(3):
        plain.step()
    peak = cpu_allocator.peak_bytes() - before
    held = cpu_allocator.allocated_bytes() - before
    with plain.parallel.no_sync():  # the script's own speed, without a link
        backward = median_of([plain.step().backward for _ in range(args.pairs // 2 + 1)])
    plain.step()  # its gradients lie in DDP's buckets again, as they do in the pairs
    budget = "1.0x" if share == 1 else str(before + held + int(share * peak))
    session = Session(Settings(mode=RUN, budget=budget, solver_seconds=args.solver_seconds))
    session.watch_process()
    try:
        planned = Trainer(case)
        session.put_triggers([planned.model])
        for _ in range(WARM_UP_STEPS):
            planned.step()
        cpu_allocator.set_limit(None)  # the plain model's steps are not the planned one's to limit
        plan = session.engine.plan
        nbytes = sum(p.nbytes for p in plain.model.parameters())
        found = []
        for ratio in args.links:
            group.link = timed_group.Link(bytes_per_second=nbytes / (ratio * backward) if ratio else float("inf"))
            rows = paired(plain, planned, args.pairs)
            sides = [summary(rows, which, backward).items() for which in (0, 1)]
            found.append(
                {
                    "case": case,
                    "share": share,
                    "link": ratio,
                    "step_ratio": median_of([b.step / a.step for a, b in rows]),
                    "planned_overhead": plan.overhead,
                    "graphs": len(plan.graphs),
                    "pairs": args.pairs,
                    "backward_seconds": backward,
                    **{f"plain_{k}": v for k, v in sides[0]},
                    **{f"planned_{k}": v for k, v in sides[1]},
                }
            )
            group.link = timed_group.Link()
    finally:
        session.close()
    return found


def work_reduced_after(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """As ``work``, of plain steps that are reduced after the backward."""
    torch.set_num_threads(1)
    group = timed_group.default()
    plain, after = Trainer(case), ReducedAfter(case)
    paired(plain, after, 3)
    with plain.parallel.no_sync():
        backward = median_of([plain.step().backward for _ in range(args.pairs // 2 + 1)])
    nbytes = sum(p.nbytes for p in plain.model.parameters())
    found = []
    for ratio in args.links:
        group.link = timed_group.Link(bytes_per_second=nbytes / (ratio * backward) if ratio else float("inf"))
        rows = paired(plain, after, args.pairs)
        step_ratio = median_of([b.step / a.step for a, b in rows])
        found.append({"case": case, "link": ratio, "step_ratio": step_ratio, "pairs": args.pairs})
        found[-1] |= {"backward_seconds": backward, "plain_step_seconds": summary(rows, 0, backward)["step_seconds"]}
        group.link = timed_group.Link()
    return found


def summary(rows: list[tuple[Timing, Timing]], which: int, backward: float) -> dict[str, Any]:
    """Medians of one of the two models."""
    timings = [row[which] for row in rows]
    return {
        "step_seconds": median_of([t.step for t in timings]),
        "starts": [
            round(median_of(list(each)) / backward, 3) for each in zip(*(t.starts for t in timings), strict=True)
        ],
        "waits": round(median_of([t.wait for t in timings]) / backward, 3),
    }


def rank(args: argparse.Namespace) -> None:
    """Run as one of the ranks."""
    timed_group.register()
    dist.init_process_group("timed")
    if args.reduced_after:
        rows = work_reduced_after(args.rank_of, args)
    else:
        rows = work(args.rank_of, args.shares[0], args)
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def launch(case: str, share: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks for one case."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        words = ["--rank-of", case, "--shares", str(share), "--links", *map(str, args.links), "--out", str(out)]
        words += ["--pairs", str(args.pairs), "--solver-seconds", str(args.solver_seconds)]
        words += ["--reduced-after"] if args.reduced_after else []
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run([*torchrun, __file__, *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.6])
    parser.add_argument(
        "--links", nargs="+", type=float, default=[0.5, 1.0, 2.0], help="times the backward; 0: no link"
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--solver-seconds", type=float, default=10.0)
    parser.add_argument("--reduced-after", action="store_true", help="what it would cost to reduce after the backward")
    parser.add_argument("--out")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    if args.rank_of:
        rank(args)
        return
    if args.reduced_after:
        rows = [row for case in args.cases for row in launch(case, 1.0, args)]
        for row in rows:
            print(f"{row['case']:7} link {row['link']:3}  reduced after the backward: step x{row['step_ratio']:.3f}")
        if args.out:
            kept = json.loads(Path(args.out).read_text()) if Path(args.out).exists() else {}
            Path(args.out).write_text(json.dumps({**kept, "reduced_after": rows}, indent=1) + "\n")
        return
    rows = []
    for case in args.cases:
        for share in args.shares:
            for row in launch(case, share, args):
                rows.append(row)
                print(
                    f"{case:7} {share:4}x link {row['link']:3}  step x{row['step_ratio']:.3f} "
                    f"(planned {row['planned_overhead']:+.1%}, {row['graphs']} graphs)  "
                    f"plain {row['plain_step_seconds']:.3f} s, waits {row['plain_waits']:.2f}, "
                    f"planned waits {row['planned_waits']:.2f}\n"
                    f"   plain starts   {row['plain_starts']}\n   planned starts {row['planned_starts']}",
                    flush=True,
                )
    if args.out:
        kept = json.loads(Path(args.out).read_text()) if Path(args.out).exists() else {}
        found = {**kept, "torch": torch.__version__, "rows": rows}
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
