"""The solvers: one algorithm a file, all with one signature, and the table of them.

``solver("greedy")(graph, costs, budget_bytes, options, starts) -> Solution``. ``starts`` are valid schedules of the
graph, within the budget or not; what a solver does with them is in the table. Importing this package is cheap: an
algorithm's module, and with it cvxpy, is imported by ``solver``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from monetrun.core.errors import UsageError
from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution


class Solver(Protocol):
    """What every algorithm is: a function from a graph and a budget to a schedule within it."""

    def __call__(
        self, graph: Graph, costs: Costs, budget_bytes: int, options: Options, starts: Sequence[Schedule] = ()
    ) -> Solution:
        """Find a schedule; ``starts`` are valid schedules, within the budget or not."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm and what it can do.

    Attributes:
        name: as in ``--algorithm``.
        module: where it is, below this package.
        function: its solver.
        description: one line for ``--help`` and tables.
        uses_starts: it returns nothing dearer than the cheapest of ``starts`` that fits; others ignore ``starts``.
        chooses_implementations: it uses other implementations than the default where that pays.
        needs_cvxpy: it writes integer programs.
    """

    name: str
    module: str
    function: str
    description: str
    uses_starts: bool = False
    chooses_implementations: bool = False
    needs_cvxpy: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "hierarchical",
            "hierarchical",
            "solve",
            "greedy, then whole-network and window integer programs with a proven bound",
            uses_starts=True,
            chooses_implementations=True,
            needs_cvxpy=True,
        ),
        Algorithm(
            "greedy",
            "greedy",
            "solve",
            "eviction, then annealing",
            uses_starts=True,
            chooses_implementations=True,
        ),
        Algorithm(
            "ilp",
            "ilp",
            "solve",
            "MONeT's integer program, for tens of operators",
            uses_starts=True,
            chooses_implementations=True,
            needs_cvxpy=True,
        ),
        Algorithm("hong-dp", "chain", "solve_hong_dp", "Hong et al.'s O(n^3) dynamic program"),
        Algorithm("hong-linear", "chain", "solve_hong_linear", "Hong et al.'s O(n) algorithm"),
        Algorithm("sqrt", "chain", "solve_sqrt", "Chen et al.'s every sqrt(n)-th checkpoint"),
        Algorithm("none", "chain", "solve_none", "the plain schedule"),
    )
}


def solver(name: str) -> Solver:
    """The solver called ``name``.

    Raises:
        UsageError: there is none of that name, or cvxpy is not installed and it needs it.
    """
    if name not in ALGORITHMS:
        raise UsageError(f"there is no algorithm {name!r}", f"choose one of {', '.join(ALGORITHMS)}")
    algorithm = ALGORITHMS[name]
    try:
        module = importlib.import_module(f"{__name__}.{algorithm.module}")
    except ModuleNotFoundError as error:
        if not (algorithm.needs_cvxpy and error.name == "cvxpy"):
            raise
        others = ", ".join(other.name for other in ALGORITHMS.values() if not other.needs_cvxpy)
        raise UsageError(
            f"--algorithm {name} needs the package cvxpy, which is not installed",
            f"pip install cvxpy, or choose one of {others}",
        ) from error
    found: Solver = getattr(module, algorithm.function)
    return found
