"""What training steps under a plan allocate: the peak of all, and one settled step in detail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from monetrun.capture.meter import Meter
from monetrun.capture.peaks import Peaks
from monetrun.core.step import OUTSIDE
from monetrun.planning.intervals import Stretch
from monetrun.runtime.optimizer_turns import OptimizerTurns
from monetrun.runtime.stretches import StretchMeter

# The steps before the one that is measured in detail: by then the optimizer's state and the last step's gradients lie
# there, and all graphs are compiled.
SETTLING_STEPS = 2


class StepMeter:
    """Counts the training steps under a plan and measures their bytes; nothing waits for the device.

    A training step begins with the first forward after an optimizer's step.

    Attributes:
        steps: completed so far, by optimizers.
        peak_bytes: the most allocated in any of them.
        reserved_bytes: the most that CUDA's allocator reserved in any of them.
        most_planned: allocated bytes, and those that the budget bounds, the most of the plans of these steps.
        retries: how often it gave cached memory back to serve a request, in settled steps.
        stretches: of the step that was measured in detail, empty until it has ended.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.steps = 0
        self.peak_bytes = 0
        self.reserved_bytes = 0
        self.most_planned = self._planned = (0, 0)
        self.retries = 0
        self._retries_before = self._retries_within = 0  # settled steps, and what has interrupted one
        self._retries_ended = 0  # by the last step's end
        self.stretches: Sequence[Stretch] = ()
        self._recent = (0, 0)  # peak_bytes and reserved_bytes since ``recent_peaks``
        self._before = 0, 0, self._recent  # the three when the present step began
        self._within_step = self._has_called = False  # a graph has, in it
        self._interruptions = 0  # of it, that have not ended
        self._turns, self._ended = OptimizerTurns(), 0  # training steps since ``measure_a_settled_step``
        self._measures_detail = False
        self._counted = 1  # how many of them ``steps`` counts
        self._detail: StretchMeter | None = None

    def plan_is(self, allocated_bytes: int, bounded_bytes: int) -> None:
        """Steps run under this plan from now on."""
        self._planned = allocated_bytes, bounded_bytes
        self.planned_too(allocated_bytes, bounded_bytes)

    def planned_too(self, allocated_bytes: int, bounded_bytes: int) -> None:
        """Some of these steps are planned to take so much: those of other shapes."""
        self.most_planned = max(self.most_planned[0], allocated_bytes), max(self.most_planned[1], bounded_bytes)

    def measure_a_settled_step(self, optimizers: int, after_forwards: int = 0) -> None:
        """Measure the third training step from now on in detail, if the meter is exact.

        Args:
            optimizers: how many optimizer steps a training step has, 0 where that is not known: measure none.
            after_forwards: how many of them are the first after a forward; 0: all.
        """
        self._counted = max(1, after_forwards or optimizers) if self.meter.exact else 1
        self._measures_detail = optimizers > 0 and self.meter.exact
        self._turns.are(optimizers)  # a step may have begun
        self._ended = 0
        self._detail = None
        self.stretches = ()

    @property
    def settled(self) -> bool:
        """Whether optimizer state and gradients lie where they will lie in all further steps; not within such a step.

        One with several optimizers has made some of its forwards when the first of them has stepped.
        """
        return self.steps > SETTLING_STEPS * self._counted and not self._turns.within

    @property
    def training_steps(self) -> int:
        """``steps`` in training steps: a GAN's have two optimizers' steps each. One that has not ended counts."""
        return -(-self.steps // self._counted)

    def forward_begins(self, peaks: Peaks | None = None) -> None:
        """A planned model is called in training; ``peaks``: the meter's, if they were just read."""
        if self._within_step:
            return
        self._within_step, self._has_called, self._interruptions = True, False, 0
        self._before = self.peak_bytes, self.reserved_bytes, self._recent
        retries = (peaks or self.meter.peaks()).retries
        settled = self._ended >= SETTLING_STEPS
        if not settled or not self.steps:
            self._retries_before = retries
        else:
            self._retries_before += retries - self._retries_ended  # those between steps are no step's
        if self._detail is not None:
            return  # a training step with several optimizers
        self.meter.reset_peak()
        if self._measures_detail and settled and not self.stretches and not self._turns.within:
            self._detail = StretchMeter(self.meter)
            self._detail.begin()

    def call_begins(self) -> None:
        """A call of a graph begins."""
        self._has_called = True
        if self._detail is not None:
            self._end_stretch(OUTSIDE)

    def call_ended(self, phase: str, graph: int) -> None:
        """It has ended; ``graph`` is its index in the record, -1 if it has none."""
        if self._detail is not None:
            self._end_stretch(phase, graph)

    def optimizer_begins(self) -> None:
        """An optimizer's step begins."""
        if self._detail is not None:
            self._end_stretch(OUTSIDE)

    def optimizer_ended(self, name: str, optimizer: int) -> None:
        """It has ended; after no planned forward, and not as one of a training step's several, it is no such step's.

        Args:
            name: of the optimizer's class.
            optimizer: its ``id``.
        """
        if self._within_step or self._turns.within:
            self._retries_ended = self._look().retries
            self.retries = self._retries_ended - self._retries_before
        self.steps += self._within_step
        self._within_step = False
        ended = self._turns.ended(optimizer)
        self._ended += ended
        if self._detail is not None:
            self._end_stretch(OUTSIDE, name=f"{name}.step")
            if ended:
                self.stretches, self._detail = tuple(self._detail.stretches), None

    def step_left(self) -> None:
        """What began as a step is none: the script has caught an error of its forward."""
        if self._within_step:
            self.peak_bytes, self.reserved_bytes, self._recent = self._before
        self._within_step, self._detail = False, None

    def forget_peaks(self) -> None:
        """Another plan runs from now on: the peaks are its own."""
        self.most_planned = self._planned
        self.peak_bytes = self.reserved_bytes = self.retries = 0
        self._recent = (0, 0)
        self._before = 0, 0, self._recent
        self._retries_before = self._retries_ended = self.meter.peaks().retries

    def interrupt(self) -> None:
        """Operators are about to be measured within the step: keep its peak so far. Another step is for the detail.

        Within what interrupts the step already this does nothing.
        """
        if not self._interruptions:
            self._retries_within = self._look().retries
        self._interruptions += 1
        self._detail = None

    def resume(self) -> None:
        """They have been: their peak, and what was retried for them, is not the step's."""
        self._interruptions = max(0, self._interruptions - 1)
        if not self._interruptions:
            self._retries_before += self.meter.peaks().retries - self._retries_within
            self.meter.reset_peak()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """A graph is captured within the step: what that takes for a moment is not the step's.

        Nor is what has led to it, where no graph has run in this step yet.
        """
        if not self._has_called and not self._interruptions:
            self.meter.reset_peak()
        self.interrupt()
        try:
            yield
        finally:
            self.resume()

    def recent_peaks(self) -> tuple[int, int]:
        """The most allocated, and the most reserved, since this was called last."""
        recent, self._recent = self._recent, (0, 0)
        return recent

    def _look(self) -> Peaks:
        peaks = self.meter.peaks()
        self._recent = (max(self._recent[0], peaks.allocated_bytes), max(self._recent[1], peaks.reserved_bytes))
        self.peak_bytes = max(self.peak_bytes, peaks.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, peaks.reserved_bytes)
        return peaks

    def _end_stretch(self, kind: str, graph: int = -1, name: str = "") -> None:
        assert self._detail is not None
        self._look()
        self._detail.end(kind, graph, name)
