"""A graph and limits on what it allocates, as one graph and a budget for any solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from monetrun.core.freed import gradients_among
from monetrun.core.graph import FORWARD, Costs, Graph, Operator, Tensor
from monetrun.core.plan import Schedule, Step
from monetrun.core.round_graph import (
    outputs_freed_in_backward,
    outside_operator,
    waiting_gradients,
    without_unreplayable_reruns,
)


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The most a graph may have allocated: at its forward's end, during its forward, and during its backward."""

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class LimitedGraph:
    """A graph with operators added so that fitting ``budget_bytes`` means keeping the original graph's limits.

    Two operators are added, which must run once and cost nothing: one before the forward pass, and one at its end,
    whose workspace leaves room for no more saved bytes than the limit. A tensor as large as the difference between
    what the two passes may allocate is alive before the second operator or after it. External tensors that every
    backward releases are internal here, written by the first operator; they, released outputs and released gradients
    are freed after their last reader.
    """

    graph: Graph
    costs: Costs
    budget_bytes: int

    @classmethod
    def of(cls, graph: Graph, costs: Costs, limits: GraphLimits, released: Sequence[int] = ()) -> LimitedGraph:
        """``graph`` within ``limits``, where every backward frees ``released`` (external tensors, outputs)."""
        cut, size = graph.forward_count, len(graph.tensors)
        forward_filler = max(0, limits.backward_bytes - limits.forward_bytes)
        backward_filler = max(0, limits.forward_bytes - limits.backward_bytes)
        external = tuple(sorted(t for t in released if graph.tensors[t].external))
        outputs = outputs_freed_in_backward(graph, released)
        freed = (*external, *sorted(outputs))
        gradients = gradients_among(graph, released)
        waiting = waiting_gradients(graph, released)
        own = [
            replace(t, external=False, kept=False) if t.id in freed or t.id in gradients else t for t in graph.tensors
        ]
        tensors = (*own, Tensor(size, forward_filler), Tensor(size + 1, backward_filler, kept=True))

        def moved(op: Operator, by: int) -> Operator:
            taken = {*gradients, *freed}
            more = waiting.get(op.id, ())
            implementations = (
                replace(i, inputs=(*dict.fromkeys((*i.inputs, *more)),), usable=i.usable and i.in_place_of not in taken)
                for i in op.implementations
            )
            replayable = op.replayable and outputs.isdisjoint(op.outputs)
            return replace(op, id=op.id + by, implementations=tuple(implementations), replayable=replayable)

        operators = (
            outside_operator(0, "first", FORWARD, (), (size, *external)),
            *(moved(op, 1) for op in graph.operators[:cut]),
            outside_operator(cut + 1, "saved", FORWARD, (size, *freed), (size + 1,)),
            *(moved(op, 2) for op in graph.operators[cut:]),
        )
        external_bytes = sum(graph.tensors[t].nbytes for t in external)
        workspace_bytes = max(0, min(limits.forward_bytes, limits.backward_bytes) - limits.saved_bytes)
        seconds, workspace = costs.seconds, costs.workspace_bytes
        return cls(
            Graph(graph.name, tensors, operators),
            Costs(
                costs.device,
                ((0.0,), *seconds[:cut], (0.0,), *seconds[cut:]),
                ((0,), *workspace[:cut], (workspace_bytes,), *workspace[cut:]),
            ),
            max(limits.forward_bytes, limits.backward_bytes, 0) + external_bytes,
        )

    def from_original(self, schedule: Schedule) -> Schedule:
        """The schedule of this graph that does what ``schedule`` does in the original one."""
        last = self.graph.forward_count - 1

        def moved(steps: Sequence[Step]) -> tuple[Step, ...]:
            return tuple(Step(s.operator + (1 if s.operator < last - 1 else 2), s.implementation) for s in steps)

        backward = without_unreplayable_reruns(self.graph, moved(schedule.backward))
        return Schedule((Step(0), *moved(schedule.forward), Step(last)), tuple(backward))

    def to_original(self, schedule: Schedule) -> Schedule:
        """The schedule of the original graph that does what ``schedule`` does in this one."""
        last = self.graph.forward_count - 1

        def moved(steps: Sequence[Step]) -> tuple[Step, ...]:
            own = [s for s in steps if s.operator not in (0, last)]
            return tuple(Step(s.operator - (1 if s.operator < last else 2), s.implementation) for s in own)

        return Schedule(moved(schedule.forward), moved(schedule.backward))
