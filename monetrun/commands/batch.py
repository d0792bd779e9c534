"""``monetrun batch``: the largest batch that trains within a budget, alone or as a part of a fixed one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rich.console import Console

from monetrun.commands.dry_run import parse_dry_run
from monetrun.core import budget as budgets
from monetrun.core import codec
from monetrun.core.budget import format_budget, format_bytes, format_percent
from monetrun.core.errors import UsageError
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.launcher import report
from monetrun.launcher.job import Job, open_job
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.parser import LaunchParser, command_parser
from monetrun.planning.batch import MOST_OVERHEAD, Found, feeds_only, find
from monetrun.planning.batch_prediction import SMALLEST_TRIAL, BatchRequest
from monetrun.planning.batch_sizes import Sizes, divisors

PLACEHOLDER = "{batch}"
PASSES = "{accumulate}"
GLOBAL_BATCH = "{global}"
_TRIAL_PASSES = 2  # the second forward has the first one's gradients beside it, as all later ones have

_EXAMPLE = f"monetrun batch --budget 12GiB train.py --batch-size {PLACEHOLDER}"


def prepare_parser() -> LaunchParser:
    """A launch's options, and the limits of the search."""
    description = (
        "Find the largest batch that trains within a budget. "
        f"Write {PLACEHOLDER} for the batch size in the script's arguments."
    )
    return command_parser("batch", description, _add_options, not_reusable=["cost_model"])


def _add_options(parser: argparse._ActionsContainer) -> None:
    add = parser.add_argument
    add(
        "--max-overhead",
        default="20%",
        metavar="SHARE",
        help="added compute to allow (default: 20%% of the plain step's)",
    )
    add("--multiple", type=int, default=1, metavar="N", help="only batch sizes that are multiples of N (default: 1)")
    add(
        "--accumulate",
        type=int,
        default=0,
        metavar="N",
        help="keep N samples to an optimizer step on all devices: the batch is what a device takes in a forward pass, "
        f"and divides its share of N. Write {PASSES} for the number of forward passes in a step, or {GLOBAL_BATCH} for "
        "N, in the script's arguments",
    )
    add("--trials", default="", metavar="A,B", help="batch sizes of the first two trial runs (default: 4,8)")


def run(words: Sequence[str]) -> int:
    """Find the largest batch and print it, and the command that trains with it."""
    options, args = parse_dry_run("batch", prepare_parser(), words)
    with open_job(options) as job:
        limits = read_limits(options, args, job.budget_bytes(), job.ranks.world_size)
        step = Accumulation(args.accumulate, job.ranks.world_size)
    if job.budget.kind != budgets.BYTES:  # every trial gets the same budget: what is free now
        options = replace(options, budget=format_budget(limits.budget_bytes))

    def say(line: str) -> None:
        if not options.quiet:
            print(f"monetrun: {line}", file=sys.stderr, flush=True)

    with ExitStack() as open_jobs:
        found = find(limits, _Jobs(options, step, open_jobs), say)
    if options.json:
        passes = step.passes(found.batch)
        print(json.dumps({**codec.to_plain(found), "accumulate": passes, "global_batch": step.of(found.batch, passes)}))
    else:
        show(found, step, report.stdout_console())
    if not options.quiet:
        command = with_batch(options, found.batch, step).command_line(options.budget)
        print(f"  next: {command}", file=sys.stderr, flush=True)
    return 0


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How many forward passes make up an optimizer step.

    Attributes:
        total: samples of a step on all devices; 0: those of one forward pass on each.
        world_size: devices.
    """

    total: int = 0
    world_size: int = 1

    def passes(self, batch: int) -> int:
        """Forward passes of a step on each device."""
        return self.total // (batch * self.world_size) if self.total else 1

    def of(self, batch: int, passes: int) -> int:
        """Samples of a step of so many forward passes on all devices."""
        return batch * passes * self.world_size


ONE_PASS = Accumulation()


class _Jobs:
    """A ``planning.batch.Script``: a job for each batch."""

    def __init__(self, options: LaunchOptions, step: Accumulation, open_jobs: ExitStack) -> None:
        self._options = options
        self._step = step
        self._open_jobs = open_jobs
        self._jobs: dict[int, Job] = {}

    def trial(self, batch: int) -> StepRecord:
        return self._job(batch).trial()

    def plan(self, batch: int) -> Plan:
        return self._job(batch).planned()

    def _job(self, batch: int) -> Job:
        if batch not in self._jobs:
            # as many passes at each batch, or the steps would not have the same structure
            passes = _TRIAL_PASSES if self._step.total else 1
            options = with_batch(self._options, batch, self._step, passes)
            self._jobs[batch] = self._open_jobs.enter_context(open_job(options))
        return self._jobs[batch]


def read_limits(
    options: LaunchOptions, args: argparse.Namespace, budget_bytes: int | None, world_size: int = 1
) -> BatchRequest:
    """The limits that were given on the command line.

    Args:
        options: of the launch.
        args: the command's own options.
        budget_bytes: the budget in bytes; None if it is a share of the plain peak.
        world_size: devices that take part in a step.

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
        given = {int(w) for w in words if w.strip().isdecimal() and int(w) > 0}
        if len(words) != 2 or len(given) != 2:
            raise UsageError(f"--trials {args.trials!r} is not two different batch sizes", "--trials 4,8")
        trials = (min(given), max(given))
    return BatchRequest(
        budget_bytes,
        _parse_share(args.max_overhead),
        _sizes(options, args.accumulate, args.multiple, world_size),
        trials,
        options.algorithm,
        options.solver_options(),
    )


def _sizes(options: LaunchOptions, total: int, multiple: int, world_size: int) -> Sizes:
    """The batches to choose from; ``total`` samples to a step, 0: any number.

    Raises:
        UsageError: no batch can be chosen, or the script is not told how many forward passes make a step.
    """
    words = options.script_args
    if not total:
        if unknown := [p for p in (PASSES, GLOBAL_BATCH) if any(p in word for word in words)]:
            raise UsageError(f"{unknown[0]} needs the samples of a step", "give them: --accumulate 256")
        return Sizes(multiple)
    if total < 1:
        raise UsageError(f"--accumulate {total} is not a positive number", "--accumulate 256")
    if total % world_size:
        raise UsageError(
            f"--accumulate {total} is not a multiple of the {world_size} devices",
            f"--accumulate {-(-total // world_size) * world_size}",
        )
    if not any(p in word for p in (PASSES, GLOBAL_BATCH) for word in words):
        raise UsageError(
            f"no argument of {options.script} contains {PASSES} or {GLOBAL_BATCH}",
            f"the script must be given the forward passes of a step, or its samples: {_EXAMPLE} --accumulate {PASSES}",
        )
    share = total // world_size
    sizes = divisors(share, multiple)
    if not sizes.among:
        raise UsageError(
            f"--multiple {multiple} does not divide the {share} samples of a device in a step",
            f"give --multiple a divisor of {share}",
        )
    return sizes


def _parse_share(text: str) -> float:
    digits = text.strip().removesuffix("%")
    try:
        value = float(digits) / (100 if digits != text.strip() else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < (MOST_OVERHEAD if digits != text.strip() else 1):
        raise UsageError(f"--max-overhead {text!r} is not a share of the plain step's compute", "--max-overhead 20%")
    return value


def with_batch(options: LaunchOptions, batch: int, step: Accumulation = ONE_PASS, passes: int = 0) -> LaunchOptions:
    """``options`` with numbers in the script's arguments, in place of the placeholders.

    Args:
        options: of the launch.
        batch: of a forward pass on one device.
        step: what makes up a step.
        passes: forward passes of a step; 0: as many as ``step`` needs.
    """
    passes = passes or step.passes(batch)
    numbers = {PLACEHOLDER: batch, PASSES: passes, GLOBAL_BATCH: step.of(batch, passes)}

    def filled(word: str) -> str:
        for placeholder, number in numbers.items():
            word = word.replace(placeholder, str(number))
        return word

    return options.with_script_args([filled(word) for word in options.script_args])


def show(found: Found, step: Accumulation, console: Console) -> None:
    """Print the largest batch, its plan, and why the next batch does not fit."""
    plain, planned = found.plain_peak_bytes, found.planned_peak_bytes
    if found.plain_reserved_bytes is not None and found.planned_reserved_bytes is not None:
        plain, planned = found.plain_reserved_bytes, found.planned_reserved_bytes
    console.print(f"[bold]largest batch: {found.batch}[/bold]  (a trial run at {found.batch} was planned)")
    console.print(
        f"  budget {format_bytes(found.budget_bytes)} | planned {format_bytes(planned)} "
        f"({report.share(planned, plain)}) | "
        f"overhead {format_percent(found.overhead, signed=True)} of {100 * found.max_overhead:g}% "
        f"(bound {format_percent(found.bound)})"
    )
    if found.planned_reserved_bytes is not None:
        console.print(report.allocated_line(found.plain_peak_bytes, found.planned_peak_bytes))
    if step.total:
        passes = step.passes(found.batch)
        console.print(
            f"  {found.batch} samples x {step.world_size} devices x {passes} forward passes = {step.total} in a step"
        )
    console.print(f"  without monetrun it takes {format_bytes(plain)}")
    if not found.next_batch:
        console.print("  no larger one: it is all that a device has in a step")
        return
    refused = {v.batch: v.reason for v in found.verified if not v.fits}
    ends = feeds_only(found.batch)
    limits = f"{format_bytes(found.budget_bytes)} at {100 * found.max_overhead:g}% overhead (--max-overhead)"
    unseen = ends if ends in refused.values() else f"predicted not to fit {limits}"
    why = refused.get(found.next_batch, unseen)
    console.print(f"  batch {found.next_batch}: {why}")
