"""What is shown while the trial run or a solver is at work."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from monetrun.core.budget import format_bytes, format_overhead
from monetrun.solve import timing

# In a pipe, print an improvement at most this often.
_SECONDS_BETWEEN_LINES = 0.5

# In a pipe, say this often that something still goes on.
_SECONDS_BETWEEN_SIGNS = 30.0

# In a terminal, name Ctrl-C once the solver has run for this long.
_SECONDS_BEFORE_HINT = 2.0


@contextlib.contextmanager
def status(console: Console, activity: str, *, shown: bool = True) -> Iterator[None]:
    """Show ``activity``, and for how long it has been going on, until the context ends.

    In a terminal that is a line which changes; in a pipe a line at once, and another every half minute.
    """
    text = f"monetrun: {activity}"
    if not shown:
        yield
        return
    began = time.monotonic()
    if console.is_terminal:
        with _live(console, lambda: f"{text} {time.monotonic() - began:.0f} s"):
            yield
        return
    print(text, file=sys.stderr, flush=True)
    with _signs(lambda: text):
        yield


@contextlib.contextmanager
def _signs(text: Callable[[], str]) -> Iterator[None]:
    """In a pipe, a line every half minute, until the context ends."""
    began, ended = time.monotonic(), threading.Event()

    def say_that_it_goes_on() -> None:
        while not ended.wait(_SECONDS_BETWEEN_SIGNS):
            print(f"{text()}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)

    threading.Thread(target=say_that_it_goes_on, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class SolverProgress:
    """Shows overhead, bound and gap while a solver runs: a line that changes in a terminal, new lines in a pipe.

    It is a context manager, and the solver's ``Options.on_progress``; ``search`` is its ``Options.on_search``.

    Args:
        console: where it is shown.
        plain_seconds: cost of the plain step.
        activity: what is being done, printed before the colon.
        shown: False: show nothing.
    """

    def __init__(
        self, console: Console, plain_seconds: float, activity: str = "planning", *, shown: bool = True
    ) -> None:
        self.activity = self._whole = activity
        self._console = console
        self._plain_seconds = plain_seconds
        self._began = time.monotonic()
        self._best_seconds, self._bound_seconds = math.inf, 0.0
        self._printed = ""
        self._printed_at = self._began  # the first plans, which are soon surpassed, have no line
        self._prints_lines = shown and not console.is_terminal
        self._goes_on = contextlib.ExitStack()
        self._live = _live(console, self._live_line) if shown and console.is_terminal else None

    def __enter__(self) -> SolverProgress:
        if self._live is not None:
            self._live.start()
        if self._prints_lines:
            self._goes_on.enter_context(_signs(lambda: f"monetrun: {self.activity}"))
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._goes_on.close()
        self._print_line()

    def __call__(self, seconds: float, incumbent_seconds: float, bound_seconds: float) -> None:
        """Take a better plan, or a better bound on all plans.

        Args:
            seconds: since the solver began; what is shown counts from when the planner began.
            incumbent_seconds: cost of a step under the best plan; infinite if there is none.
            bound_seconds: lower bound on the cost of a step under any plan.
        """
        better = incumbent_seconds < self._best_seconds
        self._best_seconds, self._bound_seconds = incumbent_seconds, bound_seconds
        if better and time.monotonic() - self._printed_at >= _SECONDS_BETWEEN_LINES:
            self._print_line()

    def found(self, overhead: float, bound: float) -> None:
        """The plan that is taken, which need not be the last one seen: what is printed last is of it."""
        taken = (1.0 + overhead) * self._plain_seconds
        if not math.isclose(taken, self._best_seconds, rel_tol=1e-6):
            self.activity = self._whole  # another search's than the last one's
        self._best_seconds, self._bound_seconds = taken, (1.0 + bound) * self._plain_seconds
        if timing.last_was_interrupted() and self._prints_lines:
            self._console.print(Text("monetrun: interrupted: the best plan so far is taken"))

    def begin(self, budget_bytes: int) -> None:
        """Start again for another budget."""
        self._begin(f"planning {format_bytes(budget_bytes)}")
        self._whole = self.activity
        self._began, self._printed_at = time.monotonic(), -math.inf

    def search(self, name: str) -> None:
        """Start again for other plans of the same budget: those called ``name``, or (empty) all."""
        self._begin(f"{self._whole}, {name}" if name else self._whole)

    def _begin(self, activity: str) -> None:
        self._print_line()
        self.activity = activity
        self._best_seconds, self._bound_seconds = math.inf, 0.0

    def text(self) -> str:
        """``"+12.3% (bound 11.8%, gap 0.5%)"``."""
        overhead = self._overhead(self._best_seconds)
        bound = self._overhead(self._bound_seconds) if self._bound_seconds > 0 else 0.0
        if math.isinf(overhead):
            return f"no plan yet (bound {bound:.1%})" if 0 < bound < math.inf else "no plan yet"
        bound = min(bound, overhead)
        return format_overhead(overhead, bound)

    def _overhead(self, seconds: float) -> float:
        return seconds / self._plain_seconds - 1.0 if self._plain_seconds else 0.0

    def _print_line(self) -> None:
        """In a pipe, print a line, unless there is no plan or the line would repeat the last one."""
        line = f"monetrun: {self.activity}: {self.text()}"
        if self._prints_lines and line != self._printed and not math.isinf(self._best_seconds):
            self._printed, self._printed_at = line, time.monotonic()
            self._console.print(Text(f"{line} {time.monotonic() - self._began:.1f} s"))

    def _live_line(self) -> str:
        seconds = time.monotonic() - self._began
        line = f"monetrun: {self.activity}: {self.text()} {seconds:.1f} s"
        hint = "  Ctrl-C uses this plan"
        has_plan = not math.isinf(self._best_seconds)
        if seconds > _SECONDS_BEFORE_HINT and has_plan and len(line + hint) + 3 < self._console.width:
            line += hint
        return line


def _live(console: Console, line: Callable[[], str]) -> Live:
    """A spinner before what ``line`` gives each time, on one line of a terminal, which is erased at the end."""
    spinner = Spinner("dots")

    def shown() -> Spinner:
        spinner.update(text=Text(line(), no_wrap=True, overflow="ellipsis"))
        return spinner

    return Live(get_renderable=shown, console=console, refresh_per_second=8, transient=True)
