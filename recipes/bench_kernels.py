"""Bytes per second of the element-by-element kernels beside a plain copy of as many bytes, in the same run.

Usage: python recipes/bench_kernels.py [--threads 2] [--mib 64] [--rounds 15] [--out recipes/results/kernels.json]
       python recipes/bench_kernels.py --device cuda --mib 512 [--json]

A kernel's bytes are those it reads and writes; the copy beside it, ``copy_`` from one tensor to another, moves as many.
Both run in turns, and the ratio is the median of the rounds' ratios, so that other load on the machine affects both.
Under heavy load, times are multiples of the scheduler's time slices; the shortest time of each is given too. The C
library is configured to keep freed memory: the system fills new pages with zeros, which would take longer than any of
these kernels.

On a GPU, device events around several calls give the time; tensors should be larger than its L2 cache (--mib 512).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from monetrun.ops import kernels

monet = torch.ops.monet
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAN = math.nan


Seconds = Callable[[Callable[[], object]], float]  # what a call takes


def cases(dtype: torch.dtype, nbytes: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    """(name, call, bytes it moves) for each kernel on a tensor of about ``nbytes``, on torch's default device."""
    channels, side = 64, 56
    images = max(1, nbytes // (channels * side * side * torch.empty((), dtype=dtype).element_size()))
    x = torch.randn(images, channels, side, side).to(dtype)
    size = x.numel() * x.element_size()
    mask = monet.range_mask(x, 0.0, NAN)
    bits = mask.numel()
    over = x.clone()
    yield "range_mask", lambda: monet.range_mask(x, 0.0, 6.0), size + bits
    yield "nonzero_mask", lambda: monet.nonzero_mask(x), size + bits
    yield "mask_backward", lambda: monet.mask_backward(x, mask, 0.0), 2 * size + bits
    yield "mask_backward slope", lambda: monet.mask_backward(x, mask, 0.1), 2 * size + bits
    yield "mask_backward_", lambda: monet.mask_backward_(over, mask, 0.0), 2 * size + bits
    yield "mask_scale", lambda: monet.mask_scale(x, mask, 2.0), 2 * size + bits
    yield "mask_scale_", lambda: monet.mask_scale_(over, mask, 1.0), 2 * size + bits
    if dtype in (torch.float32, torch.float64):
        result = torch.nn.functional.hardswish(x)
        right = monet.range_mask(x, -1.5, NAN)
        yield "hardswish output backward", lambda: monet.hardswish_output_backward(x, result, right), 3 * size + bits
    weight, bias, mean, invstd = (torch.rand(channels).to(dtype) for _ in range(4))
    saved = weight, bias, mean, invstd
    yield "batch_norm_act", lambda: monet.batch_norm_act(x, *saved, None, 0.0, NAN), 2 * size
    yield "batch_norm_act residual", lambda: monet.batch_norm_act(x, *saved, over, 0.0, NAN), 3 * size
    last, last_over = (t.contiguous(memory_format=torch.channels_last) for t in (x, over))
    yield "batch_norm_act channels-last", lambda: monet.batch_norm_act(last, *saved, None, 0.0, NAN), 2 * size
    yield (
        "batch_norm_act channels-last residual",
        lambda: monet.batch_norm_act(last, *saved, last_over, 0.0, NAN),
        3 * size,
    )
    if dtype not in (torch.float32, torch.float64):
        return  # plans use the kernels below with float32 and float64 only
    names = ("batch-norm", invstd), ("group-norm", torch.rand(images, 8).to(dtype))
    for (name, rstd), (layout, y, g) in itertools.product(names, (("", x, over), (" channels-last", last, last_over))):
        call = partial(monet.channel_norm_output_backward, g, y, rstd, weight, bias, [True] * 3)
        yield f"{name} output backward{layout}", call, 5 * size  # sums first, then gradients: both are read twice


def keep_freed_memory() -> None:
    """Make malloc reuse freed memory for tensors of any size (glibc)."""
    trim_threshold, mmap_max = -1, -4
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(mmap_max, 0)
        library.mallopt(trim_threshold, 2**31 - 1)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def device_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """What a call takes on the GPU: the mean of several, between two events."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(repeats):
        call()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3 / repeats


def measure(call: Callable[[], object], moved_bytes: int, rounds: int, seconds: Seconds = seconds) -> dict[str, float]:
    """Bytes per second of ``call`` and of a copy of as many bytes, and their ratio: medians, and the best of each."""
    source = torch.ones(moved_bytes // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def copy() -> object:
        return target.copy_(source)

    for _ in range(2):
        call(), copy()
    pairs = [(seconds(call), seconds(copy)) for _ in range(rounds)]
    kernel, plain = zip(*pairs, strict=True)
    return {
        "bytes_per_second": round(moved_bytes / statistics.median(kernel)),
        "copy_bytes_per_second": round(moved_bytes / statistics.median(plain)),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
        "best_bytes_per_second": round(moved_bytes / min(kernel)),
        "best_copy_bytes_per_second": round(moved_bytes / min(plain)),
        "best_ratio": round(min(plain) / min(kernel), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64, help="size of the tensors")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="kernels whose name begins so")
    parser.add_argument("--dtype", default="", help="one dtype, such as bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="print each row as a line of JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not kernels.load(options.device):
        reason = f"no native kernels: {kernels.unavailable_reason(options.device)}"
        if not options.json:
            raise SystemExit(reason)
        print(json.dumps({"skipped": reason}))
        return
    torch.set_num_threads(options.threads)
    torch.set_default_device(options.device)
    if options.device == "cpu":
        keep_freed_memory()
    results = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        if options.dtype not in ("", name):
            continue
        for kernel, call, moved_bytes in cases(dtype, options.mib << 20):
            if not kernel.startswith(options.only):
                continue
            row = measure(call, moved_bytes, options.rounds, seconds if options.device == "cpu" else device_seconds)
            results.append({"kernel": kernel, "dtype": name, "moved_bytes": moved_bytes, **row})
            if options.json:
                print(json.dumps(results[-1]), flush=True)
                continue
            rates = f"{row['best_bytes_per_second'] / 2**30:6.2f} of {row['best_copy_bytes_per_second'] / 2**30:6.2f}"
            ratios = f"best {row['best_ratio']:.2f}  median {row['ratio']:.2f}"
            print(f"{kernel:40s} {name:9s} {rates} GiB/s  {ratios}", flush=True)
    if options.out:
        document = {
            "command": f"python recipes/bench_kernels.py --threads {options.threads} --mib {options.mib}"
            f" --rounds {options.rounds}" + " --device cuda" * (options.device == "cuda"),
            "torch": torch.__version__,
            "processor": _processor() if options.device == "cpu" else torch.cuda.get_device_name(),
            "threads": options.threads,
            "tensor_mib": options.mib,
            "rounds": options.rounds,
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "kernels": results,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
