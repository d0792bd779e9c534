"""The format of the cache's files: two lines of JSON, a header (schema, kind, key, type, size, SHA-256) and a value."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monetrun.core import codec

SCHEMA = 2
MOST_BYTES = 256 << 20  # the record of a network of 1,823 operators has 1 MiB


def content_of(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else, or too large for a file of the store.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would make the call wait for a writer
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"{status.st_size} bytes, where a file of the cache has {MOST_BYTES} at most")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MOST_BYTES)
    finally:
        os.close(descriptor)


def header(kind: str, key: str, type_name: str, body: bytes, script: str = "") -> bytes:
    """The first line of a file with the value ``body``; ``script``: that it is of, for those who look."""
    fields = {
        "monetrun": SCHEMA,
        "kind": kind,
        "key": key,
        "type": type_name,
        "bytes": len(body),
        "sha256": hashlib.sha256(script.encode() + body).hexdigest(),
        **({"script": script} if script else {}),
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def checked(content: bytes, kind: str, key: str, type_name: str) -> bytes:
    """The value of a file, if the file is exactly what a store writes.

    Raises:
        ValueError: it is not; the message names the difference.
    """
    first, _, rest = content.partition(b"\n")
    body = rest[:-1]
    fields = fields_of(first)
    if content == header(kind, key, type_name, body, script_of(fields)) + body + b"\n":
        return body
    if fields is None:
        raise ValueError("not a file of monetrun's cache")
    if fields["monetrun"] != SCHEMA:
        raise ValueError(f"written with schema {fields['monetrun']!r}, this monetrun reads {SCHEMA}")
    if (fields.get("kind"), fields.get("key")) != (kind, key):
        raise ValueError(f"holds {fields.get('kind')!r} {fields.get('key')!r}, not {kind!r} {key!r}")
    if fields.get("type") != type_name:
        raise ValueError(f"holds a {fields.get('type')!r}, not a {type_name!r}")
    if fields.get("bytes") != len(body):
        raise ValueError(f"{len(body)} bytes where {fields.get('bytes')!r} were written")
    raise ValueError("the checksum does not match")


def script_of(fields: Mapping[str, Any] | None) -> str:
    """The script that a file is of, by its header; empty if that names none that can be shown."""
    named = (fields or {}).get("script", "")
    return named if isinstance(named, str) and named.isprintable() else ""


def check(kind: str, key: str, content: bytes) -> None:
    """Check the content of a file.

    Raises:
        ValueError: it is not what a store writes for this kind and key.
    """
    fields = fields_of(content.partition(b"\n")[0]) or {}
    codec.parse_json(checked(content, kind, key, str(fields.get("type", ""))).decode())


def fields_of(first: bytes) -> dict[str, Any] | None:
    """What a file's first line says; None if it is no header."""
    try:
        fields = json.loads(first)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and "monetrun" in fields else None


def write(path: Path, content: bytes) -> None:
    """Replace a file whole: under a temporary name it is written and synced, then it is renamed.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name[:-5]}.{os.getpid()}.{secrets.token_hex(4)}.json.tmp"
    try:
        # Not tempfile: its files are private to the user, and a cache may be shared by a group.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
