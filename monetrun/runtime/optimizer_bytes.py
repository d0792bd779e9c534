"""What optimizers' steps allocate in a recorded step: their state, and what they allocate for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from monetrun.capture.joint import JointGraph
from monetrun.core.graph import Costs
from monetrun.runtime.stretches import StretchMeter


class OptimizerBytes:
    """Of one recorded step.

    Attributes:
        state_bytes: what stays allocated.
        passing_bytes: by the stretch that is an optimizer's step: what it allocates beside that.
        state_within: part of ``state_bytes``, of steps within a backward: by the stretch.
    """

    def __init__(self, stretch_meter: StretchMeter) -> None:
        self.state_bytes = 0
        self.passing_bytes: dict[int, int] = {}
        self.state_within: Counter[int] = Counter()
        self._stretch_meter = stretch_meter
        self._turn: Sequence[tuple[int, int]] = ()  # (graph, operator) of the gradients that were given last
        self._beside: Counter[tuple[int, int]] = Counter()  # by those, what a step within a backward allocates
        self._before_bytes = 0

    def gradients_given(self, graph: int, joint: JointGraph, nodes: Iterable[object]) -> None:
        """The backward of a graph is about to give the gradients of these nodes, after which a hook may step."""
        tensors = [joint.storage[node] for node in nodes if node in joint.storage]  # type: ignore[index]
        self._turn = [(graph, joint.graph.writer[t]) for t in tensors if t in joint.graph.writer]

    def begins_within(self) -> None:
        """A hook begins an optimizer's step within a backward."""
        self._stretch_meter.keep_peak()
        self._before_bytes = self._stretch_meter.meter.current_bytes()

    def ended_within(self) -> None:
        """It has ended."""
        meter = self._stretch_meter.meter
        now, peak = meter.current_bytes(), meter.peak_bytes()
        grown = max(0, now - self._before_bytes)
        self.state_bytes += grown
        self.state_within[len(self._stretch_meter.stretches)] += grown
        for writer in self._turn:
            self._beside[writer] = max(self._beside[writer], peak - max(now, self._before_bytes))

    def beside(self, costs: Sequence[Costs]) -> list[Costs]:
        """The costs of all graphs, with what such steps allocate beside the operators of the gradients they follow."""
        return [self._with_workspace(graph, of) for graph, of in enumerate(costs)]

    def _with_workspace(self, graph: int, costs: Costs) -> Costs:
        if not self._beside:
            return costs
        workspace = [tuple(max(w, self._beside[graph, o]) for w in of) for o, of in enumerate(costs.workspace_bytes)]
        return replace(costs, workspace_bytes=tuple(workspace))
