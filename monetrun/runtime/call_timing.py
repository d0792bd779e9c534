"""How long recomputation takes: a few early calls of each graph are timed, later ones are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from monetrun.capture.execute import Stopwatch
from monetrun.capture.meter import Meter

Run = Callable[[list[Any]], Any]

# The calls of each graph that are timed; the first ones compile and warm up.
_TIMED_CALLS = range(2, 5)


class CallTiming:
    """Seconds of the timed calls of all graphs of a process.

    Attributes:
        seconds: of the timed calls.
        recomputation: runs while a timed backward runs forward operators again.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.seconds = 0.0
        self.recomputation = Stopwatch(meter.synchronize)

    def overhead(self) -> float | None:
        """Seconds of recomputation over the other seconds of the timed calls; None before any."""
        again = self.recomputation.seconds
        return again / (self.seconds - again) if self.seconds > again else None

    def early_calls(self, run: Run, timed: Run | None = None) -> Run:
        """``run``, timed in a few early calls, in which ``timed`` runs in its place if given."""
        calls = 0

        def call(arguments: list[Any]) -> Any:
            nonlocal calls
            if calls >= _TIMED_CALLS.stop:
                return run(arguments)
            calls += 1
            return self._time(timed or run, arguments) if calls - 1 in _TIMED_CALLS else run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _time(self, run: Run, arguments: list[Any]) -> Any:
        self.meter.synchronize()
        started = time.perf_counter()
        result = run(arguments)
        self.meter.synchronize()
        self.seconds += time.perf_counter() - started
        return result
