"""The clock that searches read, and how much longer than planned they may take on it.

Every use of time in this package goes through ``current()``. To search under another clock:

    with timing.override(clock=time.process_time, patience=8.0):
        ...

The override holds for the whole process, threads included, because searches start deep inside the planner and the
training process.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """How searches measure and limit their time.

    Attributes:
        clock: the current time in seconds, from any origin.
        patience: wall-clock allowance per search phase, as a multiple of its estimated work.
        greedy_patience: wall-clock allowance of the greedy solver, as a multiple of ``Options.seconds``.
        frugal_seconds: work of ``greedy.most_frugal`` when the caller passes no options.
    """

    clock: Callable[[], float] = time.monotonic
    patience: float = 4.0
    greedy_patience: float = 1.0
    frugal_seconds: float = 6.0


# A search for the lowest peak takes at most this share of the time to plan: 6 of the default 20 s.
_FRUGAL_SHARE = 0.3

_current = Timing()


def current() -> Timing:
    """The timing in force."""
    return _current


def now() -> float:
    """The current time in seconds, by the clock in force."""
    return _current.clock()


@contextmanager
def override(**changes: object) -> Iterator[Timing]:
    """Replace fields of ``Timing`` inside a ``with`` block."""
    global _current
    before = _current
    _current = dataclasses.replace(before, **changes)  # type: ignore[arg-type]
    try:
        yield _current
    finally:
        _current = before


class _Interrupts:
    """Of all searches that make one plan."""

    def __init__(self) -> None:
        self.depth = 0
        self.came = False


_interrupts = _Interrupts()


@contextmanager
def one_plan() -> Iterator[None]:
    """A context whose searches all end with the first Ctrl-C; one within another is a part of it."""
    if not _interrupts.depth:
        _interrupts.came = False
    _interrupts.depth += 1
    try:
        yield
    finally:
        _interrupts.depth -= 1


def interrupt() -> None:
    """Ctrl-C was pressed: all searches of the present plan, if there is one, end with what they have."""
    _interrupts.came = _interrupts.depth > 0


def interrupted() -> bool:
    """Whether Ctrl-C was pressed while the present plan is made."""
    return _interrupts.came and _interrupts.depth > 0


def last_was_interrupted() -> bool:
    """Whether Ctrl-C was pressed while the last plan was made."""
    return _interrupts.came


def within(solver_seconds: float) -> AbstractContextManager[Timing]:
    """Limit searches for the lowest peak to their share of ``solver_seconds``, inside a ``with`` block."""
    return override(frugal_seconds=min(_current.frugal_seconds, _FRUGAL_SHARE * solver_seconds))
