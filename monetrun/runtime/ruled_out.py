"""What no later schedule may use: implementations whose guards failed, operators that read what the script changes."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from monetrun.capture.guards import FailedGuards
from monetrun.capture.joint import JointGraph
from monetrun.core.graph import BACKWARD, Graph
from monetrun.core.left_out import without
from monetrun.core.step import StepRecord


class RuledOut:
    """Remembers by their graph's structure, so that the same model at other shapes is without them."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int, str]] = set()  # (structural fingerprint, operator, implementation's name)
        self._read_changed: set[tuple[str, int]] = set()  # (structural fingerprint, operator)

    def add_failed(self, failed: FailedGuards) -> None:
        """Remember the implementations of guards that failed."""
        structure, operators = failed.graph.structural_fingerprint, failed.graph.operators
        for guard in failed.guards:
            name = operators[guard.operator].implementations[guard.implementation].name
            self._known.add((structure, guard.operator, name))

    def add_recorded(self, record: StepRecord) -> None:
        """Remember what a record rules out: guards failed when it was recorded, or the script changed an input."""
        for graph in record.graphs:
            unusable = [(op.id, impl.name) for op in graph.operators for impl in op.implementations if not impl.usable]
            structure = graph.structural_fingerprint
            self._known |= {(structure, *which) for which in unusable}
            self._read_changed |= {(structure, op.id) for op in graph.operators if op.reads_changed}

    def without(self, graph: Graph) -> Graph:
        """``graph``, in which the remembered implementations are not usable, and such operators not replayable."""
        operators = {operator for _, operator, *_ in (*self._known, *self._read_changed)}
        concerned = [op for op in graph.operators if op.id in operators]
        structure = graph.structural_fingerprint if concerned else ""
        named = [(op.id, k, impl.name) for op in concerned for k, impl in enumerate(op.implementations)]
        changed = list(graph.operators)
        for op in concerned:
            if op.replayable and (structure, op.id) in self._read_changed:
                changed[op.id] = replace(op, replayable=False, reads_changed=True)
        graph = replace(graph, operators=tuple(changed)) if concerned else graph
        return without(graph, {(op, k) for op, k, name in named if (structure, op, name) in self._known})

    def record_without(self, record: StepRecord) -> StepRecord:
        """``record`` with such graphs."""
        return replace(record, graphs=tuple(self.without(g) for g in record.graphs))


def usable_now(joint: JointGraph, graph: Graph) -> Graph:
    """``graph``, in which implementations whose guards fail for the present weights are not usable."""
    failed = joint.guards.failed()
    return graph if failed is None else without(graph, failed.implementations)


def changeable(joint: JointGraph) -> set[int]:
    """Outputs and inputs, but no parameters, buffers, and what the plain step's backward reads."""
    found = {joint.storage.get(p) for p in joint.primals} & joint.transient
    found |= {joint.storage.get(n) for n in joint.outputs if isinstance(n, fx.Node)}
    return {t for t in found if t is not None} - {
        t for op in joint.graph.operators if op.phase == BACKWARD for t in op.inputs
    }
