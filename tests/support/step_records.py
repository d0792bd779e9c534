"""Small training steps for tests, without torch: a chain of layers of any width at any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.step import OUTSIDE, SCRIPT, DeviceMemory, Event, Segment, StepRecord

WEIGHT_BYTES = 500
MIB = 1 << 20
EXPANDABLE = AllocatorSettings(expandable=True)


def graph_record(graph: Graph, costs: Costs) -> StepRecord:
    """A step of one graph and nothing else."""
    events = (Event(FORWARD, 0), Event(BACKWARD, 0))
    return StepRecord((graph,), (costs,), events, 0, {}, "cpu", "2.15.0")


def chain_record(
    batch: int, widths: tuple[int, ...] = (40, 30, 50, 20, 40, 30), seconds: tuple[float, ...] | None = None
) -> StepRecord:
    """A step of layers ``block<i>.linear`` and ``block<i>.relu``.

    Layer ``i`` has ``widths[i]`` bytes per sample and a weight of ``WEIGHT_BYTES``. A ReLU may run in place. A linear
    has a workspace of 2 bytes per sample and 7 more, and costs 1 + batch seconds, or ``seconds[i]``.
    """
    tensors: list[Tensor] = []
    operators: list[Operator] = []
    rows: list[tuple[float, ...]] = []
    workspaces: list[tuple[int, ...]] = []

    def tensor(nbytes: int, *, external: bool = False, kept: bool = False, name: str = "") -> int:
        tensors.append(Tensor(len(tensors), nbytes, external, kept, name))
        return len(tensors) - 1

    def operator(name: str, phase: str, inputs: tuple[int, ...], outputs: tuple[int, ...], cost: float) -> None:
        implementations = [Implementation("default", inputs)]
        if name.endswith("relu"):
            implementations.append(Implementation("in-place", inputs, in_place_of=inputs[0]))
        target = "aten." + name.rpartition(".")[2]
        operators.append(Operator(len(operators), name, target, phase, outputs, tuple(implementations)))
        rows.append((cost,) * len(implementations))
        workspaces.append((0 if name.endswith("relu") else 2 * batch + 7,) * len(implementations))

    costs = seconds or (1.0 + batch,) * len(widths)
    x = tensor(8 * batch, external=True, name="x")
    weights = [tensor(WEIGHT_BYTES, external=True, name=f"weight{i}") for i in range(len(widths))]
    inputs, outputs = [], []
    for i, width in enumerate(widths):
        inputs.append(x)
        before, after = tensor(width * batch), tensor(width * batch, kept=i == len(widths) - 1)
        operator(f"block{i}.linear", FORWARD, (x, weights[i]), (before,), costs[i])
        operator(f"block{i}.relu", FORWARD, (before,), (after,), 0.5)
        x = after
        outputs.append(after)
    tangent = tensor(widths[-1] * batch, external=True, name="tangent")
    gradient = tangent
    for i in reversed(range(len(widths))):
        masked = tensor(widths[i] * batch)
        operator(f"block{i}.relu_backward", BACKWARD, (gradient, outputs[i]), (masked,), 0.5)
        operator(
            f"block{i}.weight_grad", BACKWARD, (masked, inputs[i]), (tensor(WEIGHT_BYTES, kept=True),), 1.0 + batch
        )
        if i:
            gradient = tensor(widths[i - 1] * batch)
            operator(f"block{i}.input_grad", BACKWARD, (masked, weights[i]), (gradient,), 1.0 + batch)
    graph = Graph("Chain", tuple(tensors), tuple(operators))
    held = widths[-1] * batch + 11  # the loss, and the tangent
    events = (
        Event(FORWARD, 0),
        Event(OUTSIDE, -1, held, held + 3 * batch, "loss"),
        Event(BACKWARD, 0, released=(tangent,)),
        Event(OUTSIDE, -1, -11 - widths[-1] * batch - len(widths) * WEIGHT_BYTES, 0, ""),
        Event(OUTSIDE, -1, 0, 40, "SGD.step"),
    )
    parameters = WEIGHT_BYTES * len(widths)
    return StepRecord(
        graphs=(graph,),
        costs=(Costs("test", tuple(rows), tuple(workspaces)),),
        events=events,
        base_bytes=2 * parameters + 8 * batch,
        ledger={
            "parameters": parameters,
            "gradients": parameters,
            "optimizer state": parameters,
            SCRIPT: 8 * batch,
        },
        device="cpu",
        torch_version="2.15.0",
    )


def output_of(graph: Graph) -> int:
    """The forward's output: the one tensor that a forward operator writes and that is kept."""
    (t,) = (t for op in graph.operators[: graph.forward_count] for t in op.outputs if graph.tensors[t].kept)
    return t


def tangent_of(graph: Graph) -> int:
    """The gradient of the output, which the backward is given."""
    return next(t.id for t in graph.tensors if t.name == "tangent")


def chained_graphs_record(batch: int = 100) -> StepRecord:
    """A step of two graphs: graph 0's output is only graph 1's input, and its own backward is its last reader."""
    one, two = (chain_record(batch, widths) for widths in ((40, 60), (30, 50, 20)))
    graphs = one.graphs + two.graphs
    events = (
        Event(FORWARD, 0),
        Event(OUTSIDE, -1, 8, 8),
        Event(FORWARD, 1),
        Event(OUTSIDE, -1, 20 * batch, 20 * batch, "loss"),
        Event(BACKWARD, 1, released=(tangent_of(graphs[1]), output_of(graphs[1]))),
        Event(OUTSIDE, -1, 60 * batch, 60 * batch, "what lies between"),
        Event(BACKWARD, 0, released=(tangent_of(graphs[0]), output_of(graphs[0]))),
        Event(OUTSIDE, -1, -8, 0),
    )
    return StepRecord(graphs, one.costs + two.costs, events, 1000, {}, "cpu", "2.15.0")


def _requests(event: Event) -> tuple[int, ...]:
    """Of the loss: the tangent, which the backward releases, 11 MiB that stay until it has ended, and a temporary."""
    held, high = event.delta_bytes, event.peak_bytes
    return ((held - 11) * MIB, 11 * MIB, (high - held) * MIB, -3) if event.name == "loss" else ()


def _in_mib(event: Event) -> Event:
    delta, peak = event.delta_bytes * MIB, event.peak_bytes * MIB
    return replace(event, delta_bytes=delta, peak_bytes=peak, requests=_requests(event))


def on_a_device(record: StepRecord, **memory: Any) -> StepRecord:
    """``record`` with all its sizes in MiB, on a device that holds its base in one block."""
    scaled = replace(
        record,
        graphs=tuple(
            replace(g, tensors=tuple(replace(t, nbytes=t.nbytes * MIB) for t in g.tensors)) for g in record.graphs
        ),
        costs=tuple(
            replace(c, workspace_bytes=tuple(tuple(b * MIB for b in row) for row in c.workspace_bytes))
            for c in record.costs
        ),
        events=tuple(_in_mib(event) for event in record.events),
        base_bytes=record.base_bytes * MIB,
    )
    base = (Segment(False, (scaled.base_bytes,)),) if scaled.base_bytes else ()
    return replace(scaled, memory=DeviceMemory(EXPANDABLE, AllocatorSettings(), 80 << 30, base, **memory))
