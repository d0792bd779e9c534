"""JSON for frozen dataclasses of tuples, ints, floats, strings and each other.

Reading is strict: a missing or unknown field, a value of another type or one that the dataclass's own ``check`` does
not accept raises ``ValueError`` with the path to it, so nothing is built from a truncated, foreign or edited file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """``value`` as dicts, lists and scalars that ``json`` can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    return value


# No number in a file is larger: the allocator's settings have 2**64 - 1 for "no limit".
_MOST = (1 << 64) - 1
_Reader = Callable[[Any], Any]


class _Mismatch(ValueError):
    """A value does not match its type, or contradicts another; ``places`` lead to it, the innermost first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.places: list[str] = []


def from_plain(kind: Any, value: Any, path: str = "$") -> Any:
    """Build ``kind`` (a dataclass, tuple, dict or scalar type) from what ``to_plain`` returned.

    A dataclass may have a method ``check()``, which raises ``ValueError`` where its values are out of range or
    contradict one another. It is called for each object that is built.

    Args:
        kind: the type.
        value: its plain form.
        path: to ``value`` in the whole, for messages.

    Raises:
        ValueError: the value does not match the type; the message has the path to what does not, if that is a part.
    """
    try:
        return _reader(kind)(value)
    except _Mismatch as mismatch:
        where = f"{path}{''.join(reversed(mismatch.places))}: " if mismatch.places else ""
        raise ValueError(f"{where}{mismatch}") from mismatch.__cause__


@functools.cache
def _reader(kind: Any) -> _Reader:
    """What builds ``kind``: made once for each type, since a file has thousands of objects of few types."""
    if kind is Any:
        return lambda value: value
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (other,) = (o for o in args if o is not type(None))
        present = _reader(other)
        return lambda value: None if value is None else present(value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_reader(kind)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return _list_reader(args[0])
        return _row_reader(tuple(_reader(a) for a in args))
    if origin is dict:
        return _dict_reader(_reader(args[1]))
    return functools.partial(_scalar, kind)


def _dataclass_reader(kind: type) -> _Reader:
    fields, hints = dataclasses.fields(kind), typing.get_type_hints(kind)
    readers = {f.name: _reader(hints[f.name]) for f in fields}
    required = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    check = getattr(kind, "check", None)

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Mismatch(f"expected an object for {kind.__name__}, got {type(value).__name__}")
        if unknown := value.keys() - readers.keys():
            raise _Mismatch(f"{kind.__name__} has no field {min(unknown)!r}")
        if missing := required - value.keys():
            raise _Mismatch(f"{kind.__name__} lacks field {min(missing)!r}")
        name = ""
        given = {}
        try:
            for name, item in value.items():
                given[name] = readers[name](item)
        except _Mismatch as mismatch:
            mismatch.places.append(f".{name}")
            raise
        made = kind(**given)
        if check is not None:
            try:
                check(made)
            except ValueError as error:
                raise _Mismatch(str(error)) from error
        return made

    return read


def _list_reader(item: Any) -> _Reader:
    read_item = _reader(item)

    def read(value: Any) -> tuple[Any, ...]:
        items = _list(value)
        if item is int and all(type(v) is int for v in items) and (not items or _in_range(min(items), max(items))):
            return tuple(items)  # long lists of ids, without a call for each
        return _read_items(repeat(read_item), items)

    return read


def _row_reader(readers: tuple[_Reader, ...]) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        items = _list(value)
        if len(items) != len(readers):
            raise _Mismatch(f"expected {len(readers)} items, got {len(items)}")
        return _read_items(readers, items)

    return read


def _read_items(readers: Iterable[_Reader], items: Sequence[Any]) -> tuple[Any, ...]:
    """Read each item by its reader; a mismatch tells which item has it."""
    found: list[Any] = []
    try:
        for read_item, v in zip(readers, items, strict=False):
            found.append(read_item(v))
    except _Mismatch as mismatch:
        mismatch.places.append(f"[{len(found)}]")
        raise
    return tuple(found)


def _dict_reader(read_item: _Reader) -> _Reader:
    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _Mismatch(f"expected an object, got {type(value).__name__}")
        name = ""
        found = {}
        try:
            for name, v in value.items():
                found[_scalar(str, name)] = read_item(v)
        except _Mismatch as mismatch:
            mismatch.places.append(f".{name!a}")
            raise
        return found

    return read


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Mismatch(f"expected a list, got {type(value).__name__}")
    return value


def _in_range(*values: int) -> bool:
    return all(-_MOST <= v <= _MOST for v in values)


def _scalar(kind: Any, value: Any) -> Any:
    if kind is float and type(value) is int and _in_range(value):
        return float(value)
    if type(value) is not kind:
        raise _Mismatch(f"expected {kind.__name__}, got {_short(value)}")
    if kind is int and not _in_range(value):
        raise _Mismatch(f"{_short(value)} is out of range")
    if kind is float and not math.isfinite(value):
        raise _Mismatch(f"{value!r} is not a finite number")
    if kind is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _Mismatch(f"{_short(value)} is not text: {error.reason}") from error
    return value


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def dumps(value: Any) -> str:
    """One canonical line of JSON: sorted keys, no spaces, no NaN."""
    return json.dumps(value, default=_fields, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _fields(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def loads(kind: type[T], text: str) -> T:
    """Parse what ``dumps`` wrote.

    Raises:
        ValueError: not JSON, or not of this type.
    """
    return typing.cast(T, from_plain(kind, parse_json(text)))


def parse_json(text: str) -> Any:
    """What ``json.loads`` gives.

    Raises:
        ValueError: not JSON; it has NaN or an infinity, or is nested more deeply than it can be parsed.
    """
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")
