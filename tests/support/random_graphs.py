"""Hypothesis strategies for small random joint graphs, their costs and valid schedules of them.

``joint_graphs()`` has everything that a captured graph may have: several outputs, in-place implementations,
implementations that read other tensors, optional operators, kept, external and zero-byte tensors, operators that must
not rerun. Keywords switch features off for code that does not support them.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from monetrun.core import graph as graphs
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.plan import Schedule, Step


@st.composite
def joint_graphs(
    draw: st.DrawFn,
    *,
    max_forward: int = 8,
    max_backward: int = 8,
    in_place: bool = True,
    alternatives: bool = True,
    optional: bool = True,
    workspace: bool = True,
) -> tuple[Graph, Costs]:
    """A random joint graph and its costs; both pass ``monetrun.core.graph.check``."""
    integers, booleans = st.integers, st.booleans
    forward = draw(integers(1, max_forward))
    backward = draw(integers(0, max_backward))
    tensors: list[dict[str, object]] = []
    sizes = st.sampled_from([0, 1, 2, 3, 4, 4, 4, 8, 16])

    def new_tensor(external: bool, nbytes: int) -> int:
        kept = not external and draw(integers(0, 7)) == 0
        tensors.append({"id": len(tensors), "nbytes": nbytes, "external": external, "kept": kept})
        return len(tensors) - 1

    for _ in range(draw(integers(0, 2))):
        new_tensor(True, draw(sizes))
    operators: list[Operator] = []
    optional_outputs: set[int] = set()
    for i in range(forward + backward):
        is_forward = i < forward
        is_optional = optional and draw(integers(0, 5)) == 0
        is_plain = not is_optional or not is_forward or draw(booleans())
        readable = [t for t in range(len(tensors)) if t not in optional_outputs]
        recent = readable[-3:]

        def reads(pool: list[int], near: list[int]) -> tuple[int, ...]:
            chosen = draw(st.lists(st.sampled_from(near), max_size=2)) if near else []
            if pool and draw(booleans()):
                chosen += draw(st.lists(st.sampled_from(pool), max_size=2))
            return tuple(dict.fromkeys(chosen))

        inputs = reads(readable, recent)
        outputs = tuple(new_tensor(False, draw(sizes)) for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0]))))
        if is_plain and is_optional:
            for t in outputs:
                tensors[t]["kept"] = False
        if not is_plain:
            optional_outputs.update(outputs)
        implementations = [Implementation("default", inputs)]
        if in_place and outputs and inputs and draw(booleans()):
            target = draw(st.sampled_from(inputs))
            if draw(integers(0, 9)):  # mostly of equal size, as it must be to be used
                tensors[outputs[0]]["nbytes"] = tensors[target]["nbytes"]
            implementations.append(Implementation("in-place", inputs, in_place_of=target))
        if alternatives and draw(integers(0, 3)) == 0:
            pool = [t for t in range(len(tensors)) if t not in outputs]
            other = Implementation("other", reads(pool, pool[-4:]), exact=draw(booleans()))
            implementations.append(other)
            if in_place and outputs and other.inputs and draw(booleans()):
                target = draw(st.sampled_from(other.inputs))
                implementations.append(replace(other, in_place_of=target))
        operators.append(
            Operator(
                id=i,
                name=f"op{i}",
                target="test.op",
                phase=FORWARD if is_forward else BACKWARD,
                outputs=outputs,
                implementations=tuple(implementations),
                replayable=is_forward and draw(integers(0, 5)) > 0,
                optional=is_optional,
                plain=is_plain,
            )
        )
    graph = Graph("random", tuple(Tensor(name=f"t{t['id']}", **t) for t in tensors), tuple(operators))  # type: ignore[arg-type]
    seconds, workspaces = [], []
    for op in operators:
        row = [draw(integers(1, 16)) / 16]
        spaces = [draw(st.sampled_from([0, 0, 0, 1, 5])) if workspace else 0]
        for k in range(1, len(op.implementations)):
            outer = graphs.counterpart(op, k)
            row.append(draw(integers(1, 16 if outer == k else round(16 * row[outer]))) / 16)
            own = draw(st.sampled_from([0, 0, 1, 5])) if workspace and outer == k else 0
            spaces.append(own if outer == k else spaces[outer])
        seconds.append(tuple(row))
        workspaces.append(tuple(spaces))
    costs = Costs("random", tuple(seconds), tuple(workspaces))
    graphs.check(graph, costs)
    return graph, costs


@st.composite
def schedules(draw: st.DrawFn, graph: Graph, *, max_replays: int = 6) -> Schedule:
    """A schedule of ``graph`` that is valid except that a read, or running in place, may be illegal."""

    def step(op: Operator) -> Step:
        return Step(op.id, draw(st.integers(0, len(op.implementations) - 1)) if draw(st.booleans()) else 0)

    forward = graph.operators[: graph.forward_count]
    first = tuple(step(op) for op in forward if not op.optional or draw(st.booleans()))
    second = [step(op) for op in graph.operators[graph.forward_count :] if not op.optional or draw(st.booleans())]
    replayable = [op for op in forward if op.replayable]
    if replayable:
        for op in draw(st.lists(st.sampled_from(replayable), max_size=max_replays)):
            second.insert(draw(st.integers(0, len(second))), step(op))
    return Schedule(first, tuple(second))


def broken(draw: st.DrawFn, graph: Graph, schedule: Schedule) -> Schedule:
    """``schedule`` with one change that may break a rule: a step dropped, doubled, moved or renumbered."""
    steps = list(schedule.forward + schedule.backward)
    cut = len(schedule.forward)
    if steps:
        i = draw(st.integers(0, len(steps) - 1))
        match draw(st.sampled_from(["drop", "double", "move", "operator", "implementation", "cut"])):
            case "drop":
                del steps[i]
                cut -= i < cut
            case "double":
                steps.insert(draw(st.integers(0, len(steps))), steps[i])
            case "move":
                moved = steps.pop(i)
                steps.insert(draw(st.integers(0, len(steps))), moved)
            case "operator":
                steps[i] = Step(draw(st.integers(-1, len(graph.operators))), steps[i].implementation)
            case "implementation":
                steps[i] = Step(steps[i].operator, draw(st.integers(-1, 3)))
            case "cut":
                cut = draw(st.integers(0, len(steps)))
    return Schedule(tuple(steps[:cut]), tuple(steps[cut:]))
