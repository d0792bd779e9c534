"""What is passed to a solver and what it returns, in matrix form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Progress = Callable[[float, float], None]  # objective of the incumbent, bound

# Seconds per simplex iteration, and per nonzero in it, everything else that solvers do included: SCIP 10 and HiGHS 1.15
# on the programs of six networks, one 2.6 GHz Zen 4 core, 2026-11; single solves take 0.4 to 2.5 times as long.
_ITERATION_SECONDS, _NONZERO_SECONDS = 3e-4, 2e-9
_ENTRY_SECONDS = 5e-6  # to build, pass on and presolve one nonzero


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a solver stops.

    Attributes:
        seconds: wall-clock limit.
        gap: relative distance of incumbent and bound.
        work_seconds: limit on ``Outcome.iterations``, in seconds of work, checked after each linear relaxation (SCIP)
            or node (HiGHS). Unlike ``seconds`` it stops at the same point every time.
        seed: of the solver's random choices.
    """

    seconds: float = 1e9
    gap: float = 0.0
    work_seconds: float = np.inf
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a solver found.

    Attributes:
        status: ``"optimal"`` (within the gap), ``"feasible"``, ``"infeasible"`` (proven), or ``"unknown"``.
        x: the incumbent; None without one.
        objective: of the incumbent.
        bound: no solution has a smaller objective.
        interrupted: Ctrl-C was pressed.
        iterations: simplex iterations done.
    """

    status: str
    x: Vector | None = None
    objective: float = np.inf
    bound: float = np.inf
    interrupted: bool = False
    iterations: int = 0


@dataclass(frozen=True, slots=True)
class Matrices:
    """Minimize cost @ x where matrix @ x <= rhs (equal in the first ``equalities`` rows) and lower <= x <= upper."""

    cost: Vector
    matrix: Any  # scipy's csr_matrix
    rhs: Vector
    equalities: int
    lower: Vector
    upper: Vector
    integral: NDArray[np.bool_]

    def work_seconds(self, iterations: int) -> float:
        """Estimated seconds of ``iterations`` simplex iterations on an idle core."""
        nonzeros = self.matrix.nnz
        return float(iterations * (_ITERATION_SECONDS + _NONZERO_SECONDS * nonzeros) + _ENTRY_SECONDS * nonzeros)

    def iterations(self, work_seconds: float) -> float:
        """Simplex iterations that take about ``work_seconds``."""
        return (work_seconds - self.work_seconds(0)) / (self.work_seconds(1) - self.work_seconds(0))
