"""Evaluation within a training step that is left open.

An accumulation whose last batches wait for the next epoch's, or a forward that no backward follows.
"""

from __future__ import annotations

from typing import Protocol

from monetrun.runtime.enforcement import Enforcement
from monetrun.runtime.step_meter import StepMeter


class Running(Protocol):
    """A plan that runs."""

    enforcement: Enforcement
    steps: StepMeter


class OpenStep:
    """Lets go of the budget for evaluation that is not a part of each step, until the step goes on. Of one process.

    Attributes:
        begun: a part of the step has run.
        after_backward: what has run last of it is a backward.
    """

    def __init__(self) -> None:
        self.after_backward = self.begun = self._recorded_here = False
        self._in_each_step: set[bool] = set()  # evaluation is, after a backward or not

    def evaluates(self, running: Running | None) -> None:
        """The script calls ``eval`` of a planned model, or the model itself without gradients.

        Where it does that in the recorded step, such as for a target that the loss needs, it does in each, and the plan
        knows what it takes.
        """
        if not self.begun:
            return
        if running is None or not (self._recorded_here or running.steps.steps):
            self._in_each_step.add(self.after_backward)
        if running is not None and running.enforcement.holds and self.after_backward not in self._in_each_step:
            running.steps.interrupt()
            running.enforcement.pause()

    def goes_on(self, running: Running | None, *, backward: bool = False) -> None:
        """What belongs to a training step begins: a forward, a ``backward``, or an optimizer's step."""
        self.after_backward, self.begun = backward, True
        self._recorded_here |= running is None
        if running is not None and running.enforcement.goes_on():
            running.steps.resume()

    def ended(self) -> None:
        """The step has ended, or the script has left it."""
        self.after_backward = self.begun = False
