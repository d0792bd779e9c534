"""The solvers: one algorithm a file, all with one signature.

``solver("greedy")(graph, costs, budget_bytes, options) -> Solution``. A module is imported when it is asked for, since
some need cvxpy, which takes long.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from monetrun.core.errors import UsageError
from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Solution

Solver = Callable[[Graph, Costs, int, Options], Solution]

# name -> module and function
ALGORITHMS = {
    "hierarchical": ("monetrun.solve.hierarchical", "solve"),
    "greedy": ("monetrun.solve.greedy", "solve"),
    "ilp": ("monetrun.solve.ilp", "solve"),
    "hong-dp": ("monetrun.solve.chain", "solve_hong_dp"),
    "hong-linear": ("monetrun.solve.chain", "solve_hong_linear"),
    "sqrt": ("monetrun.solve.chain", "solve_sqrt"),
    "none": ("monetrun.solve.chain", "solve_none"),
}


def solver(name: str) -> Solver:
    """The solver called ``name``.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in ALGORITHMS:
        raise UsageError(f"there is no algorithm {name!r}", f"choose one of {', '.join(ALGORITHMS)}")
    module, function = ALGORITHMS[name]
    found: Solver = getattr(importlib.import_module(module), function)
    return found


def names() -> tuple[str, ...]:
    """The names that ``solver`` knows."""
    return tuple(ALGORITHMS)
