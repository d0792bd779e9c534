"""Runs the commands that take no launch: ``cache``, ``doctor``, ``explain``. click parses their words."""

from __future__ import annotations

from collections.abc import Sequence

import click


def run_click(command: click.Command, words: Sequence[str]) -> int:
    """Run ``monetrun NAME`` with the words that follow the name.

    Returns:
        The command's result, which is its exit code; 0 if it is None.

    Raises:
        click.UsageError: the words do not follow the command's grammar.
    """
    # Not command.main(): it ends the process with another exit code than main.py when the reader of stdout has gone.
    name = f"monetrun {command.name}"
    try:
        with command.make_context(name, list(words), help_option_names=["-h", "--help"]) as context:
            return int(command.invoke(context) or 0)
    except click.exceptions.Exit as end:  # after --help
        return end.exit_code
