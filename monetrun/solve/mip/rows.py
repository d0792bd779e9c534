"""Constraints of a program, collected row by row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import cvxpy as cp
import numpy as np
import scipy.sparse as sp

from monetrun.solve.mip.canonical import Vector

Column = tuple[str, int]  # variable and index
Term = tuple[str, int, float]  # variable, index, coefficient


class Rows:
    """Rows of one block of constraints: the sum of a row's terms is at most its right-hand side.

    Attributes:
        impossible: a row without terms has a negative right-hand side.
    """

    def __init__(self) -> None:
        self.impossible = False
        self._entries: dict[str, tuple[list[int], list[int], list[float]]] = {}
        self._rhs: list[float] = []

    def add(self, terms: Iterable[Term], rhs: float) -> None:
        """Add one row."""
        row, empty = len(self._rhs), True
        for name, column, coefficient in terms:
            rows, columns, coefficients = self._entries.setdefault(name, ([], [], []))
            rows.append(row)
            columns.append(column)
            coefficients.append(coefficient)
            empty = False
        if not empty:
            self._rhs.append(rhs)
        elif rhs < 0:
            self.impossible = True

    def constraints(self, variables: Mapping[str, cp.Variable], equal: bool = False) -> list[cp.Constraint]:
        """The rows as one cvxpy constraint (equalities if ``equal``); an empty list if there are no rows."""
        if not self._rhs:
            return []
        total: cp.Expression = cp.Constant(np.zeros(len(self._rhs)))
        for name, (rows, columns, coefficients) in self._entries.items():
            shape = (len(self._rhs), variables[name].size)
            total += sp.csr_matrix((coefficients, (rows, columns)), shape=shape) @ variables[name]
        rhs = np.array(self._rhs)
        return [total == rhs if equal else total <= rhs]

    def excess(self, value: Mapping[str, Vector]) -> Vector:
        """By how much each row exceeds its right-hand side, or 0."""
        total = -np.array(self._rhs)
        for name, (rows, columns, coefficients) in self._entries.items():
            np.add.at(total, rows, np.array(coefficients) * value[name][columns])
        return np.asarray(np.maximum(total, 0.0))
