"""``monetrun plan``: plan a launch without training, and write the plan."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from monetrun.commands.dry_run import parse_dry_run
from monetrun.core import codec
from monetrun.launcher.job import Job, open_job
from monetrun.launcher.parser import LaunchParser, command_parser
from monetrun.launcher.plan_file import write_plan


def prepare_parser() -> LaunchParser:
    """A launch's options, and ``--out``."""
    description = "Plan a launch without training, and write the plan; --json prints it."
    return command_parser("plan", description, _add_options)


def _add_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--out", default="plan.json", metavar="FILE", help="where it is written (default: plan.json)")


def run(words: Sequence[str]) -> int:
    """Plan, write the plan, and print it."""
    options, args = parse_dry_run("plan", prepare_parser(), words)
    with open_job(options) as job:
        plan = job.planned()
        write_plan(plan, args.out)
        show(job, args.out)
        if options.json:
            print(codec.dumps(plan))
    return 0


def show(job: Job, out: str) -> None:
    """Print the plan to stderr, and the commands to type next.

    Args:
        job: has planned.
        out: the plan's file.
    """
    options = job.options
    if options.quiet:
        return
    job.print_plan(f"DRY RUN  {Path(options.script).name}     nothing trained")
    command = shlex.join(["monetrun", "--plan", out, options.script, *options.script_args])
    lines = [f"  wrote {out}      next: {command}"]
    if job.modelled_bytes:
        lines.append(
            f"  costs are of {options.cost_model}: nothing was measured, and kernels' workspaces are not counted"
        )
    lines.append(f"  what it does: {shlex.join(['monetrun', 'explain', out])}")
    print("\n".join(lines), file=sys.stderr, flush=True)
