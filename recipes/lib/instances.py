"""Planning problems as JSON files: a joint graph, its costs and the budgets to plan it for.

The format: ``tensor_bytes[t]``; ``ops`` in the order they run, each with ``reads`` and ``writes`` (tensor numbers),
``backward``, ``random`` and ``seconds``; ``kept``: tensors that stay from their writing to the end;
``plain_peak_bytes``, ``gradient_bytes`` and ``best_known[column] = {budget_bytes, overhead}``, the overhead left out
where none is known. A schedule is a list of operator numbers: every operator once in this order, and any non-random
forward operator again anywhere in the backward part.

Optional fields: an operator's ``implementations`` beside the default (``name``,
``reads``, ``seconds``, ``in_place_of``, ``inexact``), ``optional`` (it may be left out), and ``optional_ops``, written
like the others with the number of the operator that each stands ``before``. Those have no numbers: a list of numbers is
a schedule of default implementations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monetrun.core.errors import UsageError
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor, check
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate

# The budgets of a problem, as shares of its plain peak less the gradients.
SHARES = ("0.8", "0.65", "0.5", "0.4", "0.33")


@dataclass(frozen=True)
class Instance:
    """A planning problem.

    Attributes:
        graph: its joint graph; operators have the file's numbers.
        costs: the file's seconds; no workspaces.
        gradient_bytes: bytes of the kept tensors; a budget's share does not scale them.
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
        UsageError: the file cannot be read or is not such a problem.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return _instance(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise UsageError(f"{path} has no field {error.args[0]!r}", "it is not a planning problem") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: {error}", "it is not a planning problem") from error


def _instance(data: dict[str, Any]) -> Instance:
    kept = set(data["kept"])
    operators: list[Operator] = []
    seconds: list[tuple[float, ...]] = []
    phase = FORWARD
    for op in _with_optional(data):
        if op["backward"]:
            phase = BACKWARD
        others = op.get("implementations", [])
        for t in (*op["reads"], *op["writes"], *(t for other in others for t in other["reads"])):
            if not 0 <= t < len(data["tensor_bytes"]):
                raise ValueError(f"operator {op['name']} has tensor {t}, but there are {len(data['tensor_bytes'])}")
        # a forward operator after backward ones (a copy into a running mean) keeps its place
        operators.append(
            Operator(
                id=len(operators),
                name=str(op["name"]),
                target=str(op["target"]),
                phase=phase,
                outputs=tuple(op["writes"]),
                implementations=(Implementation("default", tuple(op["reads"])), *map(_implementation, others)),
                replayable=phase == FORWARD and not op["random"],
                optional="before" in op or bool(op.get("optional", False)),
                plain="before" not in op,
            )
        )
        seconds.append((float(op["seconds"]), *(float(other["seconds"]) for other in others)))
    written = {t for op in operators for t in op.outputs}
    tensors = tuple(
        Tensor(t, nbytes, external=t not in written, kept=t in kept) for t, nbytes in enumerate(data["tensor_bytes"])
    )
    graph = Graph(str(data["name"]), tensors, tuple(operators))
    costs = Costs("instance", tuple(seconds), tuple((0,) * len(row) for row in seconds))
    check(graph, costs)
    columns: dict[str, dict[str, Any]] = data["best_known"]
    return Instance(
        graph=graph,
        costs=costs,
        gradient_bytes=data["gradient_bytes"],
        plain_peak_bytes=data["plain_peak_bytes"],
        budgets={r: known["budget_bytes"] for r, known in columns.items()},
        best_known={r: known.get("overhead") for r, known in columns.items()},
    )


def _with_optional(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The file's operators, the optional ones in their places."""
    before: dict[int, list[dict[str, Any]]] = {}
    for op in data.get("optional_ops", []):
        before.setdefault(op["before"], []).append(op)
    for i, op in enumerate(data["ops"]):
        yield from before.get(i, [])
        yield op
    yield from before.get(len(data["ops"]), [])


def _implementation(data: dict[str, Any]) -> Implementation:
    return Implementation(
        str(data["name"]), tuple(data["reads"]), data.get("in_place_of"), exact=not data.get("inexact", False)
    )


def problem(graph: Graph, costs: Costs, shares: Sequence[str] = SHARES) -> Instance:
    """A captured graph as a planning problem, without external tensors and workspaces.

    Args:
        graph: as captured.
        costs: of it.
        shares: of the plain peak less the gradients; each, with the gradients added, is a budget.
    """
    own = [t for t in graph.tensors if not t.external]
    number = {t.id: i for i, t in enumerate(own)}

    def renumbered(tensors: Iterable[int]) -> tuple[int, ...]:
        return tuple(number[t] for t in tensors if t in number)

    operators = tuple(
        replace(
            op,
            outputs=renumbered(op.outputs),
            implementations=tuple(
                replace(
                    i,
                    inputs=renumbered(i.inputs),
                    in_place_of=None if i.in_place_of is None else number[i.in_place_of],
                )
                for i in op.implementations
            ),
        )
        for op in graph.operators
    )
    graph = Graph(graph.name, tuple(replace(t, id=number[t.id]) for t in own), operators)
    costs = replace(costs, workspace_bytes=tuple((0,) * len(row) for row in costs.seconds))
    plain_peak_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes
    gradient_bytes = sum(t.nbytes for t in graph.tensors if t.kept)
    above = plain_peak_bytes - gradient_bytes
    return Instance(
        graph,
        costs,
        gradient_bytes,
        plain_peak_bytes,
        {share: gradient_bytes + int(float(share) * above) for share in shares},
        dict.fromkeys(shares),
    )


def to_json(instance: Instance) -> dict[str, Any]:
    """The problem as JSON (late forward operators as backward ones)."""
    graph, seconds = instance.graph, instance.costs.seconds
    ops: list[dict[str, Any]] = []
    optional: list[dict[str, Any]] = []
    for op in graph.operators:
        written = {
            "name": op.name,
            "target": op.target,
            "backward": op.phase == BACKWARD,
            "random": op.phase == FORWARD and not op.replayable,
            "reads": list(op.inputs),
            "writes": list(op.outputs),
            "seconds": seconds[op.id][0],
            **({"optional": True} if op.optional and op.plain else {}),
        }
        if len(op.implementations) > 1:
            written["implementations"] = [
                {
                    "name": other.name,
                    "reads": list(other.inputs),
                    "seconds": seconds[op.id][k],
                    **({} if other.in_place_of is None else {"in_place_of": other.in_place_of}),
                    **({} if other.exact else {"inexact": True}),
                }
                for k, other in enumerate(op.implementations[1:], 1)
            ]
        if not op.plain:
            optional.append({**written, "before": len(ops)})
        else:
            ops.append(written)
    return {
        "name": graph.name,
        "tensor_bytes": [t.nbytes for t in graph.tensors],
        "kept": [t.id for t in graph.tensors if t.kept],
        "gradient_bytes": instance.gradient_bytes,
        "plain_peak_bytes": instance.plain_peak_bytes,
        "seconds": sum(op["seconds"] for op in ops),
        "best_known": {
            r: {"budget_bytes": budget, **({} if (known := instance.best_known[r]) is None else {"overhead": known})}
            for r, budget in instance.budgets.items()
        },
        "ops": ops,
        **({"optional_ops": optional} if optional else {}),
    }


def _numbered(graph: Graph) -> list[int]:
    """The id of each operator that has a number."""
    return [op.id for op in graph.operators if op.plain]


def to_numbers(graph: Graph, schedule: Schedule) -> list[int]:
    """The operator numbers of ``schedule``, in order.

    Raises:
        ValueError: a step is not a default one, and has no number.
    """
    number = {o: n for n, o in enumerate(_numbered(graph))}
    steps = schedule.forward + schedule.backward
    if any(step.implementation or step.operator not in number for step in steps):
        raise ValueError("the schedule uses implementations that the format has no numbers for")
    return [number[step.operator] for step in steps]


def from_numbers(graph: Graph, numbers: list[int]) -> Schedule:
    """The schedule that runs ``numbers``; ``simulate`` checks whether it is valid."""
    steps = [Step(_numbered(graph)[n]) for n in numbers]
    cut = min(sum(o < graph.forward_count for o in _numbered(graph)), len(numbers))
    return Schedule(tuple(steps[:cut]), tuple(steps[cut:]))
