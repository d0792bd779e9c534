"""Entries of the cache in one file, to take them to another machine.

A compressed tar file of ``<kind>/<key>.json``, each as it lies in the store. All of it is checked before anything is
imported, so that a damaged or foreign file changes nothing.

It is compressed by gzip, or by xz if its name ends in ``.xz``: schedules of one network are alike, and an eighth as
large by xz.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from monetrun.core.errors import UsageError
from monetrun.machine.entry_file import MOST_BYTES, check, content_of, write
from monetrun.machine.named_file import writing_option
from monetrun.machine.store import KINDS, Store

_MOST_ENTRIES = 100_000
_UNREADABLE = (OSError, EOFError, tarfile.TarError, ValueError, zlib.error, lzma.LZMAError)


def export(store: Store, file: Path | str, kinds: Sequence[str] = KINDS) -> int:
    """Write the entries of these kinds, without unusable ones; gives how many. The file is replaced whole.

    Raises:
        UsageError: the file cannot be written.
    """
    count = 0
    with writing_option("cache export", file) as raw, _written(raw, Path(file)) as archive:
        for entry in store.entries():
            content = None if entry.problem or entry.kind not in kinds else usable(store, entry.kind, entry.key)
            if content is not None:
                member = tarfile.TarInfo(f"{entry.kind}/{entry.key}.json")
                member.size, member.mtime = len(content), int(entry.modified_seconds)
                archive.addfile(member, io.BytesIO(content))
                count += 1
    return count


def import_(store: Store, file: Path, *, replace: bool = False) -> tuple[int, int]:
    """Add the entries of a file that ``export`` wrote.

    Args:
        store: where they go.
        file: the archive.
        replace: entries that are there already are replaced, too.

    Returns:
        How many were added, and how many were there already.

    Raises:
        UsageError: the file cannot be read, or something in it is not an entry of this version's cache; nothing was
            added then. Or the store cannot be written.
    """
    found = _read(file)
    for (kind, key), content in found.items():
        try:
            store.path(kind, key)
            check(kind, key, content)
        except ValueError as problem:
            hint = "export it again with this version of monetrun"
            raise UsageError(f"{file}: {kind}/{key}.json: {problem}", hint) from problem
    added = 0
    try:
        with store.locked():
            for (kind, key), content in found.items():
                if replace or usable(store, kind, key) is None:
                    write(store.path(kind, key), content)
                    added += 1
    except OSError as error:
        problem_here = f"{store.root} cannot be written: {error.strerror}"
        raise UsageError(problem_here, f"{added} of {len(found)} entries were added") from error
    return added, len(found) - added


def usable(store: Store, kind: str, key: str) -> bytes | None:
    """An entry's file as it is; None if it is not there or unusable."""
    try:
        content = content_of(store.path(kind, key))
        check(kind, key, content)
    except (OSError, ValueError):
        return None
    return content


def _written(raw: IO[bytes], file: Path) -> tarfile.TarFile:
    """The archive to write into ``raw``, compressed as the name of ``file`` says."""
    return tarfile.open(fileobj=raw, mode="w:xz" if file.suffix == ".xz" else "w:gz")


def _read(file: Path) -> dict[tuple[str, str], bytes]:
    found: dict[tuple[str, str], bytes] = {}
    total_bytes = 0
    try:
        with tarfile.open(file, "r:*") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                total_bytes += member.size
                if len(found) >= _MOST_ENTRIES or total_bytes > 16 * MOST_BYTES:
                    raise UsageError(f"{file} has more than a cache would", "is it what monetrun cache export wrote?")
                content = archive.extractfile(member) if member.isreg() else None
                if content is None or len(path.parts) != 2 or path.suffix != ".json" or member.size > MOST_BYTES:
                    raise UsageError(
                        f"{file}: {member.name} is no entry of a cache", "monetrun cache export writes one"
                    )
                found[path.parts[0], path.name.removesuffix(".json")] = content.read()
    except _UNREADABLE as error:
        raise UsageError(f"{file} cannot be read: {error}", "monetrun cache export writes such a file") from error
    return found
