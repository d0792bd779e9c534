"""A run of ``monetrun check``: the values of the first training step are kept, and a few steps are measured.

Three such runs are compared: under a plan, plain, and plain in float64. Each is a process of its own, so that the
script's own loss and optimizers are part of the step, and no run's memory is counted in another's.
"""

from __future__ import annotations

import atexit
import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from monetrun.planning.check import BUFFER, GRADIENT, LOSS, CheckedRun, OperatorSeconds
from monetrun.runtime import float64, probe, trial_checkpoints
from monetrun.runtime.call_timing import OperatorTiming
from monetrun.runtime.session import Session
from monetrun.runtime.settings import CHECK, CHECK_FLOAT64, Settings

# Under a plan the third to fifth calls of a graph are timed, and from the third step on everything lies where it stays.
_MEASURED_STEPS = 5
# Where an optimizer steps more rarely than others, it is not waited for longer.
_MOST_STEPS = 4


class CheckedSession(Session):
    """Keeps what the first training step computes, and ends the process when all is known.

    Args:
        settings: of the process; their mode is one of ``CHECKS``.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._folder = Path(settings.record_file + probe.VALUES)
        self._folder.mkdir()
        self._files = 0
        self._models: list[nn.Module] = []
        self._weights, self._inputs, self._random = hashlib.blake2b(), hashlib.blake2b(), ""
        self._kept: set[int] = set()  # optimizers whose gradients are kept
        self._steps: Counter[int] = Counter()
        self._complete = False

    def watch_process(self) -> None:
        """As ``Session``; without other ranks, and with the same random numbers in each run."""
        super().watch_process()
        probe.stand_in_for_the_other_ranks(self.settings.world_size, self._undo)
        self._has_stepped = trial_checkpoints.end_before(self._before_a_checkpoint, self._undo, self.settings)
        torch.manual_seed(0)  # a script that sets no seed begins with another one each time
        random.seed(0)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(0)
        atexit.register(self._leave)

    # ---- what the script does

    def backward_begins(self, roots: Iterable[Any], create_graph: bool) -> None:
        """Keep the loss."""
        roots = list(roots)
        if not self._complete:
            names = (f"{self._backwards + 1}" + f".{k}" * (len(roots) > 1) for k in range(len(roots)))
            self._keep(LOSS, dict(zip(names, roots, strict=False)))
        super().backward_begins(roots, create_graph)

    def step_begins(self, optimizer: Optimizer) -> None:
        """Keep the gradients."""
        self._keep_gradients(optimizer)
        super().step_begins(optimizer)

    def step_within_backward(self, optimizer: Optimizer, ended: bool) -> None:
        """Keep the gradients: at the backward's end the hook may have dropped them."""
        if not ended:
            self._keep_gradients(optimizer)
        super().step_within_backward(optimizer, ended)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Keep the gradients, if the closure has computed them."""
        self._keep_gradients(optimizer)
        super().closure_ended(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """The first step is complete once each optimizer has made its own; then a plain run ends."""
        super().step_ended(optimizer)
        if optimizer not in self.stepped:
            return
        self._steps[id(optimizer)] += 1
        if not self._complete and (all(o in self.stepped for o in self.optimizers) or self._made >= _MOST_STEPS):
            self._complete = True
            buffers = [(self._prefix(k) + n, b) for k, m in enumerate(self._models) for n, b in m.named_buffers()]
            self._keep(BUFFER, dict(buffers))
        if self._complete and (self.settings.mode != CHECK or self._made >= _MEASURED_STEPS):
            self._leave()

    def _before_a_checkpoint(self) -> None:
        self._leave()
        probe.leave_unseen("it writes a checkpoint before all optimizers have made a step", self.settings.record_file)

    @property
    def _made(self) -> int:
        """Steps of the optimizer that has made most."""
        return max(self._steps.values(), default=0)

    def _plan_module(self, module: nn.Module) -> Callable[..., Any]:
        """A model is called in training: under the plan, or as it is."""
        probe.begin(self.settings.record_file)
        run = super()._plan_module(module) if self.settings.mode == CHECK else self._as_it_is(module)
        if any(module is known for known in self._models):
            return run

        def first(*args: Any, **kwargs: Any) -> Any:
            self._called(module, args, kwargs)
            if self.settings.mode == CHECK_FLOAT64:
                float64.convert(module)
            return run(*args, **kwargs)

        return first

    def _as_it_is(self, module: nn.Module) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.settings.mode == CHECK_FLOAT64:
                args, kwargs = float64.converted((args, kwargs))
            with self._nesting.entered():
                return module._call_impl(*args, **kwargs)

        return run

    # ---- what is kept

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The first training forward of a model."""
        if not self._models:
            states = [torch.get_rng_state()]
            if torch.cuda.is_initialized():
                states.append(torch.cuda.get_rng_state())
            self._random = hashlib.blake2b(b"".join(s.numpy().tobytes() for s in states)).hexdigest()
        self._models.append(module)
        for tensor in (*module.parameters(), *module.buffers()):
            _add(self._weights, tensor)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                _add(self._inputs, leaf)

    def _keep_gradients(self, optimizer: Optimizer) -> None:
        """Keep those of the optimizer's parameters before its first step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if id(optimizer) in self._kept or not self._backwards or all(p.grad is None for p in parameters):
            return
        self._kept.add(id(optimizer))
        names = {id(p): self._prefix(k) + n for k, m in enumerate(self._models) for n, p in m.named_parameters()}
        own = f"{type(optimizer).__name__} {len(self._kept)}"
        named = {names.get(id(p), f"{own}, parameter {k}"): p.grad for k, p in enumerate(parameters)}
        self._keep(GRADIENT, {name: grad for name, grad in named.items() if grad is not None})

    def _prefix(self, model: int) -> str:
        """What tells the parameters of a further model from those of the first."""
        return f"{model + 1}:{type(self._models[model]).__name__}." if model else ""

    def _keep(self, kind: str, values: dict[str, Any]) -> None:
        """Write values to a file; those on the CPU are written from where they are, and none is allocated."""
        plain = {name: _local(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        torch.save({"kind": kind, "values": plain}, self._folder / f"{self._files}.pt")
        self._files += 1

    def _leave(self) -> None:
        """End the process, with a record if the first step is complete."""
        if not self._complete:
            return
        peak_bytes = reserved_bytes = None
        operators: tuple[OperatorSeconds, ...] = ()
        if self.engine is not None:
            steps, timing = self.engine.meters.steps, self.engine.meters.timing
            peak_bytes = steps.peak_bytes if self.engine.meter.exact else None
            reserved_bytes = steps.reserved_bytes if self.engine.device.type == "cuda" else None
            operators = timing.operators() if isinstance(timing, OperatorTiming) else ()
        run = CheckedRun(
            self._weights.hexdigest(),
            self._inputs.hexdigest(),
            self._random,
            self._made,
            peak_bytes,
            reserved_bytes,
            operators,
            any(planned.as_compiled for planned in self.planned),
            tuple(sorted(self.reporter.warned)),
        )
        probe.leave(run, self.settings.record_file)


def _local(value: torch.Tensor) -> torch.Tensor:
    """The value on the CPU; of a sharded one this rank's part."""
    value = value.detach()
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.cpu()


def _add(digest: Any, tensor: torch.Tensor) -> None:
    """Add a tensor's bytes to a hash."""
    value = _local(tensor)
    digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
    if value.layout == torch.strided and value.numel():
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
