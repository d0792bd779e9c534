"""What an engine does so that there is room for the steps under its plan."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError

from monetrun.capture.gradient_terms import within_backward
from monetrun.core.errors import PlanningFault
from monetrun.runtime.enforcement import unbounded
from monetrun.runtime.open_step import OpenStep
from monetrun.runtime.output_uses import Form, OutputUses
from monetrun.runtime.recording import Recording
from monetrun.runtime.running_plan import RunningPlan
from monetrun.runtime.terms import GradientTerms

# Each is traced and planned for in vain, which takes seconds: then models run as they are from now on.
_MOST_UNPLANNED_CALLS = 3


class WithRoom(Recording):
    """Sees that there is room for steps under a plan (``seen_calls.RoomKeeper``).

    Attributes:
        running: the plan, once there is one.
        terms: how graphs give gradients.
        generation: goes up when models have to be compiled anew.
        trained_parameters: gives the parameters of all optimizers.
        part_in_python: part of a model runs in Python, which may take another way in each step.
        uses: of outputs, in the recorded step.
    """

    running: RunningPlan | None
    terms: GradientTerms
    generation: int
    trained_parameters: Callable[[], list[torch.Tensor]]
    part_in_python = False

    def __init__(self) -> None:
        self.uses = OutputUses()
        self.open_step = OpenStep()
        self._failed = False
        self._unplanned_calls = 0

    def runs_in_python(self) -> None:
        """A part of a model does from now on: a share of the plain peak is of the recorded step only."""
        self.part_in_python = True
        if self.running is not None:
            self.running.enforcement.share_is_estimate = True

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """A graph is captured: under a plan, what that takes for a moment is not the step's, nor bounded."""
        running = self.running
        if running is None:
            with super().capturing():
                yield
        else:
            with running.steps.capturing(), unbounded(running.enforcement):
                yield

    def check_room(self, fingerprint: str) -> None:
        """A graph's forward begins under a plan: see ``RunningPlan.check_room``."""
        assert self.running is not None
        self.open_step.goes_on(self.running)
        self.running.check_room(fingerprint)

    def lets_one_call_be(self, fault: PlanningFault) -> bool:
        """A call for whose step there is no plan, and need not be one, may run as it is, unbounded; a few such may."""
        if self.running is None or not fault.of_one_call or self._unplanned_calls >= _MOST_UNPLANNED_CALLS:
            return False
        self._unplanned_calls += 1
        self.running.room.call_is_let_be()
        self.running.enforcement.lift()
        self.running.note(f"a step runs as it is: {fault.message}")
        return True

    def evaluates(self) -> None:
        """A planned model is about to be evaluated, or called without gradients."""
        self.open_step.evaluates(self.running)
        if self.running is not None:
            self.running.room.evaluates()

    def zeroing_gradients(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script calls ``zero_grad``. What hooks drop within a backward, its gradients' lifetimes tell."""
        if within_backward():
            return
        parameters = list(parameters)
        super().zeroing_gradients(parameters, set_to_none)
        skipped = self.open_step.begun and self.running is not None and self.running.room.outputs.are_gone()
        if self.running is not None and (self.open_step.after_backward or skipped):
            dropped = {id(p) for p in parameters}
            if all(p.grad is None or id(p) in dropped for p in self.trained_parameters()):
                self.running.room.gradients_dropped()

    @contextlib.contextmanager
    def planned_forward(self) -> Iterator[None]:
        """A planned model is called in training. Where a step's first call fails, the script has left the step."""
        if self._failed:
            self._failed = False
            gc.collect()  # what the trace of the forward that failed holds, in cycles
        first, calls = not self.open_step.begun, {}
        if self.running is not None:
            self.generation += self.terms.hooks_came(self.trained_parameters)
            calls = self.running.room.calls()
            self.running.steps.forward_begins(self.running.enforcement.call_begins())
        try:
            yield
        except _StopRecomputationError:
            raise  # the second run of a checkpoint around the model has what it is for
        except (Exception, KeyboardInterrupt) as error:  # a notebook goes on after both
            self._failed = True
            self.call_failed(error)
            if self.running is not None:
                self.running.room.call_failed(calls)
                if first:
                    self._leave(self.running)
            raise

    def backward_failed(self) -> None:
        """A backward has failed, or was interrupted."""
        if self.running is not None:
            self.running.room.step_left()
            self._leave(self.running)

    def _leave(self, running: RunningPlan) -> None:
        self.open_step.ended()
        running.steps.step_left()
        running.enforcement.lift()

    def optimizer_goes_on(self) -> None:
        """An optimizer's step begins, or goes on after its closure."""
        self.open_step.goes_on(self.running)
        self.open_step.ended()
        if self.running is not None:
            self.running.steps.optimizer_begins()

    def gradients_come(self, graph: int, form: Form, *, recording: bool) -> None:
        """A backward begins. Of a step that uses other outputs than the recorded one, a share is not enforced."""
        if graph >= 0 and self.running is not None and self.running.record is not None:
            self.running.other_shapes.gradients_come(self.running.record.graphs[graph], form)
        self.open_step.goes_on(self.running, backward=True)
        early = self.running is not None and not self.running.steps.settled
        known = self.uses.are_as_recorded(graph, form, recording=recording, early=early)
        if not known and self.running is not None:
            self.running.enforcement.other_outputs_are_used()

    def differentiated(self, roots: Iterable[Any]) -> list[Any]:
        """The script differentiates these: see ``StepOutputs.differentiated``. Gives them."""
        found = list(roots)
        if self.running is not None:
            self.running.room.outputs.differentiated(found)
        return found

    def outputs_given(self, outputs: Sequence[Any]) -> None:
        """It has given these: see ``StepOutputs.given``."""
        assert self.running is not None
        self.running.room.outputs.given(outputs)

    def saved(self, fingerprint: str, tensor: torch.Tensor) -> None:
        """It has saved this: see ``Room.saved``."""
        assert self.running is not None
        self.running.room.saved(fingerprint, tensor)
