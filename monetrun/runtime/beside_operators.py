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
        # by graph and operator: as they are requested, and beside each implementation
        self._bytes: dict[int, dict[int, tuple[int, list[int]]]] = {}
        self._last_readers: dict[int, dict[int, int]] = {}  # by graph
        self._given: dict[int, dict[fx.Node, tuple[int, ...] | None]] = {}  # by graph: see ``arriving_strides.of``

    def add(self, number: int, operator: Operator, nbytes: int) -> None:
        """So much is allocated while this operator of a graph runs."""
        self._add(number, operator.id, nbytes, [nbytes] * len(operator.implementations))

    def add_after(self, number: int, graph: Graph, operator: int, nbytes: int) -> None:
        """So much is allocated after this operator of the backward, before the next one; -1: before the first.

        The schedule's model has it while the operator runs: less what is freed with it under every schedule.
        """
        if operator < graph.forward_count:
            for first in graph.operators[graph.forward_count :][:1]:
                self.add(number, first, nbytes)
            return
        if number not in self._last_readers:
            self._last_readers[number] = last_readers(graph)
        readers, found = self._last_readers[number], []
        for implementation in graph.operators[operator].implementations:
            freed = {t for t in implementation.inputs if readers.get(t) == operator} - {implementation.in_place_of}
            found.append(max(0, nbytes - sum(graph.tensors[t].nbytes for t in freed)))
        self._add(number, operator, nbytes, found)

    def _add(self, number: int, operator: int, requested: int, nbytes: Sequence[int]) -> None:
        of_graph = self._bytes.setdefault(number, {})
        before, beside = of_graph.get(operator, (0, [0] * len(nbytes)))
        of_graph[operator] = max(before, requested), [max(a, b) for a, b in zip(beside, nbytes, strict=True)]

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
        if not (of_graph := self._bytes.get(graph)):
            return costs
        workspace, requests = list(costs.workspace_bytes), list(costs.requests)
        for operator, (requested, beside) in of_graph.items():
            workspace[operator] = tuple(max(w, n) for w, n in zip(workspace[operator], beside, strict=True))
            if requests:
                requests[operator] = tuple(_then(own, requested) for own in requests[operator])
        return replace(costs, workspace_bytes=tuple(workspace), requests=tuple(requests))


def last_readers(graph: Graph) -> dict[int, int]:
    """The backward's own tensors, and the operator that reads each last, whichever implementations run.

    Under every schedule they are freed with it: the backward's operators run once, in their order.
    """
    found: dict[int, int] = {}
    for operator in graph.operators[graph.forward_count :]:
        for t in {t for implementation in operator.implementations for t in implementation.inputs}:
            if graph.writer[t] >= graph.forward_count and not graph.tensors[t].kept:
                found[t] = operator.id
    return found


def _is_expanded(value: torch.Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True))


def _then(own: Requests, nbytes: int) -> Requests:
    """``own``, and ``nbytes`` that are requested after it, and freed."""
    if not own.results or not nbytes:
        return own
    return Requests((*own.sizes, nbytes, -1 - sum(n > 0 for n in own.sizes)), own.results)
