"""``monetrun cache``: list or clear what is kept between runs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence

import click

from monetrun.commands import SUMMARIES
from monetrun.commands.click_command import run_click
from monetrun.core.errors import UsageError
from monetrun.machine.store import Store, default_root


@click.command("list", help="List what is kept, by kind, the newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def _list(as_json: bool) -> None:
    show(Store(default_root()), as_json=as_json)


@click.command("clear", help="Remove everything that is kept.")
def _clear() -> None:
    clear(Store(default_root()))


command = click.Group("cache", commands=[_list, _clear], help=SUMMARIES["cache"], no_args_is_help=False)


def run(words: Sequence[str]) -> int:
    """List or clear the cache."""
    return run_click(command, words)


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
        print(f"{entry.kind:8}  {entry.key}  {when}  {entry.size_bytes / 1024:9.1f} KiB{problem}")
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
