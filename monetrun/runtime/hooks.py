"""What is patched in torch: how monetrun sees optimizers, their steps, and gradients that are set to zero."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class TrainingObserver(Protocol):
    """Receives what the script's optimizers do."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer was constructed."""

    def parameters_added(self, optimizer: Optimizer) -> None:
        """An optimizer got a further parameter group (also while it is being constructed)."""

    def zeroing_gradients(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script calls ``zero_grad``; the gradients are still there."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's ``step`` begins."""

    def step_ended(self, optimizer: Optimizer) -> None:
        """An optimizer's ``step`` has ended."""


def install(observer: TrainingObserver, undo: contextlib.ExitStack) -> None:
    """Patch torch so that ``observer`` sees the script's optimizers; closing ``undo`` restores torch."""
    init, add_group = Optimizer.__init__, Optimizer.add_param_group
    zero_optimizer, zero_module = Optimizer.zero_grad, nn.Module.zero_grad

    def observed_init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        observer.optimizer_made(self)

    def observed_add_group(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        add_group(self, *args, **kwargs)
        observer.parameters_added(self)

    def observed_zero_optimizer(self: Optimizer, set_to_none: bool = True) -> None:
        observer.zeroing_gradients((p for g in self.param_groups for p in g["params"]), set_to_none)
        zero_optimizer(self, set_to_none)

    def observed_zero_module(self: nn.Module, set_to_none: bool = True) -> None:
        observer.zeroing_gradients(self.parameters(), set_to_none)
        zero_module(self, set_to_none)

    for owner, name, function, original in (
        (Optimizer, "__init__", observed_init, init),
        (Optimizer, "add_param_group", observed_add_group, add_group),
        (Optimizer, "zero_grad", observed_zero_optimizer, zero_optimizer),
        (nn.Module, "zero_grad", observed_zero_module, zero_module),
    ):
        functools.update_wrapper(function, original)
        setattr(owner, name, function)
        undo.callback(setattr, owner, name, original)
    for register, action in (
        (register_optimizer_step_pre_hook, lambda optimizer, args, kwargs: observer.step_begins(optimizer)),
        (register_optimizer_step_post_hook, lambda optimizer, args, kwargs: observer.step_ended(optimizer)),
    ):
        undo.callback(register(action).remove)
