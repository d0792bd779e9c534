"""The order of runs that a relaxed program's segments lack: what is in memory while an operator reruns.

A segment of ``monetrun.solve.relaxation`` is a set of runs. Take the last rerun of an operator i in segment s. What is
alive at the segment's end was written before that rerun and is held, or is written after it. An operator that runs
after it reads what is held, or what is written after it. What i reads was written before it, unless it was alive at
the segment's beginning. An operator that runs before and after it runs twice, and is paid twice:

* ``F[v]``: v runs in s before it: ``F[i] = R[i, s]``; where v reads t, which w writes, ``F[w] >= F[v] - S[t, s]``;
* ``A[v]``: v runs in s after it: ``A[v] <= R[v, s]``, and ``A[v] + F[v] <= 1 + D[v, s]``,
  and where v reads t, which i writes, ``A[v] >= R[v, s] - S[t, s] - D[i, s]``, or which w writes,
  ``A[v] >= R[v, s] - S[t, s] - D[w, s] - (1 - A[w])``;
* ``H[t]``: t, which w writes, is held: ``H[t] + A[w] >= S[t, s + 1]``, and ``H[t] + A[w] >= A[v]`` where v reads t;
* ``D[v, s]``: v runs at least twice in s.

Each i and s has its own F, A and H.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

import cvxpy as cp
import numpy as np

from monetrun.solve.mip.canonical import Vector
from monetrun.solve.mip.rows import Column, Rows, Term

Key = tuple[int, int]


class Order:
    """The variables F, A, H and D of a relaxed program, and their rows.

    Args:
        rows: where rows are added.
        runs: index in R of (operator, segment).
        alive: index in S of (tensor, segment).
        writer: of (tensor, segment): the operator whose rerun in the segment may write the tensor, or None.
        reads: of (operator, segment): the tensors that every implementation reads, and that may be held.
        matters: whether a tensor is large enough to model.

    Attributes:
        twice: index in D of (operator, segment).
    """

    def __init__(
        self,
        rows: Rows,
        runs: Mapping[Key, int],
        alive: Mapping[Key, int],
        writer: Callable[[int, int], int | None],
        reads: Callable[[int, int], Sequence[int]],
        matters: Callable[[int], bool],
    ) -> None:
        self.twice: dict[Key, int] = {}
        self._rows, self._runs, self._alive = rows, runs, alive
        self._writer, self._reads, self._matters = writer, reads, matters
        self._sizes = {"F": 0, "A": 0, "H": 0}
        self._befores: list[tuple[Column, int, int | None]] = []  # (column, w, n): F[w] >= column - S[n]
        self._afters: list[tuple[int, int, int]] = []  # of each entry of A: i, s and v
        self._helds: list[tuple[int, Column, int | None]] = []  # (n, column, m): H[n] >= column - A[m]

    def held(self, operator: int, segment: int, ends: Iterable[int], own: set[int]) -> dict[int, Column]:
        """What is held beside ``own`` at the last rerun of ``operator`` in ``segment``: columns by tensor.

        Args:
            operator: i.
            segment: s.
            ends: tensors that may be alive at the segment's end.
            own: tensors that are counted elsewhere.
        """
        ends = sorted(t for t in ends if t not in own and self._matters(t))
        after = self._after(operator, segment, ends)
        before = self._before(operator, segment)
        for v, column in after.items():
            self._rows.add([("A", column, 1.0), ("R", self._runs[v, segment], -1.0)], 0.0)
            if v in before:
                self._rows.add([("A", column, 1.0), ("F", before[v], 1.0), self._not_twice(v, segment)], 1.0)
            for t in self._reads(v, segment):
                # what reads an output of `operator`, or one that is only written after it, runs after it
                w = self._writer(t, segment)
                if w is None or (w != operator and w not in after):
                    continue
                begins = self._alive.get((t, segment))
                there = [] if begins is None else [("S", begins, -1.0)]
                first = [] if w == operator else [("A", after[w], 1.0)]
                reading = [("A", column, -1.0), ("R", self._runs[v, segment], 1.0), *there, *first]
                self._rows.add([*reading, self._not_twice(w, segment)], float(len(first)))
        wanting: dict[int, list[Column]] = {t: [("S", self._alive[t, segment + 1])] for t in ends}
        for v, column in after.items():
            for t in self._reads(v, segment):
                if t not in own and self._matters(t):
                    wanting.setdefault(t, []).append(("A", column))
        found: dict[int, Column] = {}
        for t, columns in wanting.items():
            w = self._writer(t, segment)
            if w not in after and columns[0][0] == "S" and len(columns) == 1:
                found[t] = columns[0]
                continue
            found[t] = ("H", self._new("H"))
            later = after.get(w) if w is not None else None
            there = [] if later is None else [("A", later, -1.0)]
            for wants in columns:
                self._helds.append((found[t][1], wants, later))
                self._rows.add([(*wants, 1.0), (*found[t], -1.0), *there], 0.0)
        return found

    def _not_twice(self, operator: int, segment: int) -> Term:
        return "D", self.twice.setdefault((operator, segment), len(self.twice)), -1.0

    def _new(self, name: str) -> int:
        self._sizes[name] += 1
        return self._sizes[name] - 1

    def _after(self, operator: int, segment: int, ends: Iterable[int]) -> dict[int, int]:
        """Indices in A of the operators that may run after ``operator``, for what is alive at the end."""
        found: dict[int, int] = {}
        waiting = list(ends)
        while waiting:
            w = self._writer(waiting.pop(), segment)
            if w is None or w in found or w == operator:
                continue
            found[w] = self._new("A")
            self._afters.append((operator, segment, w))
            waiting.extend(self._reads(w, segment))
        return found

    def _before(self, operator: int, segment: int) -> dict[int, int]:
        """Indices in F of the operators that may have to run before ``operator``."""
        found: dict[int, int] = {}
        waiting = [-operator]
        while waiting:  # the last operator first: readers before writers
            v = -heapq.heappop(waiting)
            known = ("R", self._runs[operator, segment]) if v == operator else ("F", found[v])
            for t in self._reads(v, segment):
                w = self._writer(t, segment)
                if w is None:
                    continue
                if w not in found:
                    found[w] = self._new("F")
                    heapq.heappush(waiting, -w)
                begins = self._alive.get((t, segment))
                self._befores.append((known, found[w], begins))
                there = [] if begins is None else [("S", begins, -1.0)]
                self._rows.add([(*known, 1.0), ("F", found[w], -1.0), *there], 0.0)
        return found

    def variables(self) -> dict[str, cp.Variable]:
        """Those of F, A, H and D that have entries, by name."""
        found = {name: cp.Variable(size, name=name, bounds=[0, 1]) for name, size in self._sizes.items() if size}
        if self.twice:
            found["D"] = cp.Variable(len(self.twice), name="D", boolean=True)
        return found

    def start(self, value: dict[str, Vector], ran: Mapping[int, Sequence[int]]) -> None:
        """Add values of F, A, H and D that match those of R and S.

        Args:
            value: of the program's variables, by name.
            ran: per segment the operators that rerun in it, in order.
        """
        value |= {name: np.zeros(size) for name, size in self._sizes.items()}
        for (name, column), w, begins in self._befores:
            there = 0.0 if begins is None else value["S"][begins]
            value["F"][w] = max(value["F"][w], value[name][column] - there)
        for column, (i, s, v) in enumerate(self._afters):
            there_ran = ran.get(s, ())
            last = max((n for n, operator in enumerate(there_ran) if operator == i), default=-1)
            value["A"][column] = float(v in there_ran[last + 1 :])
        for h, (name, column), later in self._helds:
            written = 0.0 if later is None else value["A"][later]
            value["H"][h] = max(value["H"][h], value[name][column] - written)
        value["D"] = np.array([float(list(ran.get(s, ())).count(i) > 1) for i, s in self.twice])
