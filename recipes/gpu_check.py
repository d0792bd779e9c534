"""Check and measure monetrun on a GPU: kernels, conformance, and the paper's five networks at their batch sizes.

    python recipes/gpu_check.py                              # one GPU, under 9 minutes, no network
    python recipes/gpu_check.py --resume                     # the cells that the last run had no time for
    python recipes/gpu_check.py --device cpu --scale small   # the same steps on a machine without a GPU

Each cell is one network in one precision (fp32, or bf16 autocast with channels-last), trained in one way: eagerly with
``cudnn.benchmark``, under monetrun's plan for a share of the activation peak, with ``torch.utils.checkpoint`` around
each block, or by ``torch.compile`` with that ``activation_memory_budget``. A cell's model and the eager one train in
turn, step by step, in one process; seconds are medians, and peaks are the allocator's, without the other model's bytes.

The activation peak is the peak of an eager step, less what stays allocated after it (weights, buffers, gradients,
optimizer state, batch); the budget for a share is that share of it, plus what stays. Results are written after every
cell, so that they survive a kill. Without the packages for integer programs, plans come from the greedy search; with
nvidia-cudnn-frontend, plans also choose among cuDNN's plans for a convolution.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read when CUDA is first used

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.googlenet import Inception
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import Bottleneck

from capture_instances import Double, UNet
from lib.cells import HEADINGS, Results
from monetrun.capture.meter import Meter, meter_for
from monetrun.core.options import Options, parse_kinds
from monetrun.ops import cudnn, kernels
from step_pairs import Recorded, Reference, Trainer, first_line, measured, paired, run_planned, warm_peak

ROOT = Path(__file__).resolve().parent.parent
SOLVER_PACKAGES = ("cvxpy", "pyscipopt", "highspy")
PRECISIONS = ("fp32", "bf16")
COMPILE_TIME_SHARE = 0.25  # of the whole, kept for torch.compile, whose cells come last


# ---- the networks


@dataclass(frozen=True, slots=True)
class Network:
    """A network: its constructor, batch size, image height and width, and the blocks that a user would checkpoint."""

    make: Callable[[], nn.Module]
    batch: int
    size: tuple[int, int]
    blocks: Callable[[nn.Module], list[nn.Module]]
    small: tuple[int, tuple[int, int]] = (4, (64, 64))


def of_type(*types: type[nn.Module]) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda model: [m for m in model.modules() if isinstance(m, types)]


def vgg_stages(model: nn.Module) -> list[nn.Module]:
    """Make one module of the convolutions up to each pooling; gives these modules."""
    stages, stage = [], []
    for layer in model.features:
        stage.append(layer)
        if isinstance(layer, nn.MaxPool2d):
            stages.append(nn.Sequential(*stage))
            stage = []
    model.features = nn.Sequential(*stages, *stage)
    return stages


tv = torchvision.models
NETWORKS = {
    "resnet50": Network(tv.resnet50, 184, (224, 224), of_type(Bottleneck)),
    "mobilenet_v2": Network(tv.mobilenet_v2, 272, (224, 224), of_type(InvertedResidual)),
    "googlenet": Network(
        lambda: tv.googlenet(aux_logits=False, init_weights=False), 320, (224, 224), of_type(Inception)
    ),
    "unet": Network(UNet, 11, (416, 608), of_type(Double), (2, (32, 32))),
    "vgg16": Network(lambda: tv.vgg16(init_weights=False), 176, (224, 224), vgg_stages),
}
SMALL = ("mobilenet_v2", "unet")


def build(network: Network, precision: str, device: torch.device, small: bool) -> Trainer:
    """The network with random images on ``device``, ready to train."""
    torch.manual_seed(0)
    model = network.make().to(device).train()
    batch, size = network.small if small else (network.batch, network.size)
    x = torch.randn(batch, 3, *size, device=device)
    if precision == "bf16":
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    classes = torch.arange(batch, device=device)
    pixels = (x.mean(1, keepdim=True) > 0).float() if isinstance(model, UNet) else None

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            if pixels is not None:
                return F.binary_cross_entropy_with_logits(model(x), pixels)
            return F.cross_entropy(model(x), classes)

    return Trainer(model, loss, meter_for(device))


# ---- cells


class Case:
    """One network in one precision, trained in all ways; the models are made when they are first needed."""

    def __init__(self, network: Network, make: Callable[[], Trainer], meter: Meter, args: argparse.Namespace) -> None:
        self.network, self.make, self.meter, self.args = network, make, meter, args

    @functools.cached_property
    def plain(self) -> Reference:
        """The eager model, which the others run beside."""
        return Reference(self.make, self.meter)

    @functools.cached_property
    def recorded(self) -> Recorded:
        """The model that trains under plans."""
        self.plain  # noqa: B018  (first, since its peak is measured with no other model allocated)
        return Recorded(self.make)

    def eager(self, share: float) -> dict[str, Any]:
        """Torch alone."""
        plain = self.plain
        return {
            "allocated_bytes": plain.peak.allocated,
            "reserved_bytes": plain.peak.reserved,
            "held_bytes": plain.held_bytes,
            "activation_bytes": plain.activation_bytes,
            "seconds": statistics.median(plain.trainer.step() for _ in range(self.args.pairs)),
            "ratio": 1.0,
            "measured_share": 1.0,
        }

    def planned(self, share: float) -> dict[str, Any]:
        """Under the plan for ``share`` of the activation peak."""
        plain, recorded = self.plain, self.recorded
        budget = plain.others() + plain.held_bytes + int(share * plain.activation_bytes)
        options = Options(self.args.solver_seconds, implementations=parse_kinds(self.args.implementations))
        started = time.perf_counter()
        plan = recorded.plan(budget, self.args.algorithm, options)
        seconds = time.perf_counter() - started
        return {"solver_seconds": seconds, **run_planned(plain, recorded, plan, self.args.pairs)}

    def checkpoint(self, share: float) -> dict[str, Any]:
        """With ``torch.utils.checkpoint`` around each block."""

        def make() -> Trainer:
            trainer = self.make()
            for block in self.network.blocks(trainer.model):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            return trainer

        return self._beside(make)

    def compile(self, share: float) -> dict[str, Any]:
        """With torch's own planner, whose budget is ``share`` of the bytes that it would save."""

        def make() -> Trainer:
            trainer = self.make()
            trainer.model.compile(backend=self.args.compile_backend, dynamic=False)
            return trainer

        try:
            with torch._functorch.config.patch(activation_memory_budget=share):
                return self._beside(make)
        finally:
            torch._dynamo.reset()

    def _beside(self, make: Callable[[], Trainer]) -> dict[str, Any]:
        plain = self.plain
        self.__dict__.pop("recorded", None)  # free its memory
        started = time.perf_counter()
        trainer = make()
        peak = warm_peak(trainer).less(plain.others())
        rows = paired(plain.trainer, trainer, self.args.pairs)
        return {**measured(plain, peak, rows), "seconds_until_measured": time.perf_counter() - started}


# ---- kernels and conformance


def build_kernels(device_type: str) -> dict[str, Any]:
    started = time.perf_counter()
    reason = kernels.prebuild(device_type)
    loaded = kernels.load(device_type)
    reason = reason or kernels.unavailable_reason(device_type)
    return {"loaded": loaded, "reason": reason, "seconds": time.perf_counter() - started}


def conformance(device_type: str, seconds: float, tests: Sequence[str]) -> dict[str, Any]:
    """Run the tests of implementations and kernels on the device, in a process of their own."""
    if importlib.util.find_spec("pytest") is None:
        return {"status": "skipped", "reason": "pytest is missing"}
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") and (os.cpu_count() or 1) >= 8 else []
    options = ["-o", "addopts=-q", "-p", "no:cacheprovider", "--tb=line", *parallel]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "MONETRUN_TEST_DEVICE": device_type},
            capture_output=True,
            text=True,
            timeout=max(1.0, seconds),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "skipped", "reason": f"stopped after {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    return {
        "status": "ok" if done.returncode == 0 else "failed",
        "summary": lines[-1] if lines else first_line(RuntimeError(done.stderr)),
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
        "seconds": time.perf_counter() - started,
    }


# ---- the run


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", choices=("paper", "small"), default="paper", help="small: small images, 2 networks")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[0.5, 1.0, 0.65, 0.33], help="in order of importance"
    )
    parser.add_argument("--pairs", type=int, default=5, help="steps of each model that are timed in turns")
    parser.add_argument("--seconds", type=float, default=520.0, help="for everything")
    parser.add_argument("--solver-seconds", type=float, default=3.0, help="for each plan")
    parser.add_argument("--implementations", default="all", help="that plans may use, as for monetrun itself")
    parser.add_argument("--algorithm", help="default: hierarchical, or greedy where its packages are missing")
    parser.add_argument("--compile-backend", help="default: inductor, or aot_eager_decomp_partition on a CPU")
    parser.add_argument("--skip", nargs="+", choices=("kernels", "conformance", "checkpoint", "compile"), default=[])
    parser.add_argument("--resume", action="store_true", help="keep the cells that have been measured")
    parser.add_argument("--out", type=Path, help="default on a GPU: recipes/results/gpu_<its name>.json")
    args = parser.parse_args(argv)
    args.missing = [name for name in SOLVER_PACKAGES if importlib.util.find_spec(name) is None]
    args.algorithm = args.algorithm or ("greedy" if args.missing else "hierarchical")
    args.compile_backend = args.compile_backend or (
        "inductor" if args.device == "cuda" else "aot_eager_decomp_partition"
    )
    args.networks = args.networks or (SMALL if args.scale == "small" else list(NETWORKS))
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    started = time.monotonic()
    args = arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --device cpu --scale small runs the same steps here")
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    if args.device == "cuda" and args.out is None:
        args.out = ROOT / "recipes" / "results" / f"gpu_{re.sub('[^0-9a-z]+', '_', name.lower()).strip('_')}.json"
    torch.backends.cudnn.benchmark = True
    results = Results(about(args, name), args.out, args.resume)
    if args.missing:
        print(f"missing: {', '.join(args.missing)}: plans are made by --algorithm {args.algorithm}", flush=True)
    if "kernels" not in args.skip:
        results.note("kernels", build_kernels(args.device))
        print(f"kernels: {results.document['kernels']}", flush=True)
    if "conformance" not in args.skip and results.document.get("conformance", {}).get("status") != "ok":
        names = ("implementations", "whole_networks", "kernels", "norm_kernels", "layout", "parts", "cudnn")
        tests = [str(ROOT / "tests" / "ops" / f"test_{name}.py") for name in names]
        results.note("conformance", conformance(args.device, 0.35 * args.seconds, tests))
        print(f"conformance: {results.document['conformance']}", flush=True)
    print(HEADINGS, flush=True)
    deadline = started + args.seconds
    before_compile = deadline - (0.0 if "compile" in args.skip else COMPILE_TIME_SHARE * args.seconds)
    meter = meter_for(device)
    for methods, end in ((("eager", "planned", "checkpoint"), before_compile), (("compile",), deadline)):
        for precision in args.precisions:
            for network in args.networks:
                make = functools.partial(build, NETWORKS[network], precision, device, args.scale == "small")
                case = Case(NETWORKS[network], make, meter, args)
                for method in methods:
                    if method in args.skip:
                        continue
                    for share in args.shares if method in ("planned", "compile") else (None,):
                        key = {"network": network, "precision": precision, "method": method, "share": share}
                        results.cell(key, getattr(case, method), end)
                del case
    results.note("seconds", time.monotonic() - started)
    return results.document


def about(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The device and the settings with which the cells are measured."""
    return {
        "device": name,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if args.device == "cuda" else None,
        "cudnn_plans": cudnn.unavailable_reason() or "offered",
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "allocator": os.environ["PYTORCH_CUDA_ALLOC_CONF"],
        "threads": torch.get_num_threads(),
        "scale": args.scale,
        "algorithm": args.algorithm,
        "implementations": args.implementations,
        "compile_backend": args.compile_backend,
        "missing": args.missing,
    }


if __name__ == "__main__":
    main()
