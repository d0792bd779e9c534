"""Keys of what trial runs have found: by what they have read beside the script, as that is now.

A model is rarely in the script alone. What a trial has read is kept under the launch's own key; what it has found,
under a key of that and of the present content of these files, and the present versions of these packages.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from monetrun.core import codec
from monetrun.core.sources import SUFFIX, Sources, content
from monetrun.machine.store import Store, key


def key_now(store: Store | None, base: str) -> str:
    """The key of what a trial run has found, of a launch with the key ``base``; that itself where no trial is known."""
    known = None if store is None else store.get("sources", base, Sources)
    if known is None:
        return base
    present = {file: content(file) for file in known.files}, {name: _version(name) for name in known.packages}
    return _key(base, Sources(*present))


def of_trial(record_file: str) -> Sources | None:
    """What the trial run with this record has read; None where it has left no record."""
    file = Path(record_file + SUFFIX)
    return codec.loads(Sources, file.read_text()) if file.exists() else None


def keep(store: Store | None, base: str, read: Sources | None) -> str:
    """Keep what a trial run has read; gives the key of what it has found."""
    if store is None or read is None:
        return base
    store.put("sources", base, read)
    return _key(base, read)


def _key(base: str, read: Sources) -> str:
    return key(base, dict(read.files), dict(read.packages))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
