"""What is allocated for a while beside operators of a recorded step, and is not in their costs."""

from __future__ import annotations

from collections import Counter
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
from monetrun.core.graph import BACKWARD, Costs, Requests


class BesideOperators:
    """Of one recorded step."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[int, int]] = Counter()  # by graph and operator
        self._given: dict[int, dict[fx.Node, tuple[int, ...] | None]] = {}  # by graph: see ``arriving_strides.of``

    def add(self, graph: int, operator: int, nbytes: int) -> None:
        """So much is allocated while this operator's results are given."""
        self._bytes[graph, operator] = max(self._bytes[graph, operator], nbytes)

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
                self.add(graph, operator.id, sum(joint.graph.tensors[t].nbytes for t in read))

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
        bytes_of = [self._bytes[graph, o] for o in range(len(costs.workspace_bytes))]
        if not any(bytes_of):
            return costs
        workspace = (tuple(max(w, n) for w in of) for of, n in zip(costs.workspace_bytes, bytes_of, strict=True))
        requests = (tuple(_then(r, n) for r in of) for of, n in zip(costs.requests, bytes_of, strict=False))
        return replace(costs, workspace_bytes=tuple(workspace), requests=tuple(requests))


def _is_expanded(value: torch.Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True))


def _then(own: Requests, nbytes: int) -> Requests:
    """``own``, and ``nbytes`` that are requested after it, and freed."""
    if not own.results or not nbytes:
        return own
    return Requests((*own.sizes, nbytes, -1 - sum(n > 0 for n in own.sizes)), own.results)
