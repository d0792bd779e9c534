"""Implementations whose guards failed: the present weights rule them out, and no later schedule may use them."""

from __future__ import annotations

from dataclasses import replace

from monetrun.capture.guards import FailedGuards
from monetrun.capture.joint import JointGraph
from monetrun.core.graph import Graph, without
from monetrun.core.step import StepRecord


class RuledOut:
    """Remembers implementations by their graph's structure, so that the same model at other shapes is without them."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int, str]] = set()  # (structural fingerprint, operator, implementation's name)

    def add_failed(self, failed: FailedGuards) -> None:
        """Remember the implementations of guards that failed."""
        structure, operators = failed.graph.structural_fingerprint, failed.graph.operators
        for guard in failed.guards:
            name = operators[guard.operator].implementations[guard.implementation].name
            self._known.add((structure, guard.operator, name))

    def add_recorded(self, record: StepRecord) -> None:
        """Remember what is not usable in a record: its guards failed when the step was recorded."""
        for graph in record.graphs:
            unusable = [(op.id, impl.name) for op in graph.operators for impl in op.implementations if not impl.usable]
            self._known |= {(graph.structural_fingerprint, *which) for which in unusable}

    def without(self, graph: Graph) -> Graph:
        """``graph``, in which the remembered implementations are not usable."""
        operators = {operator for _, operator, _ in self._known}
        named = [
            (op, k, impl) for op in graph.operators if op.id in operators for k, impl in enumerate(op.implementations)
        ]
        structure = graph.structural_fingerprint if named else ""
        return without(graph, {(op.id, k) for op, k, impl in named if (structure, op.id, impl.name) in self._known})

    def record_without(self, record: StepRecord) -> StepRecord:
        """``record`` with such graphs."""
        return replace(record, graphs=tuple(self.without(g) for g in record.graphs))


def usable_now(joint: JointGraph, graph: Graph) -> Graph:
    """``graph``, in which implementations whose guards fail for the present weights are not usable."""
    failed = joint.guards.failed()
    return graph if failed is None else without(graph, failed.implementations)
