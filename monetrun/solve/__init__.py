"""The solvers: one algorithm a file, all with one signature, and the table of them.

``solver("greedy")(graph, costs, budget_bytes, options, starts) -> Solution``. ``starts`` are valid schedules of the
graph, within the budget or not; what a solver does with them is in the table. Importing this package is cheap: an
algorithm's module is imported by ``solver``, and cvxpy where a program is written.

Other packages name an ``Algorithm`` in the entry point group ``monetrun.solvers`` (see docs/extending.md).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from monetrun.core.errors import UsageError
from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution

ENTRY_POINTS = "monetrun.solvers"


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
        module: where it is.
        function: its solver.
        description: one line for ``--help`` and tables.
        uses_starts: it returns nothing dearer than the cheapest of ``starts`` that fits; others ignore ``starts``.
        chooses_implementations: it uses other implementations than the default where that pays.
        needs_cvxpy: it writes integer programs.
    """

    module: str
    function: str
    description: str
    uses_starts: bool = False
    chooses_implementations: bool = False
    needs_cvxpy: bool = False


# monetrun's own, by the name that ``--algorithm`` takes
ALGORITHMS: dict[str, Algorithm] = {
    "hierarchical": Algorithm(
        "monetrun.solve.hierarchical",
        "solve",
        "greedy, then whole-network and window integer programs with a proven bound",
        uses_starts=True,
        chooses_implementations=True,
        needs_cvxpy=True,
    ),
    "greedy": Algorithm(
        "monetrun.solve.greedy",
        "solve",
        "eviction, then annealing",
        uses_starts=True,
        chooses_implementations=True,
    ),
    "ilp": Algorithm(
        "monetrun.solve.ilp",
        "solve",
        "MONeT's integer program, for tens of operators",
        uses_starts=True,
        chooses_implementations=True,
        needs_cvxpy=True,
    ),
    "hong-dp": Algorithm("monetrun.solve.chain", "solve_hong_dp", "Hong et al.'s O(n^3) dynamic program"),
    "hong-linear": Algorithm("monetrun.solve.chain", "solve_hong_linear", "Hong et al.'s O(n) algorithm"),
    "sqrt": Algorithm("monetrun.solve.chain", "solve_sqrt", "Chen et al.'s every sqrt(n)-th checkpoint"),
    "none": Algorithm("monetrun.solve.chain", "solve_none", "the plain schedule"),
}


def descriptions() -> dict[str, str]:
    """What ``--algorithm`` takes, and a line about each: monetrun's own algorithms, then those of installed packages.

    No solver is imported: an installed package's line says where its ``Algorithm`` is.
    """
    installed = {entry.name: f"from {entry.value}" for entry in entry_points(group=ENTRY_POINTS)}
    own = {name: algorithm.description for name, algorithm in ALGORITHMS.items()}
    return {**own, **{name: installed[name] for name in sorted(installed) if name not in own}}


def algorithm(name: str) -> Algorithm:
    """The algorithm called ``name``; monetrun's own come before those of installed packages.

    Raises:
        UsageError: there is none of that name, or an installed package's cannot be loaded.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    entries = tuple(entry_points(group=ENTRY_POINTS, name=name))
    if not entries:
        raise UsageError(f"there is no algorithm {name!r}", f"choose one of {', '.join(descriptions())}")
    if len(entries) > 1:
        raise _unusable(name, f"several packages have one: {', '.join(sorted(e.value for e in entries))}")
    try:
        loaded = entries[0].load()
    except Exception as error:
        raise _unusable(name, f"loading {entries[0].value} raised {type(error).__name__}: {error}") from error
    if not isinstance(loaded, Algorithm):
        raise _unusable(name, f"{entries[0].value} is {loaded!r}, not a monetrun.solve.Algorithm")
    return loaded


def solver(name: str) -> Solver:
    """The solver called ``name``.

    Raises:
        UsageError: there is none of that name, an installed package's cannot be loaded, or cvxpy is not installed and
            it needs it.
    """
    chosen = algorithm(name)
    if chosen.needs_cvxpy and importlib.util.find_spec("cvxpy") is None:
        others = ", ".join(other for other, row in ALGORITHMS.items() if not row.needs_cvxpy)
        raise UsageError(
            f"--algorithm {name} needs the package cvxpy, which is not installed",
            f"pip install cvxpy, or choose one of {others}",
        )
    try:
        found: Solver = getattr(importlib.import_module(chosen.module), chosen.function)
    except (ImportError, AttributeError) as error:
        if name in ALGORITHMS:
            raise
        raise _unusable(name, str(error)) from error
    return found


def _unusable(name: str, why: str) -> UsageError:
    return UsageError(
        f"--algorithm {name}: the entry point {name!r} in the group {ENTRY_POINTS} cannot be used: {why}",
        "correct or uninstall the package that it is from, or choose another algorithm",
    )
