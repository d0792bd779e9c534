"""The native search (``cuda_ops/search_state.hpp``) on the part of a graph that the options allow."""

from __future__ import annotations

import ctypes
import dataclasses
from array import array
from dataclasses import dataclass

from monetrun.core.graph import Costs, Graph, Implementation
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step
from monetrun.core.simulate import core, flatten
from monetrun.solve import tidy

_TRIES = 2**16  # of greedy eviction, a second or two for thousands of operators; half of them should be enough


def available() -> bool:
    """Whether the native search can be used: a compiler was found."""
    return core()[0] is not None


@dataclass(frozen=True)
class Allowed:
    """A graph without what the options exclude.

    Attributes:
        original: the whole graph.
        graph: without the implementations that are not allowed, and nothing replayable without ``recompute``.
        costs: of ``graph``.
        index: per operator the original indices of the implementations that are left.
    """

    original: Graph
    graph: Graph
    costs: Costs
    index: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: Graph, costs: Costs, options: Options) -> Allowed:
        """What ``options`` allow of ``graph``."""

        def allowed(k: int, impl: Implementation) -> bool:
            return k == 0 or impl.allowed_by(options.implementations)

        index = tuple(
            tuple(k for k, impl in enumerate(op.implementations) if allowed(k, impl)) for op in graph.operators
        )
        whole = all(len(left) == len(op.implementations) for left, op in zip(index, graph.operators, strict=True))
        if options.recompute and whole:
            return cls(graph, graph, costs, index)
        operators = tuple(
            dataclasses.replace(
                op,
                implementations=tuple(op.implementations[k] for k in left),
                replayable=op.replayable and options.recompute,
            )
            for op, left in zip(graph.operators, index, strict=True)
        )
        seconds = tuple(tuple(row[k] for k in left) for row, left in zip(costs.seconds, index, strict=True))
        workspace = tuple(tuple(row[k] for k in left) for row, left in zip(costs.workspace_bytes, index, strict=True))
        reduced = Graph(graph.name, graph.tensors, operators)
        return cls(graph, reduced, Costs(costs.device, seconds, workspace), index)

    def to_original(self, schedule: Schedule) -> Schedule:
        """A schedule of ``graph`` as one of ``original``, without dead runs."""
        schedule = tidy.without_dead_runs(self.graph, schedule)
        if self.graph is self.original:
            return schedule

        def renumbered(steps: tuple[Step, ...]) -> tuple[Step, ...]:
            return tuple(Step(s.operator, self.index[s.operator][s.implementation]) for s in steps)

        return Schedule(renumbered(schedule.forward), renumbered(schedule.backward))

    def from_original(self, schedule: Schedule) -> list[tuple[int, int]]:
        """Operators and implementations of a schedule of ``original``, none in place, defaults where not allowed."""
        schedule = tidy.out_of_place(self.original, schedule)
        steps = []
        for step in schedule.forward + schedule.backward:
            left = self.index[step.operator]
            steps.append((step.operator, left.index(step.implementation) if step.implementation in left else 0))
        return steps


class NativeSearch:
    """One search towards one budget; a context manager, because the native core owns its memory.

    Args:
        allowed: what may be scheduled.
        budget_bytes: to search for.
        schedule: to start from, of the original graph.
        seed: of the random choices.
    """

    def __init__(self, allowed: Allowed, budget_bytes: int, schedule: Schedule, seed: int) -> None:
        library, reason = core()
        assert library is not None, reason
        self._library = library
        self._flat = flatten(allowed.graph, allowed.costs)
        self._graph = ctypes.byref(self._flat.struct)
        self._handle: int | None = self._library.monet_search_new(self._graph, seed)
        self._allowed = allowed
        self.load(schedule)
        self._library.monet_search_budget(self._handle, max(0, budget_bytes))

    def __enter__(self) -> NativeSearch:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.monet_search_free(self._handle)
        self._handle = None

    def load(self, schedule: Schedule) -> None:
        """Continue from ``schedule``."""
        schedule = tidy.with_first_runs(self._allowed.original, schedule)
        steps = self._allowed.from_original(schedule)
        operators, implementations = array("i", [o for o, _ in steps]), array("i", [k for _, k in steps])
        self._library.monet_search_load(
            self._handle,
            self._graph,
            len(schedule.forward),
            len(steps),
            operators.buffer_info()[0],
            implementations.buffer_info()[0],
        )

    def greedy(self, tries: int = _TRIES) -> bool:
        """Evict, trying at most ``tries`` evictions; whether the schedule fits."""
        return bool(self._library.monet_search_greedy(self._handle, tries))

    def anneal(self, iterations: int, hot: float, cold: float, time_limit: float, *, until_it_fits: bool) -> bool:
        """Anneal; whether a schedule that fits is known.

        Args:
            iterations: at most.
            hot: the first temperature, in mean seconds of a recomputation.
            cold: the last one.
            time_limit: wall-clock seconds.
            until_it_fits: stop at the first schedule that fits.
        """
        self._library.monet_search_anneal(self._handle, iterations, hot, cold, time_limit, until_it_fits)
        return float(self._library.monet_search_best_seconds(self._handle)) < float("inf")

    def ruin(self, iterations: int, hot: float, cold: float, time_limit: float) -> None:
        """Ruin and recreate; the arguments are those of ``anneal``."""
        self._library.monet_search_ruin(self._handle, iterations, hot, cold, time_limit)

    def return_to_best(self) -> None:
        """Continue from the best schedule."""
        self._library.monet_search_return_to_best(self._handle)

    def peak_bytes(self) -> int:
        """Of the current schedule."""
        return int(self._library.monet_search_peak(self._handle))

    def seconds(self) -> float:
        """Of the current schedule."""
        return float(self._library.monet_search_seconds(self._handle))

    def best(self) -> Schedule | None:
        """The cheapest schedule that fits, of the original graph; None if none does."""
        found = self._read(0)
        return None if found is None else self._allowed.to_original(found)

    def current(self) -> Schedule | None:
        """The current schedule, of the reduced graph and with its dead runs."""
        return self._read(1)

    def _read(self, which: int) -> Schedule | None:
        """The best that fits (0) or the current one (1)."""
        forward_steps = ctypes.c_int64()
        count = self._library.monet_search_read(
            self._handle, self._graph, which, 0, None, None, ctypes.byref(forward_steps)
        )
        if forward_steps.value < 0:
            return None
        operators, implementations = array("i", bytes(4 * count)), array("i", bytes(4 * count))
        self._library.monet_search_read(
            self._handle,
            self._graph,
            which,
            count,
            operators.buffer_info()[0],
            implementations.buffer_info()[0],
            ctypes.byref(forward_steps),
        )
        steps = tuple(Step(o, k) for o, k in zip(operators, implementations, strict=True))
        return Schedule(steps[: forward_steps.value], steps[forward_steps.value :])
