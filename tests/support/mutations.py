"""Damaged and edited files: random changes of a JSON text, as bytes and as a tree, the same for the same generator."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# What a hand, another program or a fault may write in place of a value.
_VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 7, 9999, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**20, -(1 << 70)),
    *(0.5, -0.25, 1e308, 1e-320, float("nan"), float("inf"), True, False, None),
    *("", "x", "forward", "\ud800", "[/b]", "\x00", [], {}, [[]], [0], {"a": 1}),
)


def mutated(text: str, chance: random.Random) -> bytes:
    """``text``, a JSON value, after one to three changes of the same sort."""
    if chance.random() < 0.15:
        return _changed_bytes(text.encode(), chance)
    tree = json.loads(text)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        change = _change_steps if chance.random() < 0.4 else _change_anywhere
        change(tree, chance)
    return json.dumps(tree).encode()


def _changed_bytes(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(content))
    length = chance.choice((1, 1, 8, 200))
    kind = chance.choice(("flip", "cut", "double", "end", "insert"))
    if kind == "flip":
        return content[:start] + bytes([content[start] ^ (1 << chance.randrange(8))]) + content[start + 1 :]
    if kind == "cut":
        return content[:start] + content[start + length :]
    if kind == "double":
        return content[: start + length] + content[start:]
    if kind == "end":
        return content[:start]
    filling = chance.choice((b"[" * 100_000, b"9" * 5000, b"\xff\xfe", b"NaN", b"\0" * length, b'{"":' * 5000))
    return content[:start] + filling + content[start:]


def _change_anywhere(tree: Any, chance: random.Random) -> None:
    """Change one value somewhere in the tree; a short list is as likely to be entered as a long one."""
    where = tree
    while True:
        places = _places(where)
        if not places:
            return
        place = chance.choice(places)
        if not _places(where[place]) or chance.random() < 0.15:
            break
        where = where[place]
    if isinstance(where, list):
        _change_list(where, place, chance)
    else:
        _change_dict(where, place, chance)


def _change_steps(tree: Any, chance: random.Random) -> None:
    """Change a pass of a schedule, where there is one: its steps, or what one of them runs."""
    schedules = [s for s in _dicts(tree) if "forward" in s and "backward" in s]
    if not schedules:
        _change_anywhere(tree, chance)
        return
    schedule = chance.choice(schedules)
    steps = schedule[chance.choice(("forward", "backward"))]
    if not isinstance(steps, list) or not steps:
        return
    place = chance.randrange(len(steps))
    kind = chance.choice(("operator", "implementation", "double all", "list", "again"))
    if kind == "double all":
        steps[:] = [step for step in steps for _ in range(2)]
    elif kind == "list":
        _change_list(steps, place, chance)
    elif kind == "again":  # a forward operator before some backward one: often sound
        again = chance.choice(schedule["forward"]) if schedule["forward"] else steps[place]
        schedule["backward"].insert(chance.randrange(len(schedule["backward"]) + 1), again)
    elif isinstance(steps[place], dict):
        steps[place] = {**steps[place], kind: chance.choice((*range(6), *_VALUES))}


def _change_list(items: list[Any], place: int, chance: random.Random) -> None:
    kind = chance.choice(("set", "remove", "double", "swap", "reverse", "empty"))
    if kind == "set":
        items[place] = _another(items[place], chance)
    elif kind == "remove":
        del items[place]
    elif kind == "double":
        items.insert(place, copy.deepcopy(items[place]))
    elif kind == "swap":
        other = chance.randrange(len(items))
        items[place], items[other] = items[other], items[place]
    elif kind == "reverse":
        items.reverse()
    else:
        items.clear()


def _change_dict(fields: dict[str, Any], name: str, chance: random.Random) -> None:
    kind = chance.choice(("set", "set", "set", "set", "remove", "rename", "add"))
    if kind == "set":
        fields[name] = _another(fields[name], chance)
    elif kind == "remove":
        del fields[name]
    elif kind == "rename":
        fields[name + "_"] = fields.pop(name)
    else:
        fields[chance.choice(("x", "schema", "pool"))] = copy.deepcopy(chance.choice(_VALUES))


def _another(value: Any, chance: random.Random) -> Any:
    if type(value) is int and chance.random() < 0.6:
        return value + chance.choice((-1, 1, 2, value, -2 * value, 4096))
    if type(value) is float and chance.random() < 0.6:
        return value * chance.choice((-1.0, 0.0, 0.5, 1e9))
    if isinstance(value, str) and value and chance.random() < 0.6:
        place = chance.randrange(len(value))
        return value[:place] + chance.choice("0a.\u00e9[") + value[place + 1 :]
    return copy.deepcopy(chance.choice(_VALUES))  # it may be changed, too


def _places(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, list) else []


def _dicts(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [d for item in inner for d in _dicts(item)]
    return [value, *found] if isinstance(value, dict) else found
