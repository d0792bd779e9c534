"""JSON for frozen dataclasses of tuples, ints, floats, strings and each other.

Reading is strict: a missing or unknown field, or a value of another type, raises ``ValueError`` with the path to it,
so a truncated or foreign file is rejected before anything is built from it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
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


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def from_plain(kind: Any, value: Any, path: str = "$") -> Any:
    """Build ``kind`` (a dataclass, tuple, dict or scalar type) from what ``to_plain`` returned.

    Args:
        kind: the type.
        value: its plain form.
        path: to ``value`` in the whole, for messages.

    Raises:
        ValueError: the value does not match the type; the message has the path.
    """
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(kind)
        if value is None and type(None) in options:
            return None
        (other,) = (o for o in options if o is not type(None))
        return from_plain(other, value, path)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{path}: expected an object for {kind.__name__}, got {type(value).__name__}")
        names = {f.name for f in dataclasses.fields(kind)}
        required = {
            f.name
            for f in dataclasses.fields(kind)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        if unknown := set(value) - names:
            raise ValueError(f"{path}: {kind.__name__} has no field {sorted(unknown)[0]!r}")
        if missing := required - set(value):
            raise ValueError(f"{path}: {kind.__name__} lacks field {sorted(missing)[0]!r}")
        hints = _hints(kind)
        return kind(**{k: from_plain(hints[k], v, f"{path}.{k}") for k, v in value.items()})
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path}: expected a list, got {type(value).__name__}")
        args = typing.get_args(kind)
        if len(args) == 2 and args[1] is Ellipsis:
            item = args[0]
            if item in (int, str) and all(type(v) is item for v in value):
                return tuple(value)  # long lists of ids, without a call for each
            return tuple(from_plain(item, v, f"{path}[{i}]") for i, v in enumerate(value))
        if len(args) != len(value):
            raise ValueError(f"{path}: expected {len(args)} items, got {len(value)}")
        return tuple(from_plain(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{path}: expected an object, got {type(value).__name__}")
        item = typing.get_args(kind)[1]
        return {k: from_plain(item, v, f"{path}.{k}") for k, v in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{path}: expected {kind.__name__}, got {value!r}")
    return value


def dumps(value: Any) -> str:
    """One canonical line of JSON: sorted keys, no spaces, no NaN."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def loads(kind: type[T], text: str) -> T:
    """Parse what ``dumps`` wrote.

    Raises:
        ValueError: not JSON, or not of this type.
    """
    return typing.cast(T, from_plain(kind, json.loads(text)))
