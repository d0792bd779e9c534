"""Holds training steps to the budget, and nothing else: what the script does between them runs as it would anyway."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from monetrun.capture import cpu_allocator
from monetrun.capture.allocator_history import present_settings
from monetrun.capture.meter import Meter
from monetrun.capture.peaks import Peaks
from monetrun.core.budget import format_bytes
from monetrun.core.plan import Pool
from monetrun.runtime import pool as reserved
from monetrun.runtime.allocation_limit import set_limit
from monetrun.runtime.reporter import WARNING

# What a step may take beyond a share of the plain peak, on a CPU: the budget >> 10, 0.1% of it. The last step's loss,
# which the script has dropped in the recorded step and holds in another one, is 4 bytes.
_SLACK_SHIFT = 10


class Enforcement:
    """Of one process.

    Args:
        device: of the models.
        meter: of that device.
        note: called with a line for the user.
        of_plain: the budget is a share of the plain peak.

    Attributes:
        share_was_estimated: a step was not held to the budget (see ``suspend``).
        share_is_estimate: no step is from now on, where the budget is a share of the plain peak.
    """

    def __init__(
        self, device: torch.device, meter: Meter, note: Callable[[str], None], *, of_plain: bool = False
    ) -> None:
        self.device = device
        self.meter = meter
        self.note = note
        self._of_plain = of_plain
        self._budget_bytes = 0
        self._plan_pool: Pool | None = None
        self._pools: dict[str, Pool] = {}  # of graphs that the plan does not have, by their fingerprint
        self._pool: Pool | None = None  # that is held
        self._libraries = False
        self._captures = 0  # of graphs, that go on
        self._held_bytes = self._retries = 0  # reserved when the pool was held last, and allocations retried by then
        self._lifted = True  # until a captured graph begins its forward
        self._suspended = self._paused = False  # the present step is not bounded, or not now
        self.share_was_estimated = self.share_is_estimate = False
        self._step_ended = False
        self._noted_bytes = self._left_bytes = 0  # the latter: reserved when the last step ended, if not held to it

    def plan_is(self, budget_bytes: int, pool: Pool | None, libraries: bool) -> None:
        """Another plan runs from now on; on CUDA its pool is reserved."""
        if self.device.type == "cpu" and not self.meter.exact and not self._budget_bytes:
            self.note(f"{WARNING}the budget is planned for, but not enforced: {cpu_allocator.unavailable_reason()}")
        self._budget_bytes = budget_bytes
        self._plan_pool = self._pool = pool
        self._libraries = libraries
        self._pools.clear()
        self.hold_pool()

    def budget_is(self, budget_bytes: int) -> None:
        """The plan that runs has another budget."""
        self._budget_bytes = budget_bytes
        self._limit()

    def graph_has(self, fingerprint: str, pool: Pool) -> None:
        """Steps of a graph that the plan does not have need this one."""
        self._pools[fingerprint] = pool

    def forget(self, fingerprint: str) -> None:
        """Such steps need the plan's pool."""
        self._pools.pop(fingerprint, None)

    def use_pool_of(self, fingerprint: str) -> None:
        """A step of this graph begins: on CUDA its pool is held, beside the one that is, where the budget allows it."""
        pool, held = self._pools.get(fingerprint, self._plan_pool), self._pool
        if pool is None or held is None or pool.lies_in(held):
            return
        both = pool.beside(held)
        self._pool = both if both.planned_bytes <= self._budget_bytes else pool
        self.hold_pool()

    @property
    def holds(self) -> bool:
        """Whether the present step is held to the budget."""
        return not (self._lifted or self._suspended or self._paused)

    def pause(self) -> None:
        """What begins within a step is no part of it: it is not bounded until ``goes_on``."""
        self._paused = True
        set_limit(self.device, None)
        self.meter.reset_peak()

    def goes_on(self) -> bool:
        """The step goes on. Gives whether it was paused."""
        if not self._paused:
            return False
        self._look_back()
        self._paused = False
        self._limit()
        return True

    def call_begins(self) -> Peaks | None:
        """A planned model is called in training. Gives the meter's peaks, if they were read and still are what is."""
        before, self._step_ended = self._step_ended, False
        return self._look_back() if before else None

    def _look_back(self) -> Peaks | None:
        """Tell what was allocated outside of training steps, if that was much. Gives that, or holds the pool again."""
        peaks = self.meter.peaks()
        peak = max(peaks.allocated_bytes, peaks.reserved_bytes) if self.meter.exact else 0
        allowed = max(self._budget_bytes, self._left_bytes)
        if peak > max(allowed + self._budget_bytes // 100, self._noted_bytes):
            self._noted_bytes = peak + peak // 100
            taken = "reserved" if peaks.reserved_bytes else "allocated"
            more, what = format_bytes(peak - self._budget_bytes), "evaluation, and what else is no step,"
            self.note(
                f"between steps {format_bytes(peak)} were {taken}, {more} beyond the budget: {what} is not planned"
            )
        if peaks.retries > self._retries:  # the allocator has: held again, the pool would not serve that request either
            self._held_bytes, self._retries = min(self._held_bytes, peaks.reserved_now_bytes), peaks.retries
        if peaks.reserved_bytes <= allowed and peaks.reserved_now_bytes >= self._held_bytes:
            return peaks
        self._hold()  # what was cached meanwhile goes back to the device; or the script has given the pool back
        return None

    def enforce(self, *, suspended: bool = False) -> None:
        """A captured graph begins its forward: the step is held to the budget, or (``suspended``) is not any more.

        Once a step was not, none is: what is known of the recorded step may be of others than this one, too.
        """
        if self._of_plain and (suspended or self.share_is_estimate):
            self.suspend()
        if not self._lifted:
            return
        self._lifted = False
        self._limit()

    def suspend(self) -> None:
        """The present step is not held to the budget, nor is a later one: a share of what is not known."""
        self.share_is_estimate = True
        self._suspend(
            "of a step at other shapes than the recorded one's, or whose forward takes another way, the plain peak is"
            " an estimate: a share of it is planned for, but not enforced"
        )

    def other_outputs_are_used(self) -> None:
        """The loss is of other outputs than in the recorded step: the present step is not held to a share."""
        if self._of_plain:
            self._suspend(
                "the loss is of other outputs than in the recorded step: the plain peak of such steps is not known,"
                " and a share of it not enforced in them"
            )

    def _suspend(self, why: str) -> None:
        if self._suspended:
            return
        self._suspended, self._lifted = True, False
        set_limit(self.device, None)
        if not self.share_was_estimated:
            self.share_was_estimated = True
            self.note(f"{WARNING}{why}")

    def lift(self) -> None:
        """A training step has ended: nothing is bounded until the next one."""
        if not self._lifted:
            self._left_bytes = self.meter.peaks().reserved_now_bytes if self._suspended else 0
            self._lifted = self._step_ended = True
            self._suspended = self._paused = False
            set_limit(self.device, None)
            self.meter.reset_peak()

    def _limit_bytes(self) -> int:
        """The budget, or less where cuDNN's search asks for memory until torch refuses it.

        Torch compares the bytes of a request with the limit, and reserves whole pages for it. On a CPU a byte more than
        in the recorded step would end the training: a share of a plain peak that is known to 0.5% is held to 0.1%.
        """
        if self.device.type == "cpu" and self._of_plain:
            return self._budget_bytes + (self._budget_bytes >> _SLACK_SHIFT)
        if self._pool is None or self.device.type != "cuda" or not torch.backends.cudnn.benchmark:
            return self._budget_bytes
        settings = present_settings()
        if not settings.expandable:
            return self._budget_bytes
        return min(self._budget_bytes, max(self._pool.planned_bytes, self._budget_bytes - settings.large_segment_bytes))

    @contextlib.contextmanager
    def measuring(self, *, bounded: bool) -> Iterator[None]:
        """A context in which operators are measured; what they leave cached goes back to the device.

        ``bounded``: within the budget. Else a share of the plain peak is none: what it is a share of is measured.
        """
        if self._captures or (self._of_plain and not bounded):
            set_limit(self.device, self._limit_bytes() if bounded and self.holds else None)
        try:
            yield
        finally:
            self.hold_pool()

    def hold_pool(self) -> None:
        """On CUDA the pool is reserved, no more and no less; a step that is held to the budget stays so."""
        self._hold()
        self._limit()

    def _limit(self) -> None:
        """Hold the present step to the budget, if it is held to it; not while a graph is captured."""
        if self.holds:
            set_limit(self.device, None if self._captures else self._limit_bytes())

    def _hold(self) -> None:
        if self._pool is not None and self.device.type == "cuda":
            set_limit(self.device, None)
            reserved.hold(self.device, self._pool, self._libraries, self._budget_bytes)
            peaks = self.meter.peaks()
            self._held_bytes, self._retries = peaks.reserved_now_bytes, peaks.retries


@contextlib.contextmanager
def unbounded(enforcement: Enforcement) -> Iterator[None]:
    """A context in which a graph is captured: what that takes for a moment is not bounded.

    What is measured meanwhile is (see ``Enforcement.measuring``). On CUDA no more than the budget stays reserved.
    """
    enforcement._captures += 1
    enforcement._limit()
    try:
        yield
    finally:
        enforcement._captures -= 1
        if enforcement.holds and enforcement.meter.peaks().reserved_now_bytes > enforcement._budget_bytes:
            enforcement._hold()
        enforcement._limit()
