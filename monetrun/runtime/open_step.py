"""Evaluation within a training step that is left open: an accumulation whose last batches wait for the next epoch's."""

from __future__ import annotations

from typing import Protocol

from monetrun.runtime.enforcement import Enforcement
from monetrun.runtime.step_meter import StepMeter


class Running(Protocol):
    """A plan that runs."""

    enforcement: Enforcement
    steps: StepMeter


class OpenStep:
    """Lets go of the budget for evaluation that is not a part of each step, until the step goes on. Of one process."""

    def __init__(self) -> None:
        self._after_backward = self._recorded_here = self._in_each_step = False

    def evaluates(self, running: Running | None) -> None:
        """The script calls ``eval`` of a planned model, or the model itself without gradients.

        Between a forward and its backward that is a part of the step, like a target that the loss needs. Where it
        follows a backward in the recorded step, it does in each, and the plan knows what it takes.
        """
        if not self._after_backward:
            return
        self._in_each_step |= running is None or not (self._recorded_here or running.steps.steps)
        if running is not None and running.enforcement.holds and not self._in_each_step:
            running.steps.interrupt()
            running.enforcement.pause()

    def goes_on(self, running: Running | None, *, backward: bool = False) -> None:
        """What belongs to a training step begins: a forward, a ``backward``, or an optimizer's step."""
        self._after_backward = backward
        self._recorded_here |= running is None
        if running is not None and running.enforcement.goes_on():
            running.steps.resume()
