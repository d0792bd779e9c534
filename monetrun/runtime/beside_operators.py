"""What is allocated for a while beside operators of a recorded step, and is not in their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monetrun.capture import arriving_strides
from monetrun.capture.arriving_strides import Arriving
from monetrun.capture.joint import JointGraph
from monetrun.capture.lifetimes import Lifetimes
from monetrun.capture.strides import alike
from monetrun.core.graph import BACKWARD, Costs, Graph, Operator, Requests


class BesideOperators:
    """Of one recorded step."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[int, int], list[int]] = {}  # by graph and operator, of each implementation
        self._given: dict[int, dict[fx.Node, tuple[int, ...] | None]] = {}  # by graph: see ``arriving_strides.of``

    def add(self, number: int, operator: Operator, nbytes: int) -> None:
        """So much is allocated while this operator of a graph runs."""
        self._add(number, operator.id, [nbytes] * len(operator.implementations))

    def add_after(self, number: int, graph: Graph, operator: int, nbytes: int) -> None:
        """So much is allocated after this operator of the backward, before the next one.

        The schedule's model has it while the operator runs: less what is freed with it under every schedule.
        """
        ended = last_read_by(graph, operator)
        found = []
        for implementation in graph.operators[operator].implementations:
            freed = ended.intersection(implementation.inputs) - {implementation.in_place_of}
            found.append(max(0, nbytes - sum(graph.tensors[t].nbytes for t in freed)))
        self._add(number, operator, found)

    def _add(self, number: int, operator: int, nbytes: Sequence[int]) -> None:
        before = self._bytes.get((number, operator), [0] * len(nbytes))
        self._bytes[number, operator] = [max(a, b) for a, b in zip(before, nbytes, strict=True)]

    def gradients_come(self, graph: int, joint: JointGraph, arguments: Sequence[Any]) -> None:
        """A backward begins with these arguments, of which the last ones are the gradients of the graph's outputs.

        One that is a number for all elements, as of ``sum()``, is made whole by kernels that read it element by
        element. Costs are measured with whole ones.
        """
        tangents = joint.tangents
        values = dict(zip(tangents, arguments[len(arguments) - len(tangents) :], strict=True))
        there = {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and v.layout == torch.strided}
        expanded = {joint.storage[n] for n, v in there.items() if n in joint.storage and _is_expanded(v)}
        known = self._given.setdefault(graph, dict.fromkeys(n for n, v in values.items() if v is None))
        for node, value in there.items():
            known.pop(node, None)
            if not _is_expanded(value) and not alike(value.shape, value.stride(), node.meta["val"].stride()):
                known[node] = value.stride()
        for operator in joint.graph.operators if expanded else ():
            read = expanded.intersection(operator.inputs)
            if operator.phase == BACKWARD and read:
                self.add(graph, operator, sum(joint.graph.tensors[t].nbytes for t in read))

    def arriving(self, joints: Sequence[JointGraph], lifetimes: Lifetimes) -> list[Arriving]:
        """The graphs, with the strides with which the gradients of their outputs arrived."""
        return [
            arriving_strides.of(joint, self._given.get(graph, {}), lifetimes.given_away(joint))
            for graph, joint in enumerate(joints)
        ]

    def costs(self, costs: Sequence[Costs]) -> list[Costs]:
        """The costs of all graphs, with these."""
        return [self._with_beside(graph, of) for graph, of in enumerate(costs)]

    def _with_beside(self, graph: int, costs: Costs) -> Costs:
        beside = [self._bytes.get((graph, o), [0] * len(of)) for o, of in enumerate(costs.workspace_bytes)]
        if not any(map(any, beside)):
            return costs
        workspace = (tuple(map(max, of, more)) for of, more in zip(costs.workspace_bytes, beside, strict=True))
        requests = (tuple(map(_then, of, more)) for of, more in zip(costs.requests, beside, strict=False))
        return replace(costs, workspace_bytes=tuple(workspace), requests=tuple(requests))


def last_read_by(graph: Graph, operator: int) -> set[int]:
    """Tensors of the backward that an operator of it reads last, whichever implementations run: freed with it."""
    reads = [set().union(*(i.inputs for i in op.implementations)) for op in graph.operators[operator:]]
    first = graph.forward_count
    found = {t for t in reads[0] if graph.writer[t] >= first and not graph.tensors[t].kept}
    return found.difference(*reads[1:])


def _is_expanded(value: torch.Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True))


def _then(own: Requests, nbytes: int) -> Requests:
    """``own``, and ``nbytes`` that are requested after it, and freed."""
    if not own.results or not nbytes:
        return own
    return Requests((*own.sizes, nbytes, -1 - sum(n > 0 for n in own.sizes)), own.results)
