"""The cache: plans, probes, measured costs and measured steps, as checksummed JSON files.

    <root>/<kind>/<key>.json      two lines: a header (schema, kind, key, type, size, SHA-256), then the value
    <root>/.lock                  one advisory lock for all writers

A file is written under a temporary name, synced and renamed, so a reader sees the old or the new one, never half of
one. On reading, the header is computed again from the value and compared, so any changed byte is a miss, and the value
is checked (see ``codec.from_plain``). An unusable file or folder is a miss (or a value that is not kept) and one
warning: a cache must not stop a run. Only regular files are read: another process may never write into a FIFO.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from monetrun.core import codec
from monetrun.core.errors import MonetrunError, UsageError
from monetrun.core.user_folders import NO_LOCKS_HERE, user_cache
from monetrun.machine.entry_file import checked, content_of, fields_of, header, script_of, write

T = TypeVar("T")

KINDS = ("plan", "probe", "sources", "plain", "costs", "cudnn", "driver", "measured", "frontier")
LOCK_SECONDS = 10.0

_MAPPING = "mapping"
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_log = logging.getLogger("monetrun")


def default_root(environ: Mapping[str, str] | None = None) -> Path:
    """``$MONETRUN_CACHE``, else ``$XDG_CACHE_HOME/monetrun``, else ``~/.cache/monetrun``.

    Raises:
        UsageError: none of them is set and there is no home folder.
    """
    environ = os.environ if environ is None else environ
    if own := environ.get("MONETRUN_CACHE"):
        return Path(os.path.abspath(os.path.expanduser(own)))
    try:
        return user_cache(environ)
    except RuntimeError as failure:
        raise UsageError(f"there is no folder for the cache: {failure}", "Set MONETRUN_CACHE to a folder.") from failure


def key(*parts: Any) -> str:
    """A hash of ``parts`` (scalars, tuples, mappings and codec dataclasses): 32 hexadecimal digits.

    The same parts give the same key in every process and on every machine; ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    return hashlib.sha256(codec.dumps(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the store, as ``monetrun cache list`` shows it.

    Attributes:
        kind: one of ``KINDS``.
        key: its name.
        type: the dataclass that was stored, or ``"mapping"``; empty if the file is not readable.
        path: the file.
        size_bytes: its size.
        modified_seconds: when it was written, seconds since the epoch.
        problem: why reading it would be a miss, or empty.
        script: that was launched when it was written, or empty.
    """

    kind: str
    key: str
    type: str
    path: Path
    size_bytes: int
    modified_seconds: float
    problem: str
    script: str


class Store:
    """A folder of checksummed JSON files, which several processes may use at once.

    Args:
        root: the folder; made at the first ``put``.
        lock_seconds: how long a writer waits for the lock before it goes on without writing.
        script: what is put here is of its launch.
    """

    def __init__(self, root: Path, *, lock_seconds: float = LOCK_SECONDS, script: str = "") -> None:
        self.root = root
        self._script = script if script.isprintable() else ""
        self.lock_seconds = lock_seconds
        self._warned: set[str] = set()

    def path(self, kind: str, key: str) -> Path:
        """The file of an entry.

        Raises:
            ValueError: the kind is unknown, or the key is not a plain file name.
        """
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}, it must be one of {', '.join(KINDS)}")
        if not _KEY.fullmatch(key):
            raise ValueError(f"key {key!r} is not 1 to 128 of letters, digits, '_', '.', '-'")
        return self.root / kind / f"{key}.json"

    def get(self, kind: str, key: str, type: type[T], check: Callable[[T], object] | None = None) -> T | None:
        """The value that ``put`` stored; None if there is none or it is unusable (one warning says why).

        Args:
            kind: as in ``put``.
            key: as in ``put``.
            type: of the value.
            check: raises a ``MonetrunError`` where the value is not what the caller can use.
        """
        path = self.path(kind, key)
        try:
            text = self._read(path, kind, key, type.__name__)
            if text is None:
                return None
            value = codec.loads(type, text)
            if check is not None:
                check(value)
            return value
        except MonetrunError as failure:
            self._warn(f"{path} is not used: {failure.message}")
        except (OSError, ValueError) as failure:
            self._warn(f"{path} is not used: {failure}")
        return None

    def put(self, kind: str, key: str, value: Any) -> Path | None:
        """Store a codec dataclass; it replaces the entry of that key.

        Returns:
            The file; None if it could not be written (one warning says why).

        Raises:
            ValueError: the value has no JSON form (NaN, an infinity). Nothing is written then.
        """
        path, text = self.path(kind, key), codec.dumps(value)
        try:
            with self.locked():
                self._write(path, kind, key, type(value).__name__, text, self._script)
        except OSError as failure:
            self._warn(f"{self.root} cannot be written, going on without it: {failure.strerror}")
            return None
        return path

    def get_mapping(self, kind: str, key: str, item: type[T]) -> dict[str, T]:
        """The mapping that ``update`` has stored under this key; ``item`` is the type of a value."""
        path = self.path(kind, key)
        try:
            text = self._read(path, kind, key, _MAPPING)
            kind_of_all = types.GenericAlias(dict, (str, item))
            return {} if text is None else codec.from_plain(kind_of_all, codec.parse_json(text))
        except (OSError, ValueError) as failure:
            self._warn(f"{path} is not used: {failure}")
            return {}

    def update(
        self, kind: str, key: str, mapping: Mapping[str, T], item: type[T], *, replace: bool = False
    ) -> dict[str, T]:
        """Add entries to a mapping that several processes fill at once.

        Args:
            kind: as in ``put``.
            key: as in ``put``.
            mapping: the new entries.
            item: the type of a value.
            replace: the new entries replace those that are there. By default they do not, so that all ranks that
                measured the same operator end with one number.

        Returns:
            The merged mapping, even if it could not be written (then a warning says so).

        Raises:
            ValueError: a value has no JSON form. Nothing is written then.
        """
        path, new = self.path(kind, key), dict(mapping)
        codec.dumps(new)
        merged = new
        try:
            with self.locked():
                old = self.get_mapping(kind, key, item)
                merged = {**old, **new} if replace else {**new, **old}
                if merged != old:
                    self._write(path, kind, key, _MAPPING, codec.dumps(merged))
        except OSError as failure:
            self._warn(f"{self.root} cannot be written, going on without it: {failure.strerror}")
        return merged

    def entries(self) -> tuple[Entry, ...]:
        """Every entry, unusable ones included, by kind and newest first; none of a folder that may not be entered."""
        found = []
        for kind in KINDS:
            with contextlib.suppress(PermissionError):
                for path in (self.root / kind).glob("*.json"):
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile
                        found.append(_entry(kind, path))
        return tuple(sorted(found, key=lambda entry: (KINDS.index(entry.kind), -entry.modified_seconds, entry.key)))

    def remove(self, kind: str, key: str) -> bool:
        """Remove one entry; False if there was none.

        Raises:
            OSError: it is there and cannot be removed.
        """
        try:
            self.path(kind, key).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def clear(self, *kinds: str) -> int:
        """Remove every entry (of these kinds), and temporary files that killed writers left; returns how many entries.

        Only files that match the store's own names are removed, so other files in its root are safe.

        Raises:
            OSError: an entry cannot be removed.
        """
        count = 0
        for one in kinds or KINDS:
            for path in [*(self.root / one).glob("*.json"), *(self.root / one).glob(".*.json.tmp")]:
                path.unlink(missing_ok=True)
                count += path.suffix == ".json"
        return count

    def _read(self, path: Path, kind: str, key: str, type_name: str) -> str | None:
        try:
            content = content_of(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return checked(content, kind, key, type_name).decode()

    def _write(self, path: Path, kind: str, key: str, type_name: str, text: str, script: str = "") -> None:
        body = text.encode()
        write(path, header(kind, key, type_name, body, script) + body + b"\n")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock; ``OSError`` if the folder cannot be written or the lock is not free in time."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            deadline = time.monotonic() + self.lock_seconds
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise TimeoutError(
                            errno.ETIMEDOUT, f"another process holds the lock for over {self.lock_seconds:g} s"
                        ) from None
                    time.sleep(0.01)
                except OSError as failure:
                    if failure.errno not in NO_LOCKS_HERE:
                        raise
                    # Files are still replaced whole: costs that two ranks add at once may be lost, but not corrupted.
                    self._warn(f"{self.root} is on a file system without locks: {failure}")
                    break
            yield
        finally:
            os.close(descriptor)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _log.warning("%s", message)


def _entry(kind: str, path: Path) -> Entry:
    status, name, problem = path.lstat(), path.name.removesuffix(".json"), ""
    type_name = script = ""
    try:
        content = content_of(path)
        fields = fields_of(content.partition(b"\n")[0])
        type_name, script = str((fields or {}).get("type", "")), script_of(fields)
        checked(content, kind, name, type_name)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as failure:
        problem = str(failure)
    return Entry(kind, name, type_name, path, status.st_size, status.st_mtime, problem, script)
