"""What monetrun prints: how planning goes, a ledger before training, what was measured after it. Logs go to stderr."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from monetrun.core import codec
from monetrun.core.budget import format_bytes
from monetrun.core.graph import Graph
from monetrun.core.plan import Plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks measured, together.

    Attributes:
        plan: the plan they ran, if any.
        measured_peak_bytes: the most that any rank allocated in a training step, None if nothing counted it.
        measured_overhead: recomputation's share of the timed calls' other seconds (largest of the ranks), or None.
        steps: training steps of rank 0.
        warnings: of all ranks.
    """

    plan: Plan | None
    measured_peak_bytes: int | None
    measured_overhead: float | None
    steps: int
    warnings: tuple[str, ...]


def gather(reports: Sequence[Mapping[str, Any]]) -> Outcome:
    """Put the ranks' reports together.

    Raises:
        ValueError: a report is not what a worker writes.
    """
    plans = [codec.from_plain(Plan, r["plan"]) for r in reports if r.get("plan")]
    peaks = [int(r["measured_peak_bytes"]) for r in reports if r.get("exact") and r.get("measured_peak_bytes")]
    overheads = [float(r["measured_overhead"]) for r in reports if r.get("measured_overhead") is not None]
    warnings = sorted({w for r in reports for w in r.get("warnings", ())})
    return Outcome(
        plan=plans[0] if plans else None,
        measured_peak_bytes=max(peaks) if peaks else None,
        measured_overhead=max(overheads) if overheads else None,
        steps=max((int(r.get("steps", 0)) for r in reports), default=0),
        warnings=tuple(warnings),
    )


def console(file: TextIO | None = None) -> Console:
    """Where reports go: stderr, without colour when it is no terminal or ``NO_COLOR`` is set."""
    return Console(file=file, stderr=file is None, highlight=False, soft_wrap=True)


def screen() -> Console:
    """Where the result of a command goes: stdout; into a pipe, lines are as wide as what they say."""
    found = Console(highlight=False, soft_wrap=True)
    if not found.is_terminal:
        found.width = 200
    return found


def table(*columns: str) -> Table:
    """An empty table without lines, the columns to the right but for those whose heading begins with ``<``."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        left = column.startswith("<")
        made.add_column(column.removeprefix("<"), justify="left" if left else "right", no_wrap=True)
    return made


# Into a pipe, a better plan is told at most this often.
_SECONDS_BETWEEN_LINES = 0.5


class SolverProgress:
    """Overhead, bound and gap while a solver runs.

    In a terminal one line that changes, in a pipe a line for each better plan. A context manager, and the
    ``Options.on_progress`` of the solver.

    Args:
        console: where it is shown.
        plain_seconds: what the plain step costs.
        what: is being done, before the colon.
        shown: False: nothing is.
    """

    def __init__(self, console: Console, plain_seconds: float, what: str = "planning", *, shown: bool = True) -> None:
        self.what = what
        self._console = console
        self._plain_seconds = plain_seconds
        self._began = time.monotonic()
        self._best_seconds, self._bound_seconds = math.inf, 0.0
        self._seconds = 0.0  # what the solver's clock said last
        self._told = ""
        self._told_at = -math.inf
        self._shown = shown and not console.is_terminal
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if shown and console.is_terminal:
            self._live = Live(get_renderable=self._line, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> SolverProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._tell()

    def __call__(self, seconds: float, incumbent_seconds: float, bound_seconds: float) -> None:
        """The best plan, or the bound on all plans, has become better.

        Args:
            seconds: since the solver began.
            incumbent_seconds: what the best plan's step costs; infinite where there is none.
            bound_seconds: no step costs less.
        """
        better = incumbent_seconds < self._best_seconds
        self._best_seconds, self._bound_seconds, self._seconds = incumbent_seconds, bound_seconds, seconds
        if better and time.monotonic() - self._told_at >= _SECONDS_BETWEEN_LINES:
            self._tell()

    def begin(self, budget_bytes: int) -> None:
        """Another budget is planned now: what was found for the last one does not count."""
        self._tell()
        self.what = f"planning {format_bytes(budget_bytes)}"
        self._best_seconds, self._bound_seconds = math.inf, 0.0
        self._began, self._told_at = time.monotonic(), -math.inf

    def _tell(self) -> None:
        """A line of what is known, unless it has been told."""
        said = f"monetrun: {self.what}: {self.text()}"
        if self._shown and said != self._told and not math.isinf(self._best_seconds):
            self._told, self._told_at = said, time.monotonic()
            self._console.print(Text(f"{said} {self._seconds:.1f} s"))

    def text(self) -> str:
        """``"+12.3% (bound 11.8%, gap 0.5%)"``."""
        overhead = self._overhead(self._best_seconds)
        bound = self._overhead(self._bound_seconds) if self._bound_seconds > 0 else 0.0
        if math.isinf(overhead):
            return f"no plan yet (bound {bound:.1%})" if 0 < bound < math.inf else "no plan yet"
        bound = min(bound, overhead)
        return f"{overhead:+.1%} (bound {bound:.1%}, gap {overhead - bound:.1%})"

    def _overhead(self, seconds: float) -> float:
        return seconds / self._plain_seconds - 1.0 if self._plain_seconds else 0.0

    def _line(self) -> Spinner:
        seconds = time.monotonic() - self._began
        said = f"monetrun: {self.what}: {self.text()} {seconds:.1f} s"
        hint = "  Ctrl-C takes it"
        if seconds > 2 and not math.isinf(self._best_seconds) and len(said + hint) + 3 < self._console.width:
            said += hint
        self._spinner.update(text=Text(said, no_wrap=True, overflow="ellipsis"))
        return self._spinner


def share(nbytes: int, whole: int) -> str:
    """``"0.50x"``."""
    return f"{nbytes / whole:.2f}x" if whole else ""


def plan_lines(plan: Plan, title: str, graphs: Sequence[Graph] = ()) -> list[str]:
    """The ledger: what the peak consists of, line by line, adding up to it.

    With the plan's ``graphs`` the other implementations that it uses are told apart by their kind.
    """
    lines = [
        f"[bold]{title}[/bold]",
        f"  plain peak {format_bytes(plan.plain_peak_bytes)} | budget {format_bytes(plan.budget_bytes)} | "
        f"planned {format_bytes(plan.planned_peak_bytes)} ({share(plan.planned_peak_bytes, plan.plain_peak_bytes)}) | "
        f"overhead {plan.overhead:+.1%} (bound {plan.bound:.1%}, gap {plan.gap:.1%})",
        "  " + " + ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in plan.ledger.items()),
    ]
    again = again_count(plan)
    total = sum(len(g.schedule.forward) for g in plan.graphs)
    others = sum(s.implementation > 0 for g in plan.graphs for s in (*g.schedule.forward, *g.schedule.backward))
    chosen = [
        graph.operators[s.operator].implementations[s.implementation]
        for g, graph in zip(plan.graphs, graphs, strict=False)
        for s in (*g.schedule.forward, *g.schedule.backward)
        if s.implementation
    ]
    kinds = Counter(implementation.kind for implementation in chosen)
    named = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or str(others)
    lines.append(f"  {again} of {total} forward operators run again; other implementations: {named}")
    if rounded := sum(not implementation.exact for implementation in chosen):
        lines.append(f"  {rounded} of these are within rounding of eager; --implementations exact keeps its bits")
    return lines


def again_count(plan: Plan) -> int:
    """How many forward operators run again in the backward pass, each counted as often as it does."""
    count = 0
    for graph in plan.graphs:
        forward = {s.operator for s in graph.schedule.forward}
        count += sum(s.operator in forward for s in graph.schedule.backward)
    return count


def outcome_lines(outcome: Outcome) -> list[str]:
    """The end of a run: planned beside measured."""
    plan = outcome.plan
    if plan is None:
        return ["[bold]monetrun[/bold]: nothing was planned"]
    measured = outcome.measured_peak_bytes
    counted = "not counted (see monetrun doctor)" if measured is None else format_bytes(measured)
    if measured is not None:
        counted += f" ({share(measured, plan.plain_peak_bytes)})"
    overhead = outcome.measured_overhead
    return [
        f"[bold]monetrun[/bold]  {outcome.steps} training steps",
        f"  plain peak     {format_bytes(plan.plain_peak_bytes)}",
        f"  budget         {format_bytes(plan.budget_bytes)} ({share(plan.budget_bytes, plan.plain_peak_bytes)})",
        f"  planned peak   {format_bytes(plan.planned_peak_bytes)} "
        f"({share(plan.planned_peak_bytes, plan.plain_peak_bytes)})",
        f"  measured peak  {counted}",
        f"  overhead       {plan.overhead:+.1%} planned; recomputation "
        + ("not measured" if overhead is None else f"{overhead:+.1%} measured"),
    ]


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The same, for ``--json``."""
    plan = outcome.plan
    return {
        "plain_peak_bytes": plan and plan.plain_peak_bytes,
        "budget_bytes": plan and plan.budget_bytes,
        "planned_peak_bytes": plan and plan.planned_peak_bytes,
        "measured_peak_bytes": outcome.measured_peak_bytes,
        "planned_overhead": plan and plan.overhead,
        "measured_recomputation": outcome.measured_overhead,
        "steps": outcome.steps,
        "warnings": list(outcome.warnings),
    }
