"""``monetrun train.py``: plan, launch and report."""

from __future__ import annotations

from collections.abc import Sequence

from monetrun.commands import SUMMARIES
from monetrun.launcher.agent import launch
from monetrun.launcher.job import open_job
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.parser import LaunchParser, launch_parser
from monetrun.launcher.process import restored_environment
from monetrun.launcher.script import check_script


def prepare_parser() -> LaunchParser:
    """Torchrun's options and monetrun's."""
    return launch_parser(SUMMARIES)


def run(words: Sequence[str]) -> int:
    """Launch a script; returns the exit code of the launch."""
    options, _ = prepare_parser().parse_launch(words)
    return run_launch(options)


def run_launch(options: LaunchOptions) -> int:
    """Check, plan, launch, report.

    Raises:
        ScriptNotFound, UsageError: nothing was started.
        MonetrunError: from planning, from the launch or from the report.
    """
    check_script(options)
    with open_job(options) as job:
        with restored_environment():  # workers get only the variables that prepare() returns
            environment = job.prepare()
        exit_code = launch(options, environment)
        job.finish(exit_code)
    return exit_code
