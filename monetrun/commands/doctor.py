"""``monetrun doctor``: what of this machine monetrun can use, and what is missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from monetrun.commands.doctor_checks import MISSING, Check, run_checks
from monetrun.commands.plain_parser import PlainParser, plain_parser

_HINT_INDENT = 22


def prepare_parser() -> PlainParser:
    """``--json``."""
    parser = plain_parser("doctor")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    return parser


def run(words: Sequence[str]) -> int:
    """Run the checks and print each as it ends; 1 if something is missing without which nothing runs."""
    args = prepare_parser().parse_args(words)
    checks: list[Check] = []
    for check in run_checks():
        checks.append(check)
        if not args.json:
            hint = f"\n{'':{_HINT_INDENT}}{check.mend}" if check.mend else ""
            print(f"{check.state:8}  {check.name:11} {check.found}{hint}", flush=True)
    if args.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    return int(any(check.state == MISSING for check in checks))
