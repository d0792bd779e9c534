"""The rules of the planning problems' format, checked on the file's own data without any code of the replay.

A schedule is a sequence of operator numbers: every operator once in the file's order, and any non-random forward
operator again anywhere in the backward part. A tensor lives from a write to its last read before the next write, a
kept one to the end; the bytes at a step are those alive before it plus all that it writes; operators read only what is
alive.
"""

from __future__ import annotations

from typing import Any


def first_runs(problem: dict[str, Any], schedule: list[int]) -> list[int]:
    """Where each operator runs for the first time; raises ``ValueError`` unless they do in the file's order."""
    seen: dict[int, int] = {}
    for i, o in enumerate(schedule):
        seen.setdefault(o, i)
    if sorted(seen) != list(range(len(problem["ops"]))):
        raise ValueError("an operator is missing or unknown")
    places = [seen[o] for o in range(len(problem["ops"]))]
    if places != sorted(places):
        raise ValueError("first runs are not in order")
    return places


def measure(problem: dict[str, Any], schedule: list[int]) -> tuple[int, float]:
    """Peak bytes and seconds of ``schedule``; raises ``ValueError`` where it breaks a rule."""
    ops, nbytes, kept = problem["ops"], problem["tensor_bytes"], set(problem["kept"])
    places = set(first_runs(problem, schedule))
    forward = next((o for o, op in enumerate(ops) if op["backward"]), len(ops))
    for i, o in enumerate(schedule):
        if i in places:
            continue
        if ops[o]["backward"] or ops[o]["random"]:
            raise ValueError(f"operator {o} must not run again")
        if len(set(schedule[:i]) & set(range(forward))) < forward:
            raise ValueError(f"operator {o} runs again before the backward part")
    spans: list[tuple[int, int, int]] = []  # tensor, from, to: steps at which it is alive or being written
    for t in range(len(nbytes)):
        writes = [i for i, o in enumerate(schedule) if t in ops[o]["writes"]]
        reads = [i for i, o in enumerate(schedule) if t in ops[o]["reads"]]
        if not writes:
            continue  # a parameter: not the graph's
        if any(r < writes[0] for r in reads):
            raise ValueError(f"tensor {t} is read before it is written")
        if t in kept:
            spans += [(t, w, len(schedule) - 1 if w == writes[0] else w) for w in writes]
            continue
        for w, after in zip(writes, [*writes[1:], len(schedule)], strict=True):
            spans.append((t, w, max([r for r in reads if w < r < after], default=w)))
    during = [0] * len(schedule)
    for t, a, b in spans:
        for i in range(a, b + 1):
            during[i] += nbytes[t]
    return max(during, default=0), sum(ops[o]["seconds"] for o in schedule)
