"""A process whose model runs as it is: it measures what the plain run takes of a CUDA device.

In a trial the process ends after a few steps; in a launch that needs no plan it goes on under the budget, as a cap.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from monetrun.capture.allocator_history import large_blocks
from monetrun.capture.meter import Meter, NoMeter, meter_for
from monetrun.core.errors import DeviceQueryFailed
from monetrun.core.plain import PlainPeaks
from monetrun.machine.device import query
from monetrun.runtime import candidates, hooks, probe, trial_checkpoints
from monetrun.runtime.allocation_limit import set_limit
from monetrun.runtime.reporter import Reporter
from monetrun.runtime.scalars import StepScalars
from monetrun.runtime.settings import MEASURE, Settings

# In the second step the optimizer's state is there. After it the same tensors can come to lie elsewhere from step to
# step, and the allocator take more in a later one: a trial ends with the first step from the third on that leaves its
# blocks as an earlier one did. It is not longer, since what a script does between steps happens twice, and after some
# seconds it ends with its fifth step. Where an optimizer steps more rarely, it waits a little for it.
_STEPS, _MOST_STEPS_SLOWLY, _MOST_STEPS = 3, 5, 8
_SLOWLY_SECONDS = 20.0
_STEPS_WITHOUT_DEVICE = 2
# A trial takes cached memory for what evaluation has left if it is more than this part of what is allocated.
_CACHED_SHIFT = 2


class PlainRun:
    """Watches the script's optimizers (``hooks.TrainingObserver``).

    Args:
        settings: of the process; ``record_file`` gets the peaks of a trial.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device: torch.device | None = None
        self._meter: Meter = NoMeter()  # of the device, once that is known
        self._steps: Counter[int] = Counter()  # of each optimizer, by its number
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._has_optimizer = False
        self._ended = 0  # steps that all optimizers have made
        self._began = 0.0  # when the first of them had ended
        self._seen: set[Any] = set()  # where blocks lay at the end of each
        self._backwards = 0
        self._lifted = False  # the limit is, for evaluation
        self._evaluated: Callable[[], nn.Module | None] = lambda: None  # of what
        self._whole = False  # that is all that is trained
        self._most = (0, 0)  # allocated and reserved in training steps before the last evaluation
        self._undo = contextlib.ExitStack()
        self._reporter = Reporter(settings)
        self._scalars = StepScalars(settings, self._reporter.warn, self._values)
        self._free_before: tuple[int, ...] = ()  # of each device, before this process used any
        self._has_begun: Callable[[], None] = lambda: None  # from now on a trial ends before a checkpoint

    def watch_process(self) -> None:
        """Patch torch to notice optimizers and their steps."""
        hooks.install(self, self._undo)
        if self.settings.mode == MEASURE:
            probe.stand_in_for_the_other_ranks(self.settings.world_size, self._undo)
            self._has_begun = trial_checkpoints.end_before(self._before_a_checkpoint, self._undo, self.settings)
            self._free_before = _free_now()
        atexit.register(self._at_exit)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """The first one tells the device, whose memory is bounded from now on."""
        self._has_optimizer = True
        if self.device is None and optimizer.param_groups:
            device = candidates.device_of_parameters(p for g in optimizer.param_groups for p in g["params"])
            if device.type == "cuda":
                self.device = device
                self._meter = meter_for(device)  # from now on the script's resets of peaks are its own
                self._set_limit(self.settings.budget_bytes or None)

    def parameters_added(self, optimizer: Optimizer) -> None:
        """As ``optimizer_made``."""
        self.optimizer_made(optimizer)

    def zeroing_gradients(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """Nothing to do."""

    def evaluates(self, module: nn.Module) -> None:
        """Evaluation is no training step: the device's memory is not bounded until the next backward.

        Only that of what is trained: not a teacher's, or a batch norm's that stays as it is. Before there is an
        optimizer that is not known, and nothing is bounded.
        """
        if self.settings.mode == MEASURE and not self._has_optimizer:
            self._lifted = True
        if self.device is None or self._lifted:
            return
        trained = {id(p) for optimizer in hooks.optimizers() for g in optimizer.param_groups for p in g["params"]}
        own = [id(p) for p in module.parameters()]
        count = 2 * sum(p in trained for p in own)
        if count >= len(trained) or (module._modules and count >= len(own) > 0):
            self._most = self._most_in_training() if self._backwards else (0, 0)
            self._lifted, self._evaluated, self._whole = True, weakref.ref(module), count >= 2 * len(trained)
            self._set_limit(None)

    def backward_begins(self, roots: Iterable[Any], create_graph: bool) -> None:
        """A trial ends with the second time if there is no optimizer, whose steps would end it."""
        self._backwards += 1
        if self._lifted and self.device is not None and not (self._whole and _still(self._evaluated())):
            self._evaluation_ended()
        if self.settings.mode == MEASURE:
            probe.begin(self.settings.record_file)
        if self.settings.mode == MEASURE and not self._steps:
            probe.leave_without_steps(self._backwards, self._has_optimizer, self.settings.record_file)

    def backward_failed(self) -> None:
        """Nothing to do."""

    def plan_no_more(self, calls: Sequence[Any], use: str) -> None:
        """Nothing is planned."""

    def compiles(self, compiled: Any) -> None:
        """Nothing to do."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""
        self.optimizer_made(optimizer)  # its parameters may have been moved after it was made

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Nothing to do."""

    def step_within_backward(self, optimizer: Optimizer, ended: bool) -> None:
        """Nothing to do."""

    def step_ended(self, optimizer: Optimizer) -> None:
        """Count it. A trial ends once every optimizer has made its steps."""
        if self._lifted and self.device is not None:  # what is in evaluation mode is trained all the same
            self._lifted = False
            self._most = self._most_in_training()
            self._evaluation_ended()
        self._steps[self._numbers.setdefault(optimizer, len(self._numbers))] += 1
        fewest, most = min(self._steps.values()), max(self._steps.values())
        if self.device is not None:
            self._scalars.step_ended(most)
        if self.settings.mode == MEASURE:
            if self._has_seen_enough(fewest, most):
                self._end_trial(most)
            if self._backwards:  # loading a checkpoint may make a step, to allocate the optimizer's state
                self._has_begun()

    def _evaluation_ended(self) -> None:
        """The first backward after it begins."""
        most = self.settings.budget_bytes
        if self.settings.mode == MEASURE:
            now = self._meter.current_bytes()
            most = now + (now >> _CACHED_SHIFT)
        if 0 < most < self._meter.peaks().reserved_now_bytes:
            torch.cuda.empty_cache()  # what evaluation has left cached
        self._meter.reset_peak()
        self._lifted = False
        self._set_limit(self.settings.budget_bytes or None)

    def _set_limit(self, nbytes: int | None) -> None:
        if self.settings.mode != MEASURE and self.device is not None:
            set_limit(self.device, nbytes)

    def _end_trial(self, steps: int) -> None:
        """Leave what was measured in so many steps of all optimizers, if any: see ``_STEPS``."""
        probe.leave(self._peaks() if self.device is not None and steps else None, self.settings.record_file)

    def _before_a_checkpoint(self) -> None:
        self._end_trial(min(self._steps.values()) - 1)  # in its first step an optimizer has no state yet

    def _has_seen_enough(self, fewest: int, most: int) -> bool:
        """Whether a trial has seen the steps that it is for: all optimizers have made ``fewest``, one made ``most``."""
        if self.device is None:  # the script trains on the CPU
            return fewest >= _STEPS_WITHOUT_DEVICE or most >= _MOST_STEPS_SLOWLY
        if fewest > self._ended:
            self._began = self._began or time.monotonic()
            self._ended, blocks = fewest, large_blocks(self.device)
            if fewest >= _STEPS and blocks in self._seen:
                return True
            self._seen.add(blocks)
        slow = time.monotonic() - self._began > _SLOWLY_SECONDS
        return most >= (_MOST_STEPS_SLOWLY if slow else _MOST_STEPS)

    def _peaks(self) -> PlainPeaks:
        assert self.device is not None
        peaks = self._meter.peaks()
        allocated_bytes, reserved_bytes = self._most_in_training()
        return PlainPeaks(
            allocated_bytes=allocated_bytes,
            reserved_bytes=reserved_bytes,
            retries=peaks.retries,
            steps=max(self._steps.values(), default=0),
            device=self.device.index or 0,
            outside_bytes=_outside_bytes(self.device, self._free_before, peaks.reserved_now_bytes),
        )

    def _most_in_training(self) -> tuple[int, int]:
        if self._lifted:
            return self._most
        peaks = self._meter.peaks()
        return max(self._most[0], peaks.allocated_bytes), max(self._most[1], peaks.reserved_bytes)

    def _values(self, last: bool) -> dict[str, float | None]:
        """The scalars: the most in training steps since the script began."""
        peaks = self._peaks()
        return {
            "budget_bytes": self.settings.budget_bytes or None,
            "measured_peak_bytes": peaks.allocated_bytes,
            "measured_reserved_bytes": peaks.reserved_bytes,
            "allocation_retries": peaks.retries,
        }

    def _at_exit(self) -> None:
        if self.device is None or not self._steps:
            return
        peaks = self._peaks()
        if self.settings.mode == MEASURE:
            probe.write(peaks, self.settings.record_file)
            return
        self._reporter.write(
            {
                "exact": True,
                "evaluating": self._lifted and _still(self._evaluated()),
                "steps": peaks.steps,
                "measured_peak_bytes": peaks.allocated_bytes,
                "measured_reserved_bytes": peaks.reserved_bytes,
                "allocation_retries": peaks.retries,
            }
        )


def _free_now() -> tuple[int, ...]:
    with contextlib.suppress(DeviceQueryFailed):
        if count := torch.cuda.device_count():
            return tuple(info.free_bytes for info in query("cuda", count))
    return ()


def _still(evaluated: nn.Module | None) -> bool:
    """Whether a module is evaluated still: that may differentiate, too, for forces or attacks."""
    return evaluated is not None and not evaluated.training


def _outside_bytes(device: torch.device, free_before: Sequence[int], held_bytes: int) -> int:
    """What this process has taken of the device beside ``held_bytes``; 0 where that is not known.

    ``free_before``: of each device, before this process used any.
    """
    index = device.index or 0
    if index >= len(free_before):
        return 0
    return max(0, free_before[index] - torch.cuda.mem_get_info(device)[0] - held_bytes)
