"""A training step at a batch that was not tried, from its records at two others.

A model's graph has the same structure at every batch. The bytes of its tensors, the costs of its operators and what the
script allocates between its calls grow linearly with the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from monetrun.core.errors import UsageError
from monetrun.core.graph import Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.step import Event, StepRecord


def check_alike(samples: Mapping[int, StepRecord]) -> None:
    """Check that the steps have the same structure, and are not the same.

    Raises:
        UsageError: they do not, or are; the message says in what.
    """
    (small, first), *others = sorted(samples.items())
    for batch, other in others:
        what = difference(first, other)
        if what:
            raise UsageError(
                f"the step at batch {batch} does not have the structure of that at batch {small}: {what}",
                "the model's operators depend on the batch; begin with batches where they are the same: --trials 16,32",
            )
        if [g.fingerprint for g in first.graphs] == [g.fingerprint for g in other.graphs]:
            raise UsageError(
                f"the step at batch {batch} is the same as at batch {small}",
                "{batch} in the script's arguments does not set the batch that the model is trained with",
            )


def difference(a: StepRecord, b: StepRecord) -> str:
    """How the structures of two steps differ, or an empty string."""
    if len(a.graphs) != len(b.graphs):
        return f"{len(a.graphs)} graphs against {len(b.graphs)}"
    for k, (one, other) in enumerate(zip(a.graphs, b.graphs, strict=True)):
        if one.structural_fingerprint != other.structural_fingerprint:
            return f"graph {k} ({one.name}) has {len(one.operators)} operators against {len(other.operators)}"
    if [(e.kind, e.graph) for e in a.events] != [(e.kind, e.graph) for e in b.events]:
        return "the graphs are called in another order"
    return ""


def rescaled(samples: Mapping[int, StepRecord], batch: int) -> StepRecord:
    """The step at ``batch``, extrapolated linearly from the two samples nearest to it.

    Each tensor's bytes, each operator's costs and each stretch of the script has a line of its own. Seconds that fall
    with the batch are noise: they are replaced by their mean.

    Args:
        samples: at least two, all of the same structure (``check_alike``).
        batch: any positive number.
    """
    if batch in samples:
        return samples[batch]
    first, second = sorted(sorted(samples, key=lambda b: (abs(b - batch), b))[:2])
    a, b = samples[first], samples[second]

    def line(one: int, other: int) -> int:
        return one - (other - one) * (batch - first) // (first - second)  # rounded up

    def size(one: int, other: int) -> int:
        return max(0, line(one, other))

    def seconds(one: float, other: float) -> float:
        if other <= one:
            return (one + other) / 2
        return max(0.0, one + (other - one) * (batch - first) / (second - first))

    graphs, costs = [], []
    for k, (one, other) in enumerate(zip(a.graphs, b.graphs, strict=True)):
        tensors = tuple(
            Tensor(t.id, size(t.nbytes, u.nbytes), u.external, u.kept, u.name)
            for t, u in zip(one.tensors, other.tensors, strict=True)
        )
        operators, rows = [], []
        for op, same in zip(one.operators, other.operators, strict=True):
            both, chosen = _common(op, same)
            operators.append(replace(same, implementations=both, signature=f"{same.signature}@{batch}"))
            rows.append(
                [
                    (
                        seconds(a.costs[k].seconds[op.id][i], b.costs[k].seconds[op.id][j]),
                        size(a.costs[k].workspace_bytes[op.id][i], b.costs[k].workspace_bytes[op.id][j]),
                    )
                    for i, j in chosen
                ]
            )
        graphs.append(Graph(other.name, tensors, tuple(operators), other.regions))
        costs.append(
            Costs(
                b.costs[k].device,
                tuple(tuple(s for s, _ in row) for row in rows),
                tuple(tuple(w for _, w in row) for row in rows),
            )
        )
    return replace(
        b,
        graphs=tuple(graphs),
        costs=tuple(costs),
        events=tuple(
            Event(
                v.kind,
                v.graph,
                line(e.delta_bytes, v.delta_bytes),
                line(e.peak_bytes, v.peak_bytes),
                v.name,
                v.released,
                v.dropped,
                read_as=v.read_as,
            )
            for e, v in zip(a.events, b.events, strict=True)
        ),
        sharding=None,  # modules do as the script says
        base_bytes=size(a.base_bytes, b.base_bytes),
        ledger={name: size(a.ledger.get(name, 0), nbytes) for name, nbytes in b.ledger.items()},
    )


def _common(op: Operator, other: Operator) -> tuple[tuple[Implementation, ...], list[tuple[int, int]]]:
    """The implementations that an operator has at both batches, and their indices in each."""
    known = {_identity(implementation): j for j, implementation in enumerate(other.implementations)}
    chosen = [
        (i, known[_identity(implementation)])
        for i, implementation in enumerate(op.implementations)
        if _identity(implementation) in known
    ]
    return tuple(other.implementations[j] for _, j in chosen), chosen


def _identity(implementation: Implementation) -> tuple[str, tuple[int, ...], int | None]:
    return implementation.name, implementation.inputs, implementation.in_place_of
