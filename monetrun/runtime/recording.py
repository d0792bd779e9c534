"""What an engine does while a step is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from monetrun.core.errors import is_out_of_memory
from monetrun.runtime import probe
from monetrun.runtime.recorder import Recorder
from monetrun.runtime.second_step import SecondStep

_MOST_WAITED = 8  # steps of one optimizer, in a recorded step that waits for another's first one


class Recording:
    """Passes what it sees of a step on to the recorder, while one is recorded."""

    recorder: Recorder | SecondStep | None = None
    _step_recorded = _record_again = False
    refused = False  # no schedule fits the budget
    _waited = 0
    _recorded_since: tuple[int, int] | None = None  # by which recorder, and how many backwards there had been

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        """A graph is captured, while a step is recorded."""
        return contextlib.nullcontext() if self.recorder is None else self.recorder.capturing()

    def call_begins(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        """A graph is about to run, while a step is recorded."""
        if self.recorder is not None:
            self.recorder.call_begins(phase, graph, arguments)

    def call_ended(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        """It has run."""
        if self.recorder is not None:
            self.recorder.call_ended(phase, graph, results)

    def call_failed(self, error: BaseException) -> None:
        """A forward, or a graph's backward, has failed. Of one that ran out of memory no record is made.

        The script may go on with a smaller batch (``auto_find_batch_size``): the next step is recorded.
        """
        self._record_again |= isinstance(self.recorder, Recorder) and is_out_of_memory(error)

    def gradients_given(self, graph: int, operator: int, nodes: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Its backward is about to give gradients."""
        if self.recorder is not None:
            self.recorder.gradients_given(graph, operator, nodes, gradients)

    def step_within_backward(self, name: str, ended: bool) -> None:
        """A hook begins, or has made (``ended``), a step of the optimizer called ``name`` within a backward."""
        if isinstance(self.recorder, Recorder) and self.recorder.stretches:
            steps = self.recorder.optimizers
            steps.ended_within(name) if ended else steps.begins_within()

    def waits_for_others(self) -> bool:
        """An optimizer steps again while the step that is recorded waits for others' first one.

        Gives whether it was so often (a GAN's critic makes several) that it waits no more: another step is recorded,
        without those others.
        """
        self._waited += not self._step_recorded
        self._record_again |= self._waited == _MOST_WAITED
        return self._waited == _MOST_WAITED

    def waits_in_vain(self, backwards: int) -> bool:
        """A backward begins, the ``backwards``-th: so many since a step is recorded that no step will end it."""
        if self.recorder is None:
            return False
        if self._recorded_since is None or self._recorded_since[0] != id(self.recorder):
            self._recorded_since = id(self.recorder), backwards
        return backwards - self._recorded_since[1] > probe.MOST_ROUNDS

    def zeroing_gradients(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script calls ``zero_grad``."""
        if self.recorder is not None and not self._step_recorded:
            self.recorder.zeroing_gradients(parameters, set_to_none)
