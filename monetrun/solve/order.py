"""What a run again finds in memory because it has just run: the order that a relaxed program's segments lack.

A segment of ``monetrun.solve.relaxation`` is a set of runs. But a run again of i reads what other operators wrote.
Where that was not alive at the segment's beginning, they have run before i, and so have those whose outputs they read.
What they wrote and is alive at the segment's end is then held while i runs, or one of them runs once more, which costs:

* ``F[w, i, s]``: w has run in segment s before the last run of i in it: ``F[w] >= F[v] - S[t, s]`` where v reads t,
  which w writes, and ``F[i] = R[i, s]``;
* ``D[w, s]``: w runs at least twice in segment s, and is paid twice;
* ``W[t, i, s]``: t, which w writes, is held at the last run of i: ``W >= S[t, s + 1] + F[w] - 1 - D[w, s]``.

On a U-Net at a third of its activations, without other implementations, this takes the bound from 29 to 41% overhead
where 50% is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import cvxpy as cp
import numpy as np

from monetrun.solve import mip

Key = tuple[int, int]
_Columns = Mapping[Key, int]


class _Held(NamedTuple):
    """A tensor that may be held: its column in S at the end, its writer's in R, in F and in D."""

    ends: int
    runs: int
    before: int
    twice: int


class Order:
    """The variables F, D and W of a relaxed program, and their rows.

    Args:
        rows: where rows are added.
        runs: column in R of (operator, segment).
        alive: column in S of (tensor, segment).
        writer: of (tensor, segment): the operator whose run again in the segment may write the tensor, or None.
        reads: of an operator: the tensors that it reads however it runs.
    """

    def __init__(
        self,
        rows: mip.Rows,
        runs: _Columns,
        alive: _Columns,
        writer: Callable[[int, int], int | None],
        reads: Callable[[int], Iterable[int]],
    ) -> None:
        self._rows, self._runs, self._alive, self._writer, self._reads = rows, runs, alive, writer, reads
        self._twice: dict[Key, int] = {}
        self._chain: list[tuple[tuple[str, int], int, int | None]] = []  # F[v] or R[i], F[w], S of what is read
        self._befores = 0
        self._held: list[_Held] = []

    def before(self, operator: int, segment: int) -> dict[int, int]:
        """Columns in F of the operators that may have to run before a run again of ``operator`` in ``segment``."""
        found: dict[int, int] = {}
        waiting = [-operator]
        while waiting:  # the last first: who reads comes before who writes
            v = -heapq.heappop(waiting)
            known = ("R", self._runs[operator, segment]) if v == operator else ("F", found[v])
            for t in sorted(self._reads(v)):
                w = self._writer(t, segment)
                if w is None:
                    continue
                if w not in found:
                    found[w] = self._befores
                    self._befores += 1
                    heapq.heappush(waiting, -w)
                begins = self._alive.get((t, segment))
                self._chain.append((known, found[w], begins))
                there = [] if begins is None else [("S", begins, -1.0)]
                self._rows.add([(*known, 1.0), ("F", found[w], -1.0), *there], 0.0)
        return found

    def held(self, tensor: int, segment: int, writer: int, before: int) -> int:
        """Column in W: ``tensor`` is held at the run before which its ``writer`` may have to run (F's column)."""
        twice = self._twice.setdefault((writer, segment), len(self._twice))
        held = _Held(self._alive[tensor, segment + 1], self._runs[writer, segment], before, twice)
        column = len(self._held)
        self._held.append(held)
        self._rows.add([("S", held.ends, 1.0), ("R", held.runs, -1.0), ("W", column, -1.0)], 0.0)
        parts = [("S", held.ends, 1.0), ("F", held.before, 1.0), ("D", held.twice, -1.0), ("W", column, -1.0)]
        self._rows.add(parts, 1.0)
        return column

    def variables(self) -> dict[str, cp.Variable]:
        """F, D and W by name, where there are any."""
        found: dict[str, cp.Variable] = {}
        if self._befores:
            found["F"] = cp.Variable(self._befores, name="F", bounds=[0, 1])
        if self._held:
            found["D"] = cp.Variable(len(self._twice), name="D", boolean=True)
            found["W"] = cp.Variable(len(self._held), name="W", bounds=[0, 1])
        return found

    def twice(self) -> list[Key]:
        """(Operator, segment) of each column in D."""
        return list(self._twice)

    def start(self, value: dict[str, mip.Vector], counts: Mapping[Key, int]) -> None:
        """Add values of F, D and W that go with those of R and S.

        Args:
            value: of the program's variables, by name.
            counts: how often an operator runs again in a segment.
        """
        before = np.zeros(self._befores)
        for (name, column), w, begins in self._chain:
            known = before[column] if name == "F" else value["R"][column]
            before[w] = max(before[w], known - (0.0 if begins is None else value["S"][begins]))
        twice = np.array([float(counts.get(key, 0) > 1) for key in self._twice])
        held = [
            max(0.0, ends - value["R"][h.runs], ends + before[h.before] - 1.0 - twice[h.twice])
            for h in self._held
            for ends in (value["S"][h.ends],)
        ]
        value |= {"F": before, "D": twice, "W": np.array(held)}
