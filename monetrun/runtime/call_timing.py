"""How long recomputation takes: a few early calls of each graph are timed, later ones are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from monetrun.capture.clock import clock_of
from monetrun.capture.execute import Stopwatch
from monetrun.capture.meter import Meter

Run = Callable[[list[Any]], Any]

# The calls of each graph that are timed; the first ones compile and warm up.
_TIMED_CALLS = range(2, 5)

_log = logging.getLogger("monetrun")


class CallTiming:
    """The timed calls of all graphs of a process.

    Attributes:
        calls: runs in timed calls.
        recomputation: runs while a timed backward runs forward operators again.
    """

    def __init__(self, meter: Meter) -> None:
        clock = clock_of(meter)
        self.calls = Stopwatch(clock)
        self.recomputation = Stopwatch(clock)

    def overhead(self) -> float | None:
        """Seconds of recomputation over the other seconds of the timed calls.

        None before any, and where the device failed before it came to their end.
        """
        try:
            calls, again = self.calls.seconds, self.recomputation.seconds
        except RuntimeError as error:
            _log.info("the overhead of recomputation is not known: %s", error)
            return None
        return again / (calls - again) if calls > again else None

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
        self.calls.start()
        result = run(arguments)
        self.calls.stop()
        return result
