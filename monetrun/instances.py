"""Planning problems as JSON files: a joint graph, its costs and the budgets to plan it for.

The format: ``tensor_bytes[t]``; ``ops`` in the order they run, each with ``reads`` and ``writes`` (tensor numbers),
``backward``, ``random`` and ``seconds``; ``kept``: tensors that stay from their writing to the end;
``plain_peak_bytes``, ``gradient_bytes`` and ``best_known[column] = {budget_bytes, overhead}``. A schedule is a list of
operator numbers: every operator once in this order, and any non-random forward operator again anywhere in the
backward part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monetrun.errors import UsageError
from monetrun.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor, check
from monetrun.plan import Schedule, Step


@dataclass(frozen=True)
class Instance:
    """A planning problem.

    Attributes:
        graph: its joint graph; operators have the file's numbers.
        costs: the file's seconds; no workspaces.
        gradient_bytes: bytes of the kept tensors; what a budget's share does not scale.
        plain_peak_bytes: the peak of the plain step.
        budgets: column (``"0.5"``) -> budget in bytes.
        best_known: column -> overhead as a fraction, or None where none is known.
    """

    graph: Graph
    costs: Costs
    gradient_bytes: int
    plain_peak_bytes: int
    budgets: dict[str, int]
    best_known: dict[str, float | None]


def read(path: str | Path) -> Instance:
    """Read a problem.

    Raises:
        UsageError: the file can not be read or is not such a problem.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return _instance(data)
    except OSError as error:
        raise UsageError(f"{path} can not be read: {error.strerror}") from error
    except KeyError as error:
        raise UsageError(f"{path} has no field {error.args[0]!r}", "it is not a planning problem") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: {error}", "it is not a planning problem") from error


def _instance(data: dict[str, Any]) -> Instance:
    kept = set(data["kept"])
    operators = []
    phase = FORWARD
    for i, op in enumerate(data["ops"]):
        if op["backward"]:
            phase = BACKWARD
        for t in (*op["reads"], *op["writes"]):
            if not 0 <= t < len(data["tensor_bytes"]):
                raise ValueError(f"operator {i} has tensor {t}, but there are {len(data['tensor_bytes'])}")
        # a forward operator that runs behind backward ones (a copy into a running mean) stays where it is
        operators.append(
            Operator(
                id=i,
                name=str(op["name"]),
                target=str(op["target"]),
                phase=phase,
                outputs=tuple(op["writes"]),
                implementations=(Implementation("default", tuple(op["reads"])),),
                replayable=phase == FORWARD and not op["random"],
            )
        )
    written = {t for op in operators for t in op.outputs}
    tensors = tuple(
        Tensor(t, nbytes, external=t not in written, kept=t in kept) for t, nbytes in enumerate(data["tensor_bytes"])
    )
    graph = Graph(str(data["name"]), tensors, tuple(operators))
    costs = Costs("instance", tuple((float(op["seconds"]),) for op in data["ops"]), tuple((0,) for _ in operators))
    check(graph, costs)
    columns: dict[str, dict[str, Any]] = data["best_known"]
    return Instance(
        graph=graph,
        costs=costs,
        gradient_bytes=data["gradient_bytes"],
        plain_peak_bytes=data["plain_peak_bytes"],
        budgets={r: known["budget_bytes"] for r, known in columns.items()},
        best_known={r: known["overhead"] for r, known in columns.items()},
    )


def to_json(instance: Instance) -> dict[str, Any]:
    """The problem as the file has it (late forward operators as backward ones; other implementations left out)."""
    graph = instance.graph
    return {
        "name": graph.name,
        "tensor_bytes": [t.nbytes for t in graph.tensors],
        "kept": [t.id for t in graph.tensors if t.kept],
        "gradient_bytes": instance.gradient_bytes,
        "plain_peak_bytes": instance.plain_peak_bytes,
        "seconds": sum(row[0] for row in instance.costs.seconds),
        "best_known": {
            r: {"budget_bytes": budget, "overhead": instance.best_known[r]} for r, budget in instance.budgets.items()
        },
        "ops": [
            {
                "name": op.name,
                "target": op.target,
                "backward": op.phase == BACKWARD,
                "random": op.phase == FORWARD and not op.replayable,
                "reads": list(op.inputs),
                "writes": list(op.outputs),
                "seconds": instance.costs.seconds[op.id][0],
            }
            for op in graph.operators
        ],
    }


def to_numbers(schedule: Schedule) -> list[int]:
    """The operator numbers of ``schedule``, in order."""
    return [step.operator for step in schedule.forward + schedule.backward]


def from_numbers(graph: Graph, numbers: list[int]) -> Schedule:
    """The schedule that runs ``numbers``; whether it is valid is for ``simulate`` to say."""
    cut = min(graph.forward_count, len(numbers))
    return Schedule(tuple(Step(o) for o in numbers[:cut]), tuple(Step(o) for o in numbers[cut:]))
