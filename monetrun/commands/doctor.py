"""``monetrun doctor``: which parts of this machine monetrun can use, and what is missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import click

from monetrun.commands import SUMMARIES
from monetrun.commands.click_command import run_click
from monetrun.commands.doctor_checks import MISSING, Check, run_checks

_HINT_INDENT = 22


def run(words: Sequence[str]) -> int:
    """Run the checks; 1 if something that every launch needs is missing."""
    return run_click(command, words)


@click.command("doctor", help=SUMMARIES["doctor"])
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(as_json: bool) -> int:
    """Run the checks and print each as it ends; returns the exit code."""
    checks: list[Check] = []
    for check in run_checks():
        checks.append(check)
        if not as_json:
            hint = f"\n{'':{_HINT_INDENT}}{check.mend}" if check.mend else ""
            print(f"{check.state:8}  {check.name:11} {check.found}{hint}", flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    return int(any(check.state == MISSING for check in checks))
