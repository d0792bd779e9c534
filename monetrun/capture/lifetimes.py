"""When the tensors that graphs are given, and give, are gone: seen on the storages of the trial run.

An activation that passes from graph to graph, a tangent, an output is held by the script, by autograd, and by what the
graphs save. What a graph's backward lets go of is not the script's to free (``Event.released``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from monetrun.capture.joint import JointGraph

_NOT_YET = -1


class _Call:
    """One call of a graph.

    Attributes:
        joint: the graph.
        backward: index of the stretch that is its backward.
        alive: the storages of its tensors (ids in ``joint.graph``) that are not gone.
        ended: the index of the stretch with which a tensor was gone.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.backward = _NOT_YET
        self.alive: dict[int, StorageWeakRef] = {}
        self.ended: dict[int, int] = {}

    def external(self, t: int) -> bool:
        return self.joint.graph.tensors[t].external

    def watch(self, nodes: Iterable[Any], values: Iterable[Any], others: frozenset[int] = frozenset()) -> None:
        """Watch the storages of ``values``, but not parameters and buffers, nor storages among ``others``."""
        for node, value in zip(nodes, values, strict=True):
            t = self.joint.storage.get(node) if isinstance(node, fx.Node) else None
            if t is None or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                continue
            if t in self.joint.transient if self.external(t) else self.joint.graph.tensors[t].kept:
                storage = StorageWeakRef(value.untyped_storage())
                if storage.cdata not in others:
                    self.alive.setdefault(t, storage)


class Lifetimes:
    """Of all calls of a step."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def forward_begins(self, joint: JointGraph, arguments: Sequence[Any]) -> None:
        """A forward was given ``arguments``. What another graph gave is that one's: its backward comes later."""
        given = frozenset(
            storage.cdata for call in self._calls for t, storage in call.alive.items() if not call.external(t)
        )
        self._calls.append(_Call(joint))
        self._calls[-1].watch(joint.primals, arguments, given)

    def forward_ended(self, results: Sequence[Any]) -> None:
        """It gave ``results``: its outputs, and what it saves."""
        call = self._calls[-1]
        call.watch(call.joint.outputs, results[: len(call.joint.outputs)])

    def backward_begins(self, joint: JointGraph, stretch: int, arguments: Sequence[Any]) -> None:
        """The backward of the latest forward that has had none, in stretch ``stretch``; last come the tangents."""
        for call in reversed(self._calls):
            if call.joint is joint and call.backward == _NOT_YET:
                call.backward = stretch
                tangents = joint.tangents
                call.watch(tangents, arguments[len(arguments) - len(tangents) :])
                return

    def look(self, stretch: int) -> None:
        """``stretch`` has ended: note what is gone with it."""
        for call in self._calls:
            for t in [t for t, storage in call.alive.items() if storage.expired()]:
                call.ended[t] = stretch
                del call.alive[t]

    def released(self, stretch: int) -> tuple[int, ...]:
        """What the backward that is ``stretch`` lets go of; its graph's own outputs too.

        An output that nothing holds before that may be saved under another schedule: it is said to be gone here.
        """
        return tuple(
            sorted(
                t
                for call in self._calls
                if call.backward == stretch
                for t, at in call.ended.items()
                if at == stretch or (at < stretch and not call.external(t))
            )
        )

    def absent_bytes(self, stretch: int) -> int:
        """Bytes of outputs that are gone with ``stretch`` or before, and are said to be gone with a later backward."""
        return sum(
            call.joint.graph.tensors[t].nbytes
            for call in self._calls
            for t, at in call.ended.items()
            if at <= stretch < call.backward and not call.external(t)
        )
