"""``monetrun batch``: the largest batch that trains within a budget."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from rich.console import Console

from monetrun.commands.dry_run import parse_dry_run
from monetrun.core import budget as budgets
from monetrun.core import codec
from monetrun.core.budget import format_budget, format_bytes
from monetrun.core.errors import UsageError
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.launcher import report
from monetrun.launcher.job import Job, open_job
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.parser import LaunchParser, command_parser
from monetrun.planning.batch import SMALLEST_TRIAL, BatchRequest, Found, find

PLACEHOLDER = "{batch}"

_EXAMPLE = f"monetrun batch --budget 12GiB train.py --batch-size {PLACEHOLDER}"


def prepare_parser() -> LaunchParser:
    """A launch's options, and the limits of the search."""
    description = (
        "Find the largest batch that trains within a budget. "
        f"Write {PLACEHOLDER} for the batch size in the script's arguments."
    )
    return command_parser("batch", description, _add_options)


def _add_options(parser: argparse._ActionsContainer) -> None:
    add = parser.add_argument
    add(
        "--max-overhead",
        default="20%",
        metavar="SHARE",
        help="added compute to allow (default: 20%% of the plain step's)",
    )
    add("--multiple", type=int, default=1, metavar="N", help="only batch sizes that are multiples of N (default: 1)")
    add("--trials", default="", metavar="A,B", help="batch sizes of the first two trial runs (default: 4,8)")


def run(words: Sequence[str]) -> int:
    """Find the largest batch and print it, and the command that trains with it."""
    options, args = parse_dry_run("batch", prepare_parser(), words)
    with open_job(options) as job:
        limits = read_limits(options, args, job.budget_bytes())
    if job.budget.kind != budgets.BYTES:  # every trial gets the same budget: what is free now
        options = replace(options, budget=format_budget(limits.budget_bytes))

    def say(line: str) -> None:
        if not options.quiet:
            print(f"monetrun: {line}", file=sys.stderr, flush=True)

    with ExitStack() as open_jobs:
        found = find(limits, _Jobs(options, open_jobs), say)
    if options.json:
        print(codec.dumps(found))
    else:
        show(found, report.stdout_console())
    if not options.quiet:
        command = with_batch(options, found.batch).command_line(options.budget)
        print(f"  next: {command}", file=sys.stderr, flush=True)
    return 0


class _Jobs:
    """A ``planning.batch.Script``: a job for each batch."""

    def __init__(self, options: LaunchOptions, open_jobs: ExitStack) -> None:
        self._options = options
        self._open_jobs = open_jobs
        self._jobs: dict[int, Job] = {}

    def trial(self, batch: int) -> StepRecord:
        return self._job(batch).trial()

    def plan(self, batch: int) -> Plan:
        return self._job(batch).planned()

    def _job(self, batch: int) -> Job:
        if batch not in self._jobs:
            self._jobs[batch] = self._open_jobs.enter_context(open_job(with_batch(self._options, batch)))
        return self._jobs[batch]


def read_limits(options: LaunchOptions, args: argparse.Namespace, budget_bytes: int | None) -> BatchRequest:
    """The limits that were given on the command line.

    Args:
        options: of the launch.
        args: the command's own options.
        budget_bytes: the budget in bytes; None if it is a share of the plain peak.

    Raises:
        UsageError: one cannot be used, or no argument of the script has the placeholder.
    """
    if not any(PLACEHOLDER in word for word in options.script_args):
        raise UsageError(
            f"no argument of {options.script} contains {PLACEHOLDER}",
            f"write it for the batch size: {_EXAMPLE}",
        )
    if budget_bytes is None:
        raise UsageError(
            f"--budget {options.budget} is a share of the plain peak, which grows with the batch: all would fit",
            f"give bytes or a share of the free memory: {budgets.GRAMMAR}",
        )
    if args.multiple < 1:
        raise UsageError(f"--multiple {args.multiple} is not a positive number", "--multiple 8")
    first = -(-SMALLEST_TRIAL // args.multiple) * args.multiple
    trials = (first, 2 * first)
    if args.trials:
        words = args.trials.split(",")
        if len(words) != 2 or not all(w.strip().isdecimal() and int(w) > 0 for w in words) or len({*words}) != 2:
            raise UsageError(f"--trials {args.trials!r} is not two different batch sizes", "--trials 4,8")
        trials = (min(map(int, words)), max(map(int, words)))
    max_overhead = _parse_share(args.max_overhead)
    return BatchRequest(budget_bytes, max_overhead, args.multiple, trials, options.algorithm, options.solver_options())


def _parse_share(text: str) -> float:
    digits = text.strip().removesuffix("%")
    try:
        value = float(digits) / (100 if digits != text.strip() else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < (100 if digits != text.strip() else 1):
        raise UsageError(f"--max-overhead {text!r} is not a share of the plain step's compute", "--max-overhead 20%")
    return value


def with_batch(options: LaunchOptions, batch: int) -> LaunchOptions:
    """``options`` with the batch in the script's arguments, in place of the placeholder."""
    return options.with_script_args([word.replace(PLACEHOLDER, str(batch)) for word in options.script_args])


def show(found: Found, console: Console) -> None:
    """Print the largest batch, its plan, and why the next batch does not fit."""
    share = report.share(found.planned_peak_bytes, found.plain_peak_bytes)
    console.print(f"[bold]largest batch: {found.batch}[/bold]  (a trial run at {found.batch} was planned)")
    console.print(
        f"  budget {format_bytes(found.budget_bytes)} | planned {format_bytes(found.planned_peak_bytes)} ({share}) | "
        f"overhead {found.overhead:+.1%} of {found.max_overhead:.0%} (bound {found.bound:.1%})"
    )
    console.print(f"  without monetrun it takes {format_bytes(found.plain_peak_bytes)}")
    refused = {v.batch: v.reason for v in found.verified if not v.fits}
    why = refused.get(found.next_batch, "predicted not to fit")
    console.print(f"  batch {found.next_batch}: {why}")
