"""When the inputs and outputs of graphs are freed: observed on their storages while a step is recorded.

The script, autograd, and the graphs' saved values hold activations that pass from graph to graph, tangents, and
outputs. Those that only a graph's saved values hold are freed in its backward (``Event.released``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from monetrun.capture.joint import JointGraph
from monetrun.core.graph import BACKWARD

_NOT_YET = -1


class _Call:
    """One call of a graph.

    Attributes:
        joint: the graph.
        number: how many calls came before.
        forward: index of the stretch that is its forward.
        backward: of the one that is its backward.
        alive: the storages of its tensors (ids in ``joint.graph``) that are not freed yet.
        inputs: those of inputs, freed or not.
        ended: the index of the stretch by whose end a tensor was freed. Inputs that the forward freed: of the next one.
        read_as: inputs of later calls that an output is.
    """

    def __init__(self, joint: JointGraph, number: int, forward: int) -> None:
        self.joint = joint
        self.number = number
        self.forward = forward
        self.backward = _NOT_YET
        self.alive: dict[int, StorageWeakRef] = {}
        self.inputs: dict[int, StorageWeakRef] = {}
        self.versions: list[tuple[int, torch.Tensor, int]] = []  # of inputs and outputs
        self.written: list[tuple[int, StorageWeakRef, int]] = []  # parameters and buffers, and how often they were
        self.ended: dict[int, int] = {}
        self.read_as: dict[int, list[tuple[JointGraph, int]]] = {}

    def external(self, t: int) -> bool:
        return self.joint.graph.tensors[t].external

    def waits_at(self, stretch: int) -> bool:
        """Whether its backward comes after ``stretch``, or never."""
        return self.backward == _NOT_YET or stretch < self.backward

    def is_gradient(self, t: int) -> bool:
        graph = self.joint.graph
        return not self.external(t) and graph.operators[graph.writer[t]].phase == BACKWARD

    def is_output(self, t: int) -> bool:
        return not self.external(t) and not self.is_gradient(t)

    def watch(self, nodes: Iterable[Any], values: Iterable[Any], others: Collection[int] = ()) -> list[tuple[int, int]]:
        """Watch the storages of ``values``, except parameters, buffers, and the storages in ``others``.

        Returns:
            The values that are in ``others``: their storage, and which of the graph's tensors they are.
        """
        found = []
        for node, value in zip(nodes, values, strict=True):
            t = self.joint.storage.get(node) if isinstance(node, fx.Node) else None
            if t is None or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                continue
            if t in self.joint.transient if self.external(t) else self.joint.graph.tensors[t].kept:
                storage = StorageWeakRef(value.untyped_storage())
                if storage.cdata in others:
                    found.append((storage.cdata, t))
                    continue
                self.alive.setdefault(t, storage)
                if self.external(t):
                    self.inputs.setdefault(t, storage)
        return found

    def note_versions(self, nodes: Iterable[Any], values: Iterable[Any]) -> None:
        """Note the versions that inputs or outputs have now, but no weights that the graph itself writes."""
        for node, value in zip(nodes, values, strict=True):
            t = self.joint.storage.get(node) if isinstance(node, fx.Node) else None
            if t is None or not isinstance(value, torch.Tensor) or value.is_inference():
                continue
            watched = t not in self.joint.mutated if self.external(t) else self.joint.graph.tensors[t].kept
            if watched or t in self.joint.transient:
                self.versions.append((t, _counter(value), value._version))

    def note_weights(self, values: Iterable[Any], writes: Counter[int]) -> None:
        """Count its own writes of parameters and buffers in ``writes``, by storage; note what others' are so far.

        Those of running statistics count as no new version (``buffer_versions``).
        """
        for node, value in zip(self.joint.primals, values, strict=True):
            t = self.joint.storage.get(node)
            if t is None or t in self.joint.transient or not isinstance(value, torch.Tensor):
                continue
            storage = StorageWeakRef(value.untyped_storage())
            if t in self.joint.mutated:
                writes[storage.cdata] += 1
            else:
                self.written.append((t, storage, writes[storage.cdata]))

    def changed(self, writes: Counter[int]) -> set[int]:
        """What was noted and has other versions, or was written by other calls, now."""
        found = {t for t, counter, version in self.versions if counter._version != version}
        return found | {t for t, storage, before in self.written if writes[storage.cdata] != before}


class GivenFirst:
    """What the first call of a step is given.

    Args:
        values: of them its tensors count.

    Attributes:
        freed_bytes: of what was freed by the last ``look``.
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        tensors = (v for v in values if isinstance(v, torch.Tensor) and v.layout == torch.strided)
        storages = {(storage := v.untyped_storage())._cdata: storage for v in tensors}
        self._storages = [(StorageWeakRef(storage), storage.nbytes()) for storage in storages.values()]

        self.freed_bytes = 0

    def look(self) -> None:
        """An optimizer has made its step."""
        self.freed_bytes = sum(nbytes for storage, nbytes in self._storages if storage.expired())


class Lifetimes:
    """The lifetimes of the inputs and outputs of all calls of a step.

    Args:
        first_inputs_only: the script's dropping of inputs between forward and backward is told of the first call only:
            the others' are known by what the allocator is asked for.
    """

    def __init__(self, first_inputs_only: bool = False) -> None:
        self._first_inputs_only = first_inputs_only
        self._calls: list[_Call] = []
        self._saved: list[StorageWeakRef] = []  # what forwards save for their backwards, inputs and outputs aside
        self._alive: dict[int, _Call] = {}  # by number: the calls some of whose tensors are not freed
        self._outputs: dict[int, tuple[_Call, int]] = {}  # of graphs, not freed: whose, by storage
        self._with_input: dict[int, dict[int, _Call]] = {}  # the calls that an input was given to, by its storage
        self._latest: dict[int, _Call] = {}  # of them the one whose backward is the last so far
        self._with_backward: dict[int, list[_Call]] = {}  # by stretch
        self._ended: dict[int, list[tuple[_Call, int]]] = {}  # tensors that were freed in a stretch
        self._given: set[int] = set()  # storages of the latest forward's arguments, which live as long as it
        self._script: set[int] = set()  # stretches between calls
        self._changed: dict[int, set[int]] = {}  # by the id of the joint graph
        self._writes: Counter[int] = Counter()  # of parameters and buffers by graphs, by storage

    def forward_begins(self, joint: JointGraph, stretch: int, arguments: Sequence[Any]) -> None:
        """A forward begins, in stretch ``stretch``.

        Arguments that are another graph's outputs count as that one's: its backward is later.
        """
        call = _Call(joint, len(self._calls), stretch)
        self._calls.append(call)
        for storage, t in self._watch(call, joint.primals, arguments, self._outputs):
            owner, output = self._outputs[storage]
            owner.read_as.setdefault(output, []).append((joint, t))
        self._given = {v.untyped_storage()._cdata for v in arguments if type(v) in (torch.Tensor, torch.nn.Parameter)}
        call.note_versions(joint.primals, arguments)
        call.note_weights(arguments, self._writes)

    def _watch(
        self, call: _Call, nodes: Iterable[Any], values: Iterable[Any], others: Collection[int] = ()
    ) -> list[tuple[int, int]]:
        """As ``call.watch``; what is watched is found by its storage from then on."""
        known = set(call.alive), set(call.inputs)
        found = call.watch(nodes, values, others)
        for t in call.alive.keys() - known[0]:
            storage = call.alive[t].cdata
            if not call.external(t) and (
                storage not in self._outputs or self._outputs[storage][0].number <= call.number
            ):
                self._outputs[storage] = call, t
        for t in call.inputs.keys() - known[1]:
            self._with_input.setdefault(call.inputs[t].cdata, {})[call.number] = call
            self._latest.pop(call.inputs[t].cdata, None)
        if call.alive:
            self._alive[call.number] = call
        return found

    def forward_ended(self, results: Sequence[Any]) -> None:
        """It has ended with ``results``: its outputs, then its saved values."""
        call = self._calls[-1]
        outputs = results[: len(call.joint.outputs)]
        self._watch(call, call.joint.outputs, outputs)
        call.note_versions(call.joint.outputs, outputs)
        there = self._given | {storage.cdata for storage in call.alive.values()}
        saved = (r.untyped_storage() for r in results[len(outputs) :] if type(r) is torch.Tensor)
        self._saved += [StorageWeakRef(storage) for storage in saved if storage._cdata not in there]

    def forgotten(self) -> bool:
        """Whether forwards have run, and the script has let go of all they gave: no backward will come."""
        outputs = (s for call in self._alive.values() for t, s in call.alive.items() if call.is_output(t))
        return bool(self._saved) and all(storage.expired() for storage in (*self._saved, *outputs))

    def backward_begins(self, joint: JointGraph, stretch: int, arguments: Sequence[Any]) -> None:
        """A backward begins, in stretch ``stretch``: that of the latest forward without one. Tangents come last."""
        for call in reversed(self._calls):
            if call.joint is joint and call.backward == _NOT_YET:
                call.backward = stretch
                self._latest.clear()
                self._with_backward.setdefault(stretch, []).append(call)
                self._changed.setdefault(id(joint), set()).update(call.changed(self._writes))
                tangents = joint.tangents
                given = arguments[len(arguments) - len(tangents) :]
                large = [v if _is_as_large(joint, n, v) else None for n, v in zip(tangents, given, strict=True)]
                self._watch(call, tangents, large)
                return

    def gradients_given(self, joint: JointGraph, stretch: int, nodes: Iterable[Any], gradients: Iterable[Any]) -> None:
        """The backward that is stretch ``stretch`` is about to give ``gradients``."""
        call = next((c for c in self._with_backward.get(stretch, ()) if c.joint is joint), None)
        if call is not None:
            self._watch(call, nodes, gradients)

    def look(self, stretch: int, of_script: bool) -> None:
        """``stretch``, of the script or of a graph, has ended: note the tensors that are freed by now."""
        if of_script:
            self._script.add(stretch)
        for call in list(self._alive.values()):
            for t in [t for t, storage in call.alive.items() if storage.expired()]:
                at = call.ended[t] = stretch + (stretch == call.forward and call.external(t))
                self._ended.setdefault(at, []).append((call, t))
                storage = call.alive.pop(t).cdata
                if self._outputs.get(storage) == (call, t):
                    del self._outputs[storage]
            if not call.alive:
                del self._alive[call.number]

    def released(self, stretch: int) -> tuple[int, ...]:
        """Tensors freed in the backward ``stretch``: inputs, tangents, gradients, and the graph's own outputs.

        Outputs freed before it, and inputs that the script dropped after the forward, are included, since another
        schedule may save them until then. Gradients come last, in the order in which they were given.
        """
        freed = [
            (call, t)
            for call in self._with_backward.get(stretch, ())
            for t, at in call.ended.items()
            if at == stretch or (at < stretch and self._may_be_saved(call, t))
        ]
        gradients = [t for call, t in freed if call.is_gradient(t)]
        return (*sorted(t for call, t in freed if not call.is_gradient(t)), *gradients)

    def dropped(self, stretch: int) -> list[tuple[JointGraph, int, list[tuple[JointGraph, int]]]]:
        """What is freed in ``stretch`` and ``released`` reports for a later backward, or outputs without one.

        Each with the inputs of other calls that it is as well.
        """
        return [
            (call.joint, t, self._read_as(call, t))
            for call, t in sorted(self._ended.get(stretch, ()), key=lambda ended: (ended[0].number, ended[1]))
            if call.waits_at(stretch) and self._may_be_saved(call, t)
        ]

    def _read_as(self, call: _Call, t: int) -> list[tuple[JointGraph, int]]:
        if not call.external(t):
            return call.read_as.get(t, [])
        of = call.inputs[t].cdata
        others = (c for _, c in sorted(self._with_input[of].items()) if c is not call)
        return [(c.joint, i) for c in others for i, s in c.inputs.items() if s.cdata == of]

    def _may_be_saved(self, call: _Call, t: int) -> bool:
        """Whether a schedule may save ``t``, which the script dropped: an output, or an input that it held till then.

        Of calls with the same input the one counts whose backward is the last.
        """
        if not call.external(t):
            return True
        if (
            t not in call.inputs
            or not call.forward < call.ended[t] < call.backward
            or call.ended[t] not in self._script
        ):
            return False
        storage = call.inputs[t].cdata
        if storage not in self._latest:
            self._latest[storage] = max(
                self._with_input[storage].values(), key=lambda given: (given.backward, -given.number)
            )
        return self._latest[storage] is call and (call is self._calls[0] or not self._first_inputs_only)

    def not_to_read_again(self, joint: JointGraph) -> set[int]:
        """Inputs and outputs of ``joint`` that others changed, in place, between a forward and its backward.

        And inputs that were freed between the two and that ``dropped`` does not tell: what it would take to save them
        until then is not known.
        """
        told = {c.inputs[t].cdata for c in self._calls for t in c.inputs if t in c.ended and self._may_be_saved(c, t)}
        found = set(self._changed.get(id(joint), ()))
        for call in self._calls:
            if call.joint is joint:
                freed = (t for t, at in call.ended.items() if t in call.inputs and at < call.backward)
                found |= {t for t in freed if call.inputs[t].cdata not in told}
        return found

    def held(self) -> list[tuple[JointGraph, int]]:
        """Outputs that were not freed so far."""
        return [(call.joint, t) for call in self._calls for t in sorted(call.alive) if call.is_output(t)]

    def given_away(self, joint: JointGraph) -> set[fx.Node]:
        """The gradients of the graph's outputs that each of its backwards has freed."""
        calls = [call for call in self._calls if call.joint is joint and call.backward != _NOT_YET]
        ended = [{t for t, at in call.ended.items() if at == call.backward} for call in calls]
        return {n for n in joint.tangents if ended and all(joint.storage.get(n) in found for found in ended)}

    def absent_bytes(self, stretches: int) -> list[int]:
        """By the end of each stretch: bytes of what ``dropped`` told of, where the backward comes later, or never."""
        changes = [0] * (stretches + 1)
        for at, ended in self._ended.items():
            for call, t in ended:
                if at < stretches and call.waits_at(at) and self._may_be_saved(call, t):
                    nbytes = call.joint.graph.tensors[t].nbytes
                    changes[at] += nbytes
                    changes[min(call.backward, stretches) if call.backward != _NOT_YET else stretches] -= nbytes
        return list(itertools.accumulate(changes[:-1]))


def _counter(value: torch.Tensor) -> torch.Tensor:
    """An empty tensor whose ``_version`` is that of ``value``, also once that is freed: others may have its storage."""
    counter = value.detach()
    counter.data = value.new_empty(0)
    return counter


def _is_as_large(joint: JointGraph, tangent: fx.Node, value: Any) -> bool:
    """Whether a gradient takes what the graph's tensor does; one with other strides (expanded, dense) may take less."""
    t = joint.storage.get(tangent)
    if t is None or not isinstance(value, torch.Tensor):
        return False
    return value.untyped_storage().nbytes() >= joint.graph.tensors[t].nbytes
