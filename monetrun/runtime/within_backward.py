"""Optimizers' steps that the script's hooks make within a backward, each once a gradient is there."""

from __future__ import annotations

from typing import Protocol

import torch

from monetrun.runtime.recorder import Recorder


class _Told(Protocol):
    def optimizer_begins(self, again: bool) -> None:
        """An optimizer's step begins."""

    def optimizer_ended(self, name: str, all_stepped: bool) -> None:
        """It has ended."""


def within_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


class StepsWithinBackward:
    """``engine`` is told of them once the backward has ended: until then its step goes on, and the budget holds."""

    def __init__(self, engine: _Told) -> None:
        self._engine = engine
        self._steps: list[tuple[str, bool]] = []
        self._backward = -1  # that they wait for
        self._telling = False

    def begins(self, recorder: object) -> bool:
        """An optimizer's step begins: whether it is such a one. ``recorder``: of the step, if any."""
        if self._telling or not within_backward():
            return False
        if isinstance(recorder, Recorder):
            recorder.optimizers.begins_within()
        return True

    def ended(self, recorder: object, name: str, all_stepped: bool) -> bool:
        """An optimizer's step has ended, see ``Engine.optimizer_ended``: whether it is such a one."""
        if self._telling or not within_backward():
            return False
        if isinstance(recorder, Recorder):
            recorder.optimizers.ended_within()
        self._steps.append((name, all_stepped))
        if self._backward != (this := torch._C._current_graph_task_id()):
            self._backward = this
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        return True

    def _backward_ended(self) -> None:
        steps, self._steps = self._steps, []
        self._telling = True
        try:
            for name, all_stepped in steps:
                self._engine.optimizer_begins(again=False)
                self._engine.optimizer_ended(name, all_stepped)
        finally:
            self._telling = False
