"""The ``monetrun`` command: a launch, or one of the commands of the group below.

The first argument decides, before either parser has seen it: a command's name is that command; anything else is a
launch, with torchrun's grammar. Errors are raised everywhere else and printed here, once, with the exit code that they
carry.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

import click

from monetrun import __version__
from monetrun.core import codec
from monetrun.core.budget import format_budget
from monetrun.core.errors import MonetrunError, UsageError
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.launcher import agent as launch
from monetrun.launcher import report
from monetrun.launcher.job import Job, read_plan
from monetrun.launcher.script import check_script
from monetrun.machine.store import Store, default_root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv[1:]`` by default) and give the exit code; errors are printed, not raised."""
    words = list(sys.argv[1:] if argv is None else argv)
    with _Outcome() as outcome:
        outcome.exit_code = _dispatch(words)
    return outcome.exit_code


def console() -> None:
    """The ``monetrun`` command of an installed package."""
    sys.exit(main())


def _dispatch(words: list[str]) -> int:
    commands = {name: command.get_short_help_str(80) for name, command in sorted(group.commands.items())}
    first = words[0] if words else ""
    if first in commands:
        return int(group.main(words, prog_name="monetrun", standalone_mode=False) or 0)
    if first in ("-h", "--help"):
        print(launch.help_text(commands), end="")
        return 0
    if first == "--version":
        print(f"monetrun {__version__}")
        return 0
    return run_command(launch.parser(commands).parse_args(words))


def run_command(args: argparse.Namespace) -> int:
    """Check, plan, launch, report; gives the exit code.

    Raises:
        ScriptNotFound, UsageError: nothing was started.
        MonetrunError: from planning or from the report.
    """
    check_script(args)
    with _terminable():
        job = Job(args)
        try:
            with launch.restored_environment():  # a launch's own variables reach the workers only
                environment = job.prepare()
            exit_code = launch.launch(args, environment)
            job.finish(exit_code)
        finally:
            job.close()
    return exit_code


@contextmanager
def _terminable() -> Iterator[None]:
    """End by ``SystemExit`` on SIGTERM, as on Ctrl-C, so that what was begun is cleaned up."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Outcome:
    """The one place where errors become a message and an exit code."""

    exit_code = 0

    def __enter__(self) -> _Outcome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, (SystemExit, type(None))):
            return False
        if isinstance(error, MonetrunError):
            self.exit_code = error.exit_code
            print(f"monetrun: error: {error}", file=sys.stderr)
        elif isinstance(error, click.ClickException):
            self.exit_code = error.exit_code
            hint = f"\n  {error.ctx.command_path} --help" if isinstance(error, click.UsageError) and error.ctx else ""
            print(f"monetrun: error: {error.format_message()}{hint}", file=sys.stderr)
        elif isinstance(error, (KeyboardInterrupt, click.Abort)):
            self.exit_code = 128 + signal.SIGINT
            print("monetrun: stopped by SIGINT", file=sys.stderr)
        elif isinstance(error, BrokenPipeError):
            # whoever read our output has left; nothing more may be written to it, by the interpreter's end either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.exit_code = 128 + signal.SIGPIPE
        else:
            self.exit_code = MonetrunError.exit_code
            traceback.print_exception(kind, error, trace)
            print("monetrun: error: this is a fault of monetrun itself, please report it", file=sys.stderr)
        return True


# ---- commands


@click.group(no_args_is_help=False)
def group() -> None:
    """The commands beside the launch."""


@group.group(no_args_is_help=False)
def cache() -> None:
    """What is kept between runs: plans, probes, measured costs."""


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def cache_list(as_json: bool) -> None:
    """List what is kept, the newest first."""
    store = Store(default_root())
    entries = store.entries()
    if as_json:
        rows = [{**{f.name: getattr(e, f.name) for f in dataclasses.fields(e)}, "path": str(e.path)} for e in entries]
        click.echo(json.dumps({"root": str(store.root), "entries": rows}, indent=1))
        return
    for entry in entries:
        when = datetime.datetime.fromtimestamp(entry.modified_seconds).strftime("%Y-%m-%d %H:%M")
        problem = f"  unusable: {entry.problem}" if entry.problem else ""
        click.echo(f"{entry.kind:5}  {entry.key}  {when}  {entry.size_bytes / 1024:9.1f} KiB{problem}")
    total_bytes = sum(entry.size_bytes for entry in entries)
    click.echo(f"{len(entries)} entries, {total_bytes / 1024:.1f} KiB in {store.root}", err=True)


@cache.command("clear")
def cache_clear() -> None:
    """Remove all that is kept."""
    store = Store(default_root())
    try:
        count = store.clear()
    except OSError as error:
        raise UsageError(f"{store.root} cannot be cleared: {error}", "see who owns it: ls -la") from error
    click.echo(f"removed {count} entries from {store.root}", err=True)


@group.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say what of this machine monetrun can use, and what is missing."""
    # here, since it takes seconds, which --help need not
    from monetrun.commands.doctor import Check, examine, exit_code

    checks: list[Check] = []
    for check in examine():
        checks.append(check)
        if not as_json:
            mend = f"\n{'':22}{check.mend}" if check.mend else ""
            click.echo(f"{check.state:8}  {check.name:11} {check.found}{mend}")
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    context.exit(exit_code(checks))


# what follows takes a launch's words, which torchrun's parser reads: the script's own options are the script's
_LAUNCH_WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}


@group.command(context_settings=_LAUNCH_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def plan(words: tuple[str, ...]) -> None:
    """Plan a launch without training, and write the plan."""
    args = _tried("plan", "Plan a launch without training, and write the plan; --json prints it.", _plan_options, words)
    with _job(args) as job:
        job.dry_run(args.out)


def _plan_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--out", default="plan.json", metavar="FILE", help="where it is written (default: plan.json)")


@group.command(context_settings=_LAUNCH_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def frontier(words: tuple[str, ...]) -> None:
    """Show what each budget costs, from the plain peak to the smallest feasible."""
    from monetrun.commands import frontier as table
    from monetrun.planning.frontier import next_budget

    description = (
        "Show what each budget costs, from the plain peak to the smallest feasible one; nothing is trained. "
        f"--solver-seconds is for all points together (default: {table.DEFAULT_SECONDS:g})."
    )
    args = _tried("frontier", description, table.add_options, words)
    table.check_options(args)
    wanted = table.parse_budgets(args.budgets) if args.budgets else ()
    with _job(args) as job:
        title = " ".join([Path(args.training_script).name, *args.training_script_args])
        found = job.frontier(wanted, args.points)
        if args.plot:
            table.draw(found, title, args.plot)
        if args.json:
            _write_json(found, args.json)
        if args.json != "-":
            table.show(found, title, report.screen())
        if not args.quiet:
            click.echo(f"  next: {_command_line(args, next_budget(found))}", err=True)


@group.command(context_settings=_LAUNCH_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def batch(words: tuple[str, ...]) -> None:
    """Find the largest batch that trains within a budget."""
    from monetrun.commands import batch as finder
    from monetrun.planning.batch import find

    description = "Find the largest batch that trains within a budget; {batch} stands for it in the script's arguments."
    args = _tried("batch", description, finder.add_options, words)
    with _job(args) as job:
        limits = finder.read_limits(args, job.budget_bytes(), job.options())
    if job.budget.kind != "bytes":  # what is free now holds for all that follows
        args.budget = format_budget(limits.budget_bytes)

    def say(line: str) -> None:
        if not args.quiet:
            click.echo(f"monetrun: {line}", err=True)

    with ExitStack() as open_jobs:
        found = find(limits, _Tries(args, open_jobs), say)
    if args.json:
        click.echo(codec.dumps(found))
    else:
        finder.show(found, report.screen())
    if not args.quiet:
        click.echo(f"  next: {_command_line(finder.with_batch(args, found.batch), args.budget)}", err=True)


class _Tries:
    """The script at any batch: one job for each."""

    def __init__(self, args: argparse.Namespace, open_jobs: ExitStack) -> None:
        self.args = args
        self.open_jobs = open_jobs
        self.jobs: dict[int, Job] = {}

    def trial(self, batch: int) -> StepRecord:
        return self._job(batch).trial()

    def plan(self, batch: int) -> Plan:
        return self._job(batch).planned()

    def _job(self, batch: int) -> Job:
        from monetrun.commands.batch import with_batch

        if batch not in self.jobs:
            self.jobs[batch] = self.open_jobs.enter_context(_job(with_batch(self.args, batch)))
        return self.jobs[batch]


@group.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.argument("plan_file")
def explain(plan_file: str, as_json: bool) -> None:
    """Say what a plan does: what runs again, what that saves, what the peak holds."""
    from monetrun.commands import explain as screen
    from monetrun.planning import explain as explainer

    plan = read_plan(plan_file)
    store = Store(default_root())
    kept = (store.get("probe", e.key, StepRecord) for e in store.entries() if e.kind == "probe" and not e.problem)
    record = explainer.find_record(plan, (r for r in kept if r is not None), plan_file)
    found = explainer.explain(plan, record)
    if as_json:
        click.echo(codec.dumps(found))
    else:
        screen.show(found, plan_file, report.screen())


def _tried(
    command: str, description: str, options: Callable[[argparse._ActionsContainer], None], words: Sequence[str]
) -> argparse.Namespace:
    """The options of a command that needs a trial run of the script, which is there.

    Raises:
        UsageError: an option cannot be used.
        ScriptNotFound: there is no such script.
    """
    parser = launch.command_parser(command, description, options)
    args = parser.parse_args(list(words))
    # the time for a whole table is not that for one plan
    args.launch_words = launch.launch_words(parser, words, args, ["solver_seconds"] if command == "frontier" else [])
    if args.no_probe or args.plan:
        raise UsageError(f"monetrun {command} needs its trial run", "leave out --no-probe and --plan")
    check_script(args)
    return args


@contextmanager
def _job(args: argparse.Namespace) -> Iterator[Job]:
    """A job whose folder is removed afterwards."""
    with _terminable(), launch.restored_environment():
        job = Job(args)
        try:
            yield job
        finally:
            job.close()


def _command_line(args: argparse.Namespace, budget: str) -> str:
    """A launch of what a command was given, to be typed next."""
    script = [args.training_script, *args.training_script_args]
    return shlex.join(["monetrun", "--budget", budget, *args.launch_words, *script])


def _write_json(value: object, path: str) -> None:
    if path == "-":
        click.echo(codec.dumps(value))
        return
    try:
        Path(path).write_text(codec.dumps(value) + "\n")
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}", "name a file in a folder that can be written") from error
