"""``monetrun cache``: list or clear what is kept between runs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence

from monetrun.commands.plain_parser import PlainParser, plain_parser
from monetrun.core.errors import UsageError
from monetrun.machine.store import Store, default_root


def prepare_parser() -> PlainParser:
    """``list`` and ``clear``."""
    parser = plain_parser("cache")
    actions = parser.add_subparsers(dest="action", metavar="list|clear", required=True)
    for name, summary in (("list", "List what is kept, the newest first."), ("clear", "Remove all that is kept.")):
        action = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == "list":
            action.add_argument("--json", action="store_true", help="print as JSON")
    return parser


def run(words: Sequence[str]) -> int:
    """List or clear the cache."""
    args = prepare_parser().parse_args(words)
    store = Store(default_root())
    if args.action == "clear":
        clear(store)
    else:
        show(store, as_json=args.json)
    return 0


def show(store: Store, *, as_json: bool) -> None:
    """Print the entries, and their total to stderr."""
    entries = store.entries()
    if as_json:
        rows = [{**{f.name: getattr(e, f.name) for f in dataclasses.fields(e)}, "path": str(e.path)} for e in entries]
        print(json.dumps({"root": str(store.root), "entries": rows}, indent=1))
        return
    for entry in entries:
        when = datetime.datetime.fromtimestamp(entry.modified_seconds).strftime("%Y-%m-%d %H:%M")
        problem = f"  unusable: {entry.problem}" if entry.problem else ""
        print(f"{entry.kind:5}  {entry.key}  {when}  {entry.size_bytes / 1024:9.1f} KiB{problem}")
    total_bytes = sum(entry.size_bytes for entry in entries)
    print(f"{len(entries)} entries, {total_bytes / 1024:.1f} KiB in {store.root}", file=sys.stderr)


def clear(store: Store) -> None:
    """Remove all entries.

    Raises:
        UsageError: one cannot be removed.
    """
    try:
        count = store.clear()
    except OSError as error:
        raise UsageError(f"{store.root} cannot be cleared: {error}", "ls -la shows who owns it") from error
    print(f"removed {count} entries from {store.root}", file=sys.stderr)
