"""What ``plan``, ``frontier``, ``batch`` and ``check`` share: they take a launch's options, and train nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from monetrun.core.errors import UsageError
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.parser import LaunchParser
from monetrun.launcher.script import check_script


def parse_dry_run(
    command: str, parser: LaunchParser, words: Sequence[str], *, plan_file: bool = False
) -> tuple[LaunchOptions, argparse.Namespace]:
    """Parse the options of a command that needs a trial run, and check that its script exists.

    Args:
        command: its name, for messages.
        parser: of its words.
        words: what follows its name.
        plan_file: whether ``--plan`` may name a plan.

    Returns:
        The launch's options, and the namespace with the command's own.

    Raises:
        UsageError: an option cannot be used.
        ScriptNotFound: there is no such script.
    """
    options, args = parser.parse_launch(words)
    if not options.probe or (options.plan_file and not plan_file):
        refused = "--no-probe" if plan_file else "--no-probe and --plan"
        raise UsageError(f"monetrun {command} needs its trial run", f"leave out {refused}")
    if options.report_folder or options.tensorboard_folder:
        raise UsageError(f"monetrun {command} trains nothing to report", "monetrun explain --html FILE shows a plan")
    check_script(options)
    return options, args
