"""What a planned step costs beside the plain one: paired, interleaved, medians; and what torch's own planner reaches.

    python recipes/bench_step.py --cases resnet50 small_resnet unet gpt --shares 1.0 0.6 --out recipes/results/step.json

Each case is a model of tests/support/networks.py with its loss. In one process, the plain model and the planned one
train in turn, step by step; times are medians over the pairs, peaks are the allocator's.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from monetrun.capture import cpu_allocator
from monetrun.core.errors import InfeasibleBudget
from monetrun.runtime import worker
from monetrun.runtime.settings import RUN, Settings
from support import networks


def of_images(make, batch, size, classes):
    def build():
        torch.manual_seed(0)
        model = make()
        x, y = networks.images(batch, size, classes)
        return model, lambda: F.cross_entropy(model(x), y)

    return build


def unet():
    torch.manual_seed(0)
    model = networks.UNet()
    x, _ = networks.images(4, 128)
    y = (x.sum(1) > 0).long()
    return model, lambda: F.cross_entropy(model(x), y)


def gpt():
    torch.manual_seed(0)
    model = networks.GPT()
    batch = networks.tokens(8, 256, 0)
    return model, lambda: model(batch)["loss"]


CASES = {
    "resnet50": of_images(torchvision.models.resnet50, 16, 160, 1000),
    "mobilenet_v2": of_images(torchvision.models.mobilenet_v2, 16, 160, 1000),
    "small_resnet": of_images(networks.SmallResNet, 16, 128, 10),
    "unet": unet,
    "gpt": gpt,
}


class Trainer:
    """A model and its optimizer; `step` gives seconds and the allocator's peak over what lay there before."""

    def __init__(self, build):
        self.model, self.loss = build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self):
        """One training step: seconds, peak bytes, loss."""
        cpu_allocator.reset_peak()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start, cpu_allocator.peak_bytes(), loss.item()


def alone(build, steps):
    """The plain step's peak in a process that holds nothing else."""
    before = cpu_allocator.allocated_bytes()
    trainer = Trainer(build)
    return max(trainer.step()[1] for _ in range(steps)) - before


def bench(name, share, pairs, seconds):
    build = CASES[name]
    plain_peak = alone(build, 2)
    base = cpu_allocator.allocated_bytes()
    plain = Trainer(build)
    plain.step(), plain.step()
    held = cpu_allocator.allocated_bytes() - base
    # from 1.0x on: of the simulated plain peak, which holds the other model too
    budget = f"{share}x" if share >= 1 else str(int(share * plain_peak) + held)
    session = worker.Session(Settings(mode=RUN, budget=budget, solver_seconds=seconds))
    session.watch_process()
    try:
        planned = Trainer(build)
        session.put_triggers([planned.model])
        for _ in range(6):  # the recorded step, compilation, and the timed calls
            planned.step()
        cpu_allocator.set_limit(None)  # the plain model's steps are not the planned one's to limit
        rows = []
        for i in range(pairs):
            first, second = (plain, planned) if i % 2 == 0 else (planned, plain)
            a, b = first.step(), second.step()
            rows.append((a, b) if i % 2 == 0 else (b, a))
        plan = session.engine.plan
        peak = max(b[1] for _, b in rows) - held
    finally:
        session.close()
    return {
        "case": name,
        "share": share,
        "plain_peak_bytes": plain_peak,
        "planned_peak_bytes": plan.planned_peak_bytes - held,
        "measured_peak_bytes": peak,
        "measured_share": peak / plain_peak,
        "planned_overhead": plan.overhead,
        "bound": plan.bound,
        "step_ratio": statistics.median(b[0] / a[0] for a, b in rows),
        "plain_seconds": statistics.median(a[0] for a, b in rows),
        "planned_seconds": statistics.median(b[0] for a, b in rows),
        "pairs": pairs,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.6, 0.5])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--solver-seconds", type=float, default=20.0)
    parser.add_argument("--out")
    args = parser.parse_args()
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    rows = []
    for name in args.cases:
        for share in args.shares:
            try:
                row = bench(name, share, args.pairs, args.solver_seconds)
            except InfeasibleBudget as error:
                print(f"{name:13} {share:4}x  {error.message.splitlines()[0]}", flush=True)
                continue
            rows.append(row)
            print(
                f"{name:13} {share:4}x  plain {row['plain_peak_bytes'] / 2**20:7.1f} MiB  "
                f"planned {row['planned_peak_bytes'] / 2**20:7.1f}  measured {row['measured_peak_bytes'] / 2**20:7.1f} "
                f"({row['measured_share']:.3f}x)  overhead {row['planned_overhead']:+.1%} planned  "
                f"step x{row['step_ratio']:.3f}",
                flush=True,
            )
            torch._dynamo.reset()
    if args.out:
        Path(args.out).write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
