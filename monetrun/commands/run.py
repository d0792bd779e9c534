"""``monetrun train.py``: plan, launch and report."""

from __future__ import annotations

from collections.abc import Sequence

from monetrun.commands import SUMMARIES
from monetrun.core.errors import BudgetExceeded
from monetrun.launcher import report
from monetrun.launcher.agent import launch, launch_again
from monetrun.launcher.job import open_job
from monetrun.launcher.nodes import Nodes
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.page import check_folder, check_log_folder, check_tensorboard
from monetrun.launcher.parser import LaunchParser, launch_parser
from monetrun.launcher.plain import has_run_short
from monetrun.launcher.process import restored_environment
from monetrun.launcher.restart import Restarts
from monetrun.launcher.script import check_script
from monetrun.runtime.settings import PLAIN


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
    check_script(options, SUMMARIES)
    if options.report_folder:
        check_folder(options.report_folder)
    if options.tensorboard_folder:
        check_tensorboard(options.tensorboard_folder)
    check_log_folder(options)
    with open_job(options) as job:
        if options.several_nodes:  # other nodes' workers would not know of another launch with a tighter plan
            nodes = Nodes(job)
            exit_code = launch(options, {}, nodes.joined)
            nodes.keep(exit_code)
        else:
            with restored_environment():  # workers get only the variables that prepare() returns
                environment = job.prepare()
            restarts = Restarts(job, environment)
            exit_code = launch(options, environment, restarts.joined)
            while (changed := restarts.next_environment(exit_code)) is not None:
                exit_code = launch_again(options, changed, restarts.joined)
            restarts.keep(exit_code)
        outcome = job.finish(exit_code)
        if exit_code == BudgetExceeded.exit_code and job.mode == PLAIN and job.plain is not None:
            if outcome.evaluating:
                report.warn("memory ran out in an evaluation, which no budget bounds: a plan would not change that")
            else:
                report.warn(has_run_short(job.plain, job.plain_cap_bytes, job.plain_key, job.store))
    return exit_code
