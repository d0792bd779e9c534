"""Keys of what trial runs have found: by what they have imported beside the script, as that is now.

A model is rarely in the script alone. What a trial has imported is kept under the launch's own key; what it has found,
under a key of that and of the present content of these files, and the present versions of these packages.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path

from monetrun.core import codec
from monetrun.core.sources import SUFFIX, Sources
from monetrun.machine.store import Store, key

_LARGE = 1 << 20  # bytes; of larger files (libraries) only size and time are looked at


def key_now(store: Store | None, base: str) -> str:
    """The key of what a trial run has found, of a launch with the key ``base``; that itself where no trial is known."""
    known = None if store is None else store.get("probe", _key_of_sources(base), Sources)
    if known is None:
        return base
    return key(base, {file: content(file) for file in known.files}, {name: _version(name) for name in known.packages})


def keep(store: Store | None, base: str, record_file: str) -> str:
    """Keep what the trial run with this record has imported; gives ``key_now``."""
    file = Path(record_file + SUFFIX)
    if store is not None and file.exists():
        store.put("probe", _key_of_sources(base), codec.loads(Sources, file.read_text()))
    return key_now(store, base)


def content(file: str) -> str:
    """A hash of a file's content; empty where it cannot be read."""
    try:
        status = os.stat(file)
        if status.st_size > _LARGE:
            return f"{status.st_size} {status.st_mtime_ns}"
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _key_of_sources(base: str) -> str:
    return key("sources", base)
