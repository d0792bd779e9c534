"""What training steps take, as scalars for TensorBoard: one folder of events for each rank (``--tensorboard``).

A point is written once a second at most, and in a long run more rarely, by the thread of torch's ``SummaryWriter``;
nothing waits for the device.
Nothing that goes wrong here ends training: a warning says that no more is written.
"""

from __future__ import annotations

import atexit
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from monetrun.core.plan import Plan
from monetrun.runtime.settings import PLAIN, RUN, Settings
from monetrun.runtime.step_meter import StepMeter

_SECONDS_BETWEEN_POINTS = 1.0
_POINTS_SHIFT = 12  # after some hours as many seconds as make 4,096 points of the run so far
_FLUSH_SECONDS = 10  # how old the files are at most
_GROUP = "monetrun/"

Values = Mapping[str, float | None]


class StepScalars:
    """Of one rank.

    Args:
        settings: of the process; nothing is written unless they name a folder and it trains.
        warn: called where nothing more can be written.
        values: gives the scalars, where a point is due; called with whether it is the last one.
    """

    def __init__(self, settings: Settings, warn: Callable[[str], None], values: Callable[[bool], Values]) -> None:
        self._warn = warn
        self._values = values
        self._writer: Any = None
        self._steps = self._point_steps = 0
        self._point_time, self._began = -1.0, time.perf_counter()
        if settings.tensorboard_folder and settings.mode in (RUN, PLAIN):
            self._folder = Path(settings.tensorboard_folder) / f"rank{settings.rank}"
            self._guarded(self._open)

    def step_ended(self, steps: int) -> None:
        """A training step has ended; ``steps``: how many so far."""
        if self._writer is None or steps == self._steps:
            return
        self._steps, now = steps, time.perf_counter()
        if self._point_time < 0:  # the first step compiles, and takes no time that says anything
            self._guarded(lambda: self._write(self._values(False)))
        elif now - self._point_time >= max(_SECONDS_BETWEEN_POINTS, (now - self._began) / (1 << _POINTS_SHIFT)):
            seconds = (now - self._point_time) / (steps - self._point_steps)
            self._guarded(lambda: self._write({**self._values(False), "step_seconds": seconds}))
        else:
            return
        self._point_steps, self._point_time = steps, time.perf_counter()

    def close(self) -> None:
        """Write the last point, if there has been a step, and close the files; at the end of the process at last."""
        atexit.unregister(self.close)
        if self._writer is not None and self._steps:
            self._guarded(lambda: self._write(self._values(True)))
        if self._writer is not None:
            self._guarded(self._writer.close)
        self._writer = None

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional, and takes a second to import

        self._writer = SummaryWriter(str(self._folder), flush_secs=_FLUSH_SECONDS)
        atexit.register(self.close)

    def _write(self, values: Values) -> None:
        for name, value in values.items():
            if value is not None:  # bytes are exact in double precision only
                self._writer.add_scalar(_GROUP + name, value, self._steps, new_style=True, double_precision=True)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of the packages that write; the user may have made them errors
                act()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._writer = None
            self._warn(f"no more scalars are written for TensorBoard: {type(error).__name__}: {error}")


def planned_values(plan: Plan, steps: StepMeter, device: str, exact: bool) -> dict[str, float | None]:
    """The scalars of steps under a plan; the measured ones are of the steps since the last time, None: there was none.

    Args:
        plan: that runs.
        steps: measures them.
        device: kind of the device.
        exact: whether bytes are counted by the allocator.
    """
    peak_bytes, reserved_bytes = steps.recent_peaks()
    found: dict[str, float | None] = {
        "budget_bytes": plan.budget_bytes,
        "planned_peak_bytes": plan.planned_peak_bytes,
        "measured_peak_bytes": peak_bytes or None if exact else None,
        "planned_overhead": plan.overhead,
    }
    if device == "cuda":
        found["planned_reserved_bytes"] = plan.pool.planned_bytes if plan.pool else None
        found["measured_reserved_bytes"] = reserved_bytes or None
        found["allocation_retries"] = steps.retries
    return found
