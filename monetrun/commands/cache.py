"""``monetrun cache``: what is kept between runs: listed, checked, removed, taken to another machine."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from monetrun.commands import SUMMARIES
from monetrun.commands.click_command import run_click
from monetrun.core.budget import format_bytes
from monetrun.core.errors import UsageError
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.machine import archive
from monetrun.machine.named_file import STDOUT
from monetrun.machine.store import KINDS, Entry, Store, default_root
from monetrun.planning.summary import plain_bytes, planned_bytes


def _store() -> Store:
    root = default_root()
    try:
        os.listdir(root)
    except FileNotFoundError:  # the first launch makes it
        pass
    except NotADirectoryError as error:
        raise UsageError(f"the cache {root} is not a folder", "set MONETRUN_CACHE to a folder") from error
    except OSError as error:
        hint = "set MONETRUN_CACHE to a folder of yours"
        raise UsageError(f"the cache {root} cannot be read: {error.strerror}", hint) from error
    return Store(root)


@click.command("list", help="List what is kept, by kind, the newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def _list(as_json: bool) -> None:
    show(_store(), as_json=as_json)


@click.command("clear", help="Remove everything that is kept.")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Only this kind; may be repeated.")
def _clear(kinds: Sequence[str]) -> None:
    clear(_store(), kinds)


@click.command("verify", help="Check every entry; exit code 1 if one is unusable.")
def _verify() -> int:
    return 0 if verify(_store()) else 1


@click.command("export", help="Write what is kept to FILE (- is stdout), for monetrun cache import on another machine.")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Only this kind; may be repeated.")
@click.argument("file")
def _export(file: str, kinds: Sequence[str]) -> None:
    count = archive.export(_store(), file, kinds or KINDS)
    print(f"monetrun: wrote {count} entries to {'stdout' if file == STDOUT else file}", file=sys.stderr)


@click.command("import", help="Add the entries of a FILE that monetrun cache export wrote.")
@click.option("--replace", is_flag=True, help="Also replace entries that are here already.")
@click.argument("file", type=click.Path(path_type=Path))
def _import(file: Path, replace: bool) -> None:
    store = _store()
    added, present = archive.import_(store, file, replace=replace)
    were = f"; {present} were there already" if present else ""
    print(f"monetrun: added {added} entries to {store.root}{were}", file=sys.stderr)


command = click.Group(
    "cache", commands=[_list, _clear, _verify, _export, _import], help=SUMMARIES["cache"], no_args_is_help=False
)


def run(words: Sequence[str]) -> int:
    """Run a command on the cache."""
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
        what = f"unusable: {entry.problem}" if entry.problem else _contents(store, entry)
        what = f"{entry.script}: {what}" if entry.script and what else what or entry.script
        print(f"{entry.kind:8}  {entry.key}  {when}  {entry.size_bytes / 1024:9.1f} KiB  {what}".rstrip())
    total_bytes = sum(entry.size_bytes for entry in entries)
    print(f"monetrun: {len(entries)} entries, {total_bytes / 1024:.1f} KiB in {store.root}", file=sys.stderr)


def _contents(store: Store, entry: Entry) -> str:
    """What a plan or a trial run is of; empty for other entries."""
    if entry.type == Plan.__name__ and (plan := store.get(entry.kind, entry.key, Plan)) is not None:
        planned, plain = format_bytes(planned_bytes(plan)), format_bytes(plain_bytes(plan))
        return f"{planned} of {plain}, overhead {plan.overhead:+.1%}, on {plan.device}"
    if entry.type == StepRecord.__name__ and (record := store.get(entry.kind, entry.key, StepRecord)) is not None:
        models = dict.fromkeys(graph.name for graph in record.graphs)
        return f"{', '.join(models)} on {record.device}"
    return ""


def verify(store: Store) -> bool:
    """Print the unusable entries, and how many are usable to stderr; whether all are."""
    entries = store.entries()
    unusable = [entry for entry in entries if entry.problem or archive.usable(store, entry.kind, entry.key) is None]
    for entry in unusable:
        print(f"{entry.path}: {entry.problem or 'not JSON'}")
    print(
        f"monetrun: {len(entries) - len(unusable)} of {len(entries)} entries are usable in {store.root}",
        file=sys.stderr,
    )
    return not unusable


def clear(store: Store, kinds: Sequence[str] = ()) -> None:
    """Remove all entries, or those of these kinds.

    Raises:
        UsageError: one cannot be removed.
    """
    try:
        count = store.clear(*kinds)
    except OSError as error:
        raise UsageError(f"{store.root} cannot be cleared: {error}", "ls -la shows who owns it") from error
    print(f"monetrun: removed {count} entries from {store.root}", file=sys.stderr)
