"""``monetrun batch``: the largest batch that trains within a budget."""

from __future__ import annotations

import argparse
import copy

from rich.console import Console

from monetrun.core import budget as budgets_of
from monetrun.core.budget import format_bytes
from monetrun.core.errors import UsageError
from monetrun.core.options import Options
from monetrun.launcher import report
from monetrun.planning.batch import SMALLEST_TRIAL, BatchRequest, Found

PLACEHOLDER = "{batch}"


_EXAMPLE = f"monetrun batch --budget 12GiB train.py --batch-size {PLACEHOLDER}"


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add those of ``monetrun batch``."""
    add = parser.add_argument
    add("--max-overhead", default="20%", metavar="SHARE", help="compute that recomputation may add (default: 20%%)")
    add("--multiple", type=int, default=1, metavar="N", help="only batches that are multiples of N (default: 1)")
    add("--trials", default="", metavar="A,B", help="the two small batches to begin with (default: 4,8)")


def read_limits(args: argparse.Namespace, budget_bytes: int | None, options: Options) -> BatchRequest:
    """The limits that were given on the command line.

    Args:
        args: with ``add_options``' and a launch's options.
        budget_bytes: what ``--budget`` comes to; None where it is a share of the plain peak.
        options: for the solver.

    Raises:
        UsageError: one cannot be used, or no argument of the script has the placeholder.
    """
    if not any(PLACEHOLDER in word for word in args.training_script_args):
        raise UsageError(
            f"no argument of {args.training_script} says where the batch goes",
            f"write {PLACEHOLDER} in its place: {_EXAMPLE}",
        )
    if budget_bytes is None:
        raise UsageError(
            f"--budget {args.budget} grows with the batch, so that every batch would fit",
            f"give bytes or a share of what is free: {budgets_of.GRAMMAR}",
        )
    if args.multiple < 1:
        raise UsageError(f"--multiple {args.multiple} is not a positive number", "--multiple 8")
    first = -(-SMALLEST_TRIAL // args.multiple) * args.multiple
    trials = (first, 2 * first)
    if args.trials:
        words = args.trials.split(",")
        if len(words) != 2 or not all(w.strip().isdecimal() and int(w) > 0 for w in words) or len({*words}) != 2:
            raise UsageError(f"--trials {args.trials!r} is not two different batches", "--trials 4,8")
        trials = (min(map(int, words)), max(map(int, words)))
    return BatchRequest(budget_bytes, _share(args.max_overhead), args.multiple, trials, args.algorithm, options)


def _share(text: str) -> float:
    digits = text.strip().removesuffix("%")
    try:
        value = float(digits) / (100 if digits != text.strip() else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < (100 if digits != text.strip() else 1):
        raise UsageError(f"--max-overhead {text!r} is not a share of the plain step's compute", "--max-overhead 20%")
    return value


def with_batch(args: argparse.Namespace, batch: int) -> argparse.Namespace:
    """A copy of ``args`` with the batch in the script's arguments."""
    changed = copy.copy(args)
    changed.training_script_args = [word.replace(PLACEHOLDER, str(batch)) for word in args.training_script_args]
    return changed


def show(found: Found, console: Console) -> None:
    """Print the answer."""
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
