"""What only the step after the recorded one shows: how long the script holds the last step's outputs and gradients.

A trial ends in that step; without one it runs on the recorded schedules, and the plan is made after it. On CUDA a trial
also sees what the script requests between two steps, in which order.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from monetrun.capture.joint import JointGraph
from monetrun.core.graph import BACKWARD, Costs
from monetrun.core.keeping import with_memory
from monetrun.core.last_gradients import last_gradients_bytes, with_gradients_kept
from monetrun.core.last_outputs import last_outputs_bytes, with_more_outputs, with_outputs_dropped
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import Schedule
from monetrun.core.step import OUTSIDE, Break, StepRecord, replay
from monetrun.planning.intervals import Stretch, optimizer_steps
from monetrun.runtime import probe
from monetrun.runtime.recorder import Recorder
from monetrun.runtime.settings import Settings
from monetrun.runtime.stretches import StretchMeter, WithoutCaptures, joined

# Outputs of less than a thousandth of the plain peak are not waited for.
_WORTHWHILE_SHIFT = 10
# What a script does between steps (evaluation, a checkpoint) is not waited for longer than this.
_PATIENCE_SECONDS = 10.0


def outputs_are_held(record: StepRecord) -> bool:
    """Whether the script holds so much of the last step's outputs that it matters when it drops them."""
    held = last_outputs_bytes(record)
    return held > 0 and held >= replay(*plain_step(record)).peak_bytes >> _WORTHWHILE_SHIFT


def with_what_is_held(recorder: Recorder, record: StepRecord) -> StepRecord:
    """``record`` with the outputs and gradients that are there now, when the next step begins.

    Gradients that the script frees later in its step the record has already.
    """
    least = replay(*plain_step(record)).peak_bytes >> _WORTHWHILE_SHIFT
    known = last_gradients_bytes(record) + recorder.before.kept_bytes(recorder.gradients.values())
    more = recorder.gradients_bytes() - known
    outputs = _more_outputs_bytes(recorder, record)
    record = with_more_outputs(record, outputs) if outputs >= least else record
    return with_gradients_kept(record, more) if more >= least else record


def _more_outputs_bytes(recorder: Recorder, record: StepRecord) -> int:
    """Bytes of the last step's outputs that are held when the next step begins, beside those that ``record`` has.

    Inputs that the step freed hid them at its end. Those of the next step are there by now and, where the script loads
    a batch ahead, those that follow.
    """
    if not (hidden := recorder.given_first.freed_bytes):
        return 0
    recorder.meter.synchronize()
    grown = recorder.meter.current_bytes() - recorder.stretches[0].end_bytes
    found = grown - recorder.optimizers.state_bytes - recorder.gradients_bytes() - last_outputs_bytes(record)
    return max(0, min(found, hidden))


def followed(recorder: Recorder | SecondStep, record: StepRecord, path: str, last_look: LastLook) -> SecondStep:
    """What takes the place of the trial's recorder once ``record`` is made of its step.

    The process ends at once where the next step would show nothing more. On CUDA ``last_look`` comes after that step,
    which shows where blocks come to lie.
    """
    if not isinstance(recorder, SecondStep) and recorder.memory is not None and recorder.meter.exact:
        recorder.memory.resume()
        return TrialsSecondStep(recorder, record, path, last_look)
    if not isinstance(recorder, SecondStep) or recorder._recorder.memory is not None:  # else it was looked at before
        record = last_look(record)
    if isinstance(recorder, SecondStep) or not recorder.meter.exact or not outputs_are_held(record):
        probe.leave(record, path)
    return TrialsSecondStep(recorder, record, path)


def looking_at_nothing(recorder: Recorder | SecondStep | None, record: StepRecord) -> SecondStep:
    """What takes the place of ``recorder`` for calls that are not of the script."""
    assert recorder is not None
    step = SecondStep(recorder._recorder if isinstance(recorder, SecondStep) else recorder, record)
    step._begun = step._seen = True
    return step


LastLook = Callable[[StepRecord], StepRecord]
"""Adds what is looked at when all has been measured."""


class SecondStep(WithoutCaptures):
    """Sees the step after the recorded one, in the recorder's place and on its schedules.

    It looks until the last outputs are dropped: mostly before the first backward, else until the optimizer begins.

    Args:
        recorder: of the step before.
        record: that it made.
    """

    def __init__(self, recorder: Recorder, record: StepRecord) -> None:
        self.known, self.sharding = recorder.known, recorder.sharding
        self._recorder = recorder
        self._recorded = self._record = record
        self._stretch_meter = StretchMeter(recorder.meter)
        self._begun = self._in_backward = self._seen = False
        self._optimizers_ended = 0

    def _step_begins(self) -> None:
        if self._begun:
            return
        self._begun = True
        memory = self._recorder.memory
        if memory is not None:
            memory.warm_up_again()
        self._stretch_meter.begin()

    def _end(self) -> None:
        """Nothing more is looked at."""
        self._seen = True

    # ---- as the recorder

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """See ``Recorder.choose``."""
        return self._recorder.choose(joint)

    def measure(self, store: Any) -> list[Costs]:
        """The costs are in the record."""
        return list(self._record.costs)

    def record(self, costs: list[Costs], breaks: Iterable[Break] = ()) -> StepRecord:
        """The record, with what was seen so far. On CUDA what libraries keep is freed, as by the recorder."""
        if self._recorder.memory is not None:
            self._recorder.memory.end()
        return self._record

    def forward_begins(self, arguments: Iterable[Any]) -> None:
        """The next step begins with what hooks allocate, as the recorded one did."""
        if not self._begun:
            self._step_begins()
            self._stretch_meter.end(OUTSIDE)

    def call_begins(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        """A graph's call begins; from the first backward on nothing more is looked at once the outputs are dropped."""
        if self._seen:
            return
        self._step_begins()
        self._stretch_meter.end(OUTSIDE)
        self._in_backward |= phase == BACKWARD
        if self._in_backward and self._see() <= replay(*plain_step(self._recorded)).peak_bytes >> _WORTHWHILE_SHIFT:
            self._end()

    def _see(self) -> int:
        """Put what was seen into the record; gives how many bytes of the outputs are still held."""
        stretches = joined(self._recorder.stretches), joined(self._stretch_meter.stretches)
        held = last_outputs_bytes(self._recorded)
        freed = freed_outputs(*stretches, held)
        self._record = with_outputs_dropped(self._recorded, freed)
        return held - freed[-1][1] if freed else 0

    def call_ended(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        """It has ended."""
        if not self._seen:
            self._stretch_meter.end(phase, graph)

    def gradients_given(self, graph: int, operator: int, nodes: Sequence[Any], gradients: Sequence[Any]) -> None:
        """The record has it already."""

    def zeroing_gradients(self, parameters: Iterable[Any], set_to_none: bool) -> None:
        """The record has it already."""

    def optimizer_begins(self) -> None:
        """It ends what is looked at."""
        if self._in_backward and not self._seen:
            self._stretch_meter.end(OUTSIDE)
            self._see()
            self._end()

    def optimizer_ended(self, name: str, parameters: Iterable[Any]) -> None:
        """One of the step's optimizers has ended."""
        self._optimizers_ended += 1

    @property
    def complete(self) -> bool:
        """Whether as many optimizers have ended as in the recorded step."""
        return self._optimizers_ended >= optimizer_steps(self._record)


class TrialsSecondStep(SecondStep):
    """That of a trial: the process ends with it.

    On CUDA, where the plain run's own peaks are measured, it ends when the forward begins. It ends before that where
    there is no such step, where it takes long to begin, and where the script is about to write a checkpoint.

    Args:
        recorder: of the step before.
        record: that it made.
        path: of the record's file.
        last_look: at the process, when all has been seen.
    """

    def __init__(self, recorder: Recorder, record: StepRecord, path: str, last_look: LastLook = lambda r: r) -> None:
        super().__init__(recorder, record)
        self._path, self._last_look = path, last_look
        self._ending = threading.Lock()
        atexit.register(self._end)
        self._timer = threading.Timer(_PATIENCE_SECONDS, self._end)
        self._timer.daemon = True
        self._timer.start()

    def forget(self) -> None:
        """The process goes on."""
        self._timer.cancel()
        atexit.unregister(self._end)

    def _step_begins(self) -> None:
        if not self._begun:
            self._recorded = self._record = with_what_is_held(self._recorder, self._recorded)
        memory = self._recorder.memory
        if memory is not None:
            memory.seen_between_steps()
            self._record = with_memory(self._record, memory.memory(self._recorder.before.freed_places))
            self._timer.cancel()
            memory.stop()
            self._record = self._last_look(self._record)
            self._end()
        super()._step_begins()

    def _end(self) -> NoReturn:
        with self._ending:  # once: the process ends here
            probe.leave(self._record, self._path)

    def record(self, costs: list[Costs], breaks: Iterable[Break] = ()) -> StepRecord:
        """The record, with what was seen so far."""
        return self._record

    def optimizer_begins(self) -> None:
        """It ends what is looked at, also in a step without a backward of a graph."""
        super().optimizer_begins()
        self._end()

    def optimizer_ended(self, name: str, parameters: Iterable[Any]) -> None:
        """As ``optimizer_begins``."""
        self._end()

    @property
    def complete(self) -> bool:
        """The recorded step was."""
        return True


def freed_outputs(first: Sequence[Stretch], second: Sequence[Stretch], held_bytes: int) -> list[tuple[int, int]]:
    """How much of the last step's outputs is freed, in bytes, by call of a graph: when what follows is at its peak, and
    when that ends.

    The first step has none of them: what the second one allocates less, in the same stretch, is of those that it began
    with.

    Args:
        first: stretches of the first step.
        second: those of the second one, as far as they were seen.
        held_bytes: the outputs that are held when it begins.
    """
    freed: list[tuple[int, int]] = []
    for one, other in zip(first, second, strict=False):
        if (one.kind, one.graph) != (other.kind, other.graph):
            break
        if one.kind != OUTSIDE:
            before = freed[-1][1] if freed else 0
            freed.append((before, before))
        elif freed:
            begun = second[0].end_bytes - first[0].end_bytes
            peak = max(freed[-1][0], min(held_bytes, one.peak_bytes - other.peak_bytes + begun))
            freed[-1] = peak, max(peak, min(held_bytes, one.end_bytes - other.end_bytes + begun))
    return freed


def end_before_a_checkpoint(recorder: Recorder | SecondStep | None, settings: Settings) -> NoReturn:
    """The script of a trial, which has begun to train, writes a checkpoint: the trial ends with what it has seen."""
    if isinstance(recorder, TrialsSecondStep):
        recorder._end()
    probe.leave_unseen("it writes a checkpoint before the training step that is planned", settings.record_file)


def stop(recorder: Recorder | SecondStep | None) -> None:
    """Nothing is recorded from now on, and no record is made."""
    if isinstance(recorder, TrialsSecondStep):
        recorder.forget()
    recorder = recorder._recorder if isinstance(recorder, SecondStep) else recorder
    if recorder is None:
        return
    if recorder.memory is not None:
        recorder.memory.stop()
    recorder.sharding.stop()
