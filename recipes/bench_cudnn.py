"""cuDNN's plans beside the convolution that torch chooses, for the convolutions of whole networks: seconds, workspaces.

    python recipes/bench_cudnn.py resnet50 unet --most 12

Each line is JSON: one convolution or one of its gradients, torch's own seconds and workspace, and each plan's, with
its largest difference from torch's result over the largest value. The costliest convolutions come first. It needs a GPU
and nvidia-cudnn-frontend; seconds are medians between device events.
"""

from __future__ import annotations

import json
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
from torch import nn

from gpu_training import NETWORKS
from monetrun.ops import cudnn
from monetrun.ops.cudnn import Problem

aten = torch.ops.aten
OPERATIONS = ("fprop", "dgrad", "wgrad")
WORST_DIFFERENCE = 0.02  # of the largest value; TensorFloat-32 and other orders of adding up


@dataclass(frozen=True, slots=True)
class Convolution:
    """One, as a network runs it.

    Attributes:
        image, filter, response: shapes.
        window: stride, padding and dilation.
        groups: of channels.
        count: how often the networks run it.
    """

    image: tuple[int, ...]
    filter: tuple[int, ...]
    response: tuple[int, ...]
    window: tuple[tuple[int, ...], ...]
    groups: int
    count: int = 1

    @property
    def operations(self) -> int:
        """Multiplications, of all its runs."""
        n, k, *area = self.response
        _, c, *size = self.filter
        return self.count * n * k * c * torch.Size(area).numel() * torch.Size(size).numel()


def convolutions(names: Sequence[str], small: bool) -> list[Convolution]:
    """Those of the networks, each once, the costliest first; no memory is allocated for them."""
    found: dict[tuple[Any, ...], int] = {}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        window = (module.stride, module.padding, module.dilation)
        key = (tuple(inputs[0].shape), tuple(module.weight.shape), tuple(output.shape), window, module.groups)
        found[key] = found.get(key, 0) + 1

    for name in names:
        size = NETWORKS[name].small if small else NETWORKS[name].paper
        with torch.device("meta"):
            model = NETWORKS[name].make(size).train()
            for module in model.modules():
                if isinstance(module, nn.Conv2d):
                    module.register_forward_hook(note)
            model(torch.empty(size.batch, 3, *size.example))
    return sorted((Convolution(*key, count) for key, count in found.items()), key=lambda c: -c.operations)


def timed(call: Callable[[], object], rounds: int) -> tuple[float, int]:
    """Median seconds of a call, and the most it allocates, its result included."""
    call()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    allocated = torch.cuda.max_memory_allocated() - before
    seconds = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(seconds), allocated


def rows(found: Convolution, dtype: torch.dtype, last: bool, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for the convolution and one for each of its gradients."""
    form = torch.channels_last if last else torch.contiguous_format
    image, weight, grad = (
        torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=form)
        for shape in (found.image, found.filter, found.response)
    )
    values = {"image": image, "filter": weight, "response": grad}
    window = tuple(list(w) for w in found.window)
    arguments = (*window, False, [0] * len(window[0]), found.groups)

    def by_torch(operation: str) -> torch.Tensor:
        if operation == "fprop":
            return aten.convolution.default(image, weight, None, *arguments)
        mask = [operation == "dgrad", operation == "wgrad", False]
        results = aten.convolution_backward.default(grad, image, weight, None, *arguments, mask)
        return results[0 if operation == "dgrad" else 1]

    for operation in OPERATIONS:
        sizes = found.image, found.filter, found.response
        problem = Problem.of(operation, sizes, window, dtype, last)
        first, second = (values[role] for role in problem.roles[:2])
        expected = by_torch(operation)
        seconds, allocated = timed(partial(by_torch, operation), rounds)
        plans = []
        for plan in cudnn.plans_on(problem, cudnn.tensor_float_allowed(), image.device):
            given = cudnn.compute(problem, plan, first, second)
            if given is None:
                plans.append({"plan": plan, "failed": True})
                continue
            difference = float((given - expected).abs().max() / expected.abs().max())
            call = partial(cudnn.compute, problem, plan, first, second)
            of_plan, allocated_by_plan = timed(call, rounds)
            workspace = allocated_by_plan - expected.nbytes
            figures = {"plan": plan, "seconds": of_plan, "workspace_bytes": workspace, "difference": difference}
            plans.append(figures)
        yield {
            "operation": operation,
            "image": list(found.image),
            "filter": list(found.filter),
            "stride": window[0],
            "groups": found.groups,
            "count": found.count,
            "dtype": str(dtype).removeprefix("torch."),
            "channels_last": last,
            "torch_seconds": seconds,
            "torch_workspace_bytes": allocated - expected.nbytes,
            "plans": plans,
        }


@click.command()
@click.argument("networks", nargs=-1, type=click.Choice([n for n in NETWORKS if n != "gpt"]))
@click.option("--small", is_flag=True, help="Small inputs.")
@click.option("--most", type=click.IntRange(1), default=16, show_default=True, help="Convolutions to measure.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32", show_default=True)
@click.option("--channels-last", is_flag=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
def main(networks: tuple[str, ...], small: bool, most: int, dtype: str, channels_last: bool, rounds: int) -> None:
    """Measure the convolutions of NETWORKS; default: resnet50."""
    reason = cudnn.unavailable_reason()
    if reason is not None:
        click.echo(json.dumps({"skipped": reason}))
        return
    for found in convolutions(networks or ("resnet50",), small)[:most]:
        try:
            for row in rows(found, getattr(torch, dtype), channels_last, rounds):
                wrong = [p["plan"] for p in row["plans"] if not p.get("difference", 0.0) <= WORST_DIFFERENCE]
                click.echo(json.dumps(row))
                if wrong:
                    where = f"{row['operation']} of {found.image} by {found.filter}"
                    click.echo(json.dumps({"error": f"{where}: {', '.join(wrong)} differ from torch's result"}))
        except RuntimeError as error:  # the next convolution may run
            what = f"{found.image} by {found.filter}: {str(error).splitlines()[0]}"
            click.echo(json.dumps({"error": what, "traceback": traceback.format_exc()}))


if __name__ == "__main__":
    main()
