"""Optimizers' steps that the script's hooks make within a backward, each once a gradient is there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from monetrun.capture.gradient_terms import within_backward


class StepsWithinBackward:
    """Tells of them once the backward has ended: until then its training step goes on, and the budget holds.

    Args:
        now: told of each at once: the optimizer, and whether its step has ended.
        begins: told of each when the backward has ended, as of any other step.
        ended: told after it.
    """

    def __init__(
        self,
        now: Callable[[Optimizer, bool], None],
        begins: Callable[[Optimizer], None],
        ended: Callable[[Optimizer], None],
    ) -> None:
        self._now, self._tell_begins, self._tell_ended = now, begins, ended
        self._steps: list[Optimizer] = []
        self._backward = -1  # that they wait for

    def begins(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""
        if within_backward():
            self._now(optimizer, False)
        else:
            self._tell_begins(optimizer)

    def ended(self, optimizer: Optimizer) -> None:
        """An optimizer's step has ended."""
        if not within_backward():
            self._tell_ended(optimizer)
            return
        self._now(optimizer, True)
        self._steps.append(optimizer)
        if self._backward != (this := torch._C._current_graph_task_id()):
            self._backward = this
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        steps, self._steps, self._backward = self._steps, [], -1
        for optimizer in steps:
            self._tell_begins(optimizer)
            self._tell_ended(optimizer)
