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
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

import click

from monetrun import __version__, launch
from monetrun.errors import MonetrunError, UsageError
from monetrun.job import Job
from monetrun.script import check_script
from monetrun.store import Store, default_root


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
    from monetrun.doctor import Check, examine, exit_code

    checks: list[Check] = []
    for check in examine():
        checks.append(check)
        if not as_json:
            mend = f"\n{'':22}{check.mend}" if check.mend else ""
            click.echo(f"{check.state:8}  {check.name:11} {check.found}{mend}")
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    context.exit(exit_code(checks))


@group.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.option("--out", default="plan.json", show_default=True, help="Where the plan is written.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def plan(out: str, words: tuple[str, ...]) -> None:
    """Plan a launch without training, and write the plan: monetrun plan [options] script ..."""
    if not words or words[0] in ("-h", "--help"):
        click.echo("usage: monetrun plan [--out FILE] [options] [torchrun's options] script.py [its arguments]")
        click.echo("  --json prints the plan; monetrun --help lists the options")
        return
    args = launch.parser().parse_args(list(words))
    if args.no_probe or args.plan:
        raise UsageError("monetrun plan needs its trial run", "leave out --no-probe and --plan")
    check_script(args)
    with _terminable():
        job = Job(args)
        try:
            with launch.restored_environment():
                job.dry_run(out)
        finally:
            job.close()
