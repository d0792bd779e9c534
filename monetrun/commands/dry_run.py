"""What ``plan``, ``frontier`` and ``batch`` share: they take a launch's options and a trial run, and train nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from monetrun.core.errors import UsageError
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.parser import LaunchParser
from monetrun.launcher.script import check_script


def parse_dry_run(command: str, parser: LaunchParser, words: Sequence[str]) -> tuple[LaunchOptions, argparse.Namespace]:
    """Parse the options of a command that needs a trial run, and check that its script exists.

    Returns:
        The launch's options, and the namespace with the command's own.

    Raises:
        UsageError: an option cannot be used.
        ScriptNotFound: there is no such script.
    """
    options, args = parser.parse_launch(words)
    if options.plan_file or not options.probe:
        raise UsageError(f"monetrun {command} needs its trial run", "leave out --no-probe and --plan")
    if options.report_folder:
        raise UsageError(f"monetrun {command} trains nothing to report", "monetrun explain --html FILE shows a plan")
    check_script(options)
    return options, args
