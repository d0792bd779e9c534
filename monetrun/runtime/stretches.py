"""Measures the bytes allocated in the stretches of a training step: calls of graphs, and what lies between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from monetrun.capture.meter import Meter
from monetrun.core.event import OUTSIDE
from monetrun.planning.intervals import Stretch


class StretchMeter:
    """Cuts a step into stretches, one after the other without gaps.

    Attributes:
        stretches: those that have ended.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.stretches: list[Stretch] = []
        self._start = 0
        self._peak_bytes = 0  # of the present stretch, before what is left out

    def begin(self) -> None:
        """The first stretch begins."""
        self.meter.reset_peak()
        self._start = self.meter.current_bytes()

    def end(self, kind: str, graph: int = -1, name: str = "") -> None:
        """The present stretch ends, and the next one begins."""
        now = self.meter.current_bytes()
        peak = max(now, self._start, self._peak_bytes, self.meter.peak_bytes())
        self.stretches.append(Stretch(kind, graph, name, self._start, peak, now))
        self._start, self._peak_bytes = now, 0
        self.meter.reset_peak()

    def keep_peak(self) -> None:
        """The meter's peak is of the present stretch: it may be reset."""
        self._peak_bytes = max(self._peak_bytes, self.meter.peak_bytes())
        self.meter.reset_peak()

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """What is allocated in this context, and freed in it, is no part of the present stretch."""
        self.keep_peak()
        try:
            yield
        finally:
            self.meter.reset_peak()


class WithoutCaptures:
    """Records a step's stretches, without what capturing a graph within them allocates for a while."""

    _stretch_meter: StretchMeter

    def capturing(self) -> AbstractContextManager[None]:
        """A graph is captured in this context, perhaps within the step."""
        return self._stretch_meter.leaving_out()


def joined(stretches: Sequence[Stretch]) -> list[Stretch]:
    """``stretches``, where what the script does between two calls of graphs, or steps of optimizers, is one."""
    found: list[Stretch] = []
    for stretch in stretches:
        last = found[-1] if found else None
        if last is None or {last.kind, stretch.kind} != {OUTSIDE} or last.name or stretch.name:
            found.append(stretch)
        else:
            peak_bytes = max(last.peak_bytes, stretch.peak_bytes)
            found[-1] = replace(last, peak_bytes=peak_bytes, end_bytes=stretch.end_bytes)
    return found
