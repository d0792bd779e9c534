"""What monetrun is compared with: checkpoints by hand, ``torch.compile``, and torch's ``activation_memory_budget``."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from lib.compared_networks import Network, checkpoint_blocks, checkpoint_segments

EAGER, EAGER_CHANNELS_LAST = "eager", "eager, channels-last"
BLOCKS, SEGMENTS = "checkpoint, each block", "checkpoint, sqrt(n)"
AOT, PARTITIONER = "torch.compile, aot_eager", "activation_memory_budget, aot_eager"
INDUCTOR, INDUCTOR_BUDGET = "torch.compile, inductor", "activation_memory_budget, inductor"
SOLVERS = ("dp", "ilp", "greedy")


class SamePartition(Exception):
    """Torch's partitioner has chosen what it chose for an earlier setting."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train a network.

    Attributes:
        name: of the method.
        setting: of the method; empty if it has none.
        change: changes a new model; gives what there is to say of it.
        around: entered before the first step, and left after the last.
        warm_up: steps before those that are measured.
    """

    name: str
    setting: str
    change: Callable[[nn.Module], dict[str, Any]]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    warm_up: int = 3


@dataclass
class Partitions:
    """Compiles by torch's partitioner with eager's kernels, as ``aot_eager`` does, each partition once.

    Attributes:
        seen: the settings by the code of the forward module, which returns what is saved.
        setting: now compiled.
    """

    seen: dict[str, str] = field(default_factory=dict)
    setting: str = ""

    def compile(self, model: nn.Module) -> dict[str, Any]:
        """Compile the model at its first step.

        That step raises SamePartition where an earlier setting led to the same code.
        """
        backend = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=lambda module, inputs: make_boxed_func(module.forward),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        model.compile(backend=lambda module, inputs: backend(module, inputs), dynamic=False)
        return {}

    def _forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        first = self.seen.setdefault(module.code, self.setting)
        if first != self.setting:
            raise SamePartition(first)
        return make_boxed_func(module.forward)

    @contextlib.contextmanager
    def under(self, setting: str, **settings: Any) -> Iterator[None]:
        """Compile with these settings of ``torch._functorch.config`` meanwhile."""
        self.setting = setting
        with config.patch(**settings):
            yield


def same_as(error: Exception) -> str:
    """The earlier setting with the same partition, where ``error`` says so; else empty."""
    inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    return str(inner) if isinstance(inner, SamePartition) else ""


def by_hand(network: Network) -> list[Method]:
    """Checkpoints around each block, and around sqrt(n) segments."""
    return [
        Method(BLOCKS, "", lambda model: {"checkpoints": checkpoint_blocks(model, network)}, warm_up=2),
        Method(SEGMENTS, "", lambda model: {"checkpoints": checkpoint_segments(model, network)}, warm_up=2),
    ]


def by_partitioner(budgets: Sequence[float]) -> list[Method]:
    """``torch.compile`` with eager's kernels: by itself, and at each budget with each of torch's solvers."""
    partitions = Partitions()
    methods = [Method(AOT, "", partitions.compile, lambda: partitions.under(AOT, activation_memory_budget=1.0))]
    for budget in budgets:
        for solver in SOLVERS:
            setting = f"{solver} {budget:g}"

            def around(setting: str = setting, budget: float = budget, solver: str = solver) -> Any:
                return partitions.under(
                    setting, activation_memory_budget=budget, activation_memory_budget_solver=solver
                )

            methods.append(Method(PARTITIONER, setting, partitions.compile, around))
    return methods


def by_inductor(budgets: Sequence[float]) -> list[Method]:
    """``torch.compile``: by itself, and at each budget with torch's default solver."""

    def compile_(model: nn.Module) -> dict[str, Any]:
        model.compile(backend="inductor", dynamic=False)
        return {}

    methods = [Method(INDUCTOR, "", compile_)]
    for budget in budgets:
        around = config.patch(activation_memory_budget=budget)
        methods.append(Method(INDUCTOR_BUDGET, f"dp {budget:g}", compile_, lambda around=around: around))
    return methods


def channels_last(model: nn.Module) -> dict[str, Any]:
    """Bring the weights of convolutions into this memory format, which their results then have."""
    model.to(memory_format=torch.channels_last)
    return {}


def no_inductor(device: torch.device) -> str:
    """Why inductor cannot compile for the device; empty if it can."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton is not there"
    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler"
    return "" if shutil.which(compiler) else f"the C++ compiler {compiler} is not there"
