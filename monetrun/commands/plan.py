"""``monetrun plan``: plan a launch without training, and write the plan."""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from monetrun.commands.dry_run import parse_dry_run
from monetrun.core import codec, link
from monetrun.core.clocks import StepClocks, step_clocks
from monetrun.core.errors import UsageError
from monetrun.core.keeping import as_planned, as_scripted, over_link
from monetrun.core.plan import Plan, plain_schedule
from monetrun.launcher import report
from monetrun.launcher.job import Job, open_job
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.parser import LaunchParser, command_parser
from monetrun.launcher.plan_file import write_plan
from monetrun.machine.named_file import STDOUT, check_file


def prepare_parser() -> LaunchParser:
    """A launch's options, ``--out``, and the cluster to plan for."""
    description = "Plan a launch without training, and write the plan; --json prints it."
    return command_parser("plan", description, _add_options, not_reusable=["cost_model"])


def _add_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--out", default="plan.json", metavar="FILE", help="where it is written; - is stdout (default: plan.json)"
    )
    parser.add_argument("--nodes", type=_count, metavar="N", help="plan for so many nodes; they need not be here")
    parser.add_argument("--gpus", type=_count, metavar="N", help="plan for so many ranks on each node")
    parser.add_argument("--link", metavar="LINK", help=f"also time the step on several ranks; {link.GRAMMAR}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def run(words: Sequence[str]) -> int:
    """Plan, write the plan, and print it."""
    options, args = parse_dry_run("plan", prepare_parser(), words)
    if options.json and args.out == STDOUT:
        raise UsageError("--out - and --json both print the plan", "leave out one")
    check_file("--out", args.out)
    _check_replaced(args.out)
    over = None if args.link is None else link.parse(args.link)
    with open_job(_on_cluster(options, args)) as job:
        if over is not None:
            job.record = over_link(job.trial(), over)
        plan = job.planned()
        write_plan(plan, args.out)
        clocks = None if over is None else _clocks(job, plan, over)
        show(job, args.out)
        if clocks is not None and not options.quiet:
            sharded = job.record is not None and job.record.sharding is not None
            lines = report.clock_lines(*clocks, job.ranks.world_size, args.link, sharded=sharded)
            print("\n".join(lines), file=sys.stderr, flush=True)
        if options.json:
            step = {} if clocks is None else {"step": report.clock_json(*clocks, job.ranks.world_size, args.link)}
            print(json.dumps({**codec.to_plain(plan), **step}) if step else codec.dumps(plan))
    return 0


def _check_replaced(path: str) -> None:
    """Check that what is at ``path`` is a plan, of this version or another one, or nothing.

    Raises:
        UsageError: it is another file.
    """
    if not Path(path).is_file() or not (content := Path(path).read_bytes()):
        return
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {"schema", "graphs"} <= found.keys():
        raise UsageError(f"--out {path}: there is a file that is no plan, and it is not replaced", "give another --out")


def _on_cluster(options: LaunchOptions, args: argparse.Namespace) -> LaunchOptions:
    """The launch on ``--nodes`` and ``--gpus``, which replace torchrun's options."""
    torchrun, words = copy.copy(options.torchrun), list(options.reusable_words)
    for given, name in ((args.nodes, "nnodes"), (args.gpus, "nproc_per_node")):
        if given is not None:
            setattr(torchrun, name, str(given))
            words.append(f"--{name.replace('_', '-')}={given}")  # of two, torchrun takes the last
    return replace(options, torchrun=torchrun, reusable_words=tuple(words))


def _clocks(job: Job, plan: Plan, over: link.Link) -> tuple[StepClocks, StepClocks]:
    """The plain and the planned step's clocks on all ranks."""
    assert job.record is not None
    graphs, ranks = job.record.graphs, job.ranks.world_size
    planned = [own.schedule_for(graph) for own, graph in zip(plan.graphs, graphs, strict=True)]
    plain = [plain_schedule(graph) for graph in graphs]
    record = as_planned(job.record, plan.keeps_parameters)
    return step_clocks(as_scripted(record), plain, over, ranks), step_clocks(record, planned, over, ranks)


def show(job: Job, out: str) -> None:
    """Print the plan to stderr, and the commands to type next.

    Args:
        job: has planned.
        out: the plan's file, or ``-``.
    """
    options = job.options
    if options.quiet:
        return
    file = "FILE" if out == STDOUT else out
    job.print_plan(f"DRY RUN  {Path(options.script).name}     nothing trained")
    command = shlex.join(["monetrun", "--plan", file, *options.reusable_words, options.script, *options.script_args])
    if job.modelled_bytes:  # there costs and workspaces are measured
        command = f"on such a device {options.command_line(options.budget)}"
    lines = [f"  wrote {'the plan to stdout' if out == STDOUT else out}      next: {command}"]
    if job.modelled_bytes:
        lines.append(
            f"  costs are of {options.cost_model}: nothing was measured, and kernels' workspaces are not counted"
        )
    lines.append(f"  what it does: {shlex.join(['monetrun', 'explain', file])}")
    print("\n".join(lines), file=sys.stderr, flush=True)
