"""What the plain step does for the script's checkpoint regions (``torch.utils.checkpoint``), by the rules of eager.

Of a region the forward keeps the arguments alone. The first backward operator that needs something saved in it runs it
again: up to the last tensor that is saved there, or as a whole. A region within another is run by the outer one's
second run too, which keeps the inner one's arguments, and then by its own. A policy's tensors are kept from the first
run until the second one has come to them. What a second run and the backward of a region hold besides their operands
is in ``held``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property

from monetrun.core.graph import Graph, Operator, Tensor

# What saves a generator's state for each draw that may run again; eager has one for each region.
_DRAWS_STATE = "monet.generator_state.default"


def second_runs(graph: Graph) -> dict[int, list[int]]:
    """By backward operator: the forward operators that run again right before it, in order."""
    return _Regions(graph).second_runs() if graph.regions else {}


def with_held_tensors(graph: Graph) -> Graph:
    """``graph`` with what eager holds besides as further operands, for replays of the plain step.

    That is what ``Operator.plain_holds`` says, and what is held for checkpoint regions.
    """
    if not graph.regions and not any(op.plain_holds for op in graph.operators):
        return graph
    regions = _Regions(graph)
    held, states = regions.held(), regions.states()
    for op in graph.operators:
        if op.plain_holds:
            held.setdefault(op.id, set()).update(op.plain_holds)

    tensors = list(graph.tensors)
    for op in graph.operators:
        if op.target == _DRAWS_STATE:
            tensors[op.outputs[0]] = dataclasses.replace(tensors[op.outputs[0]], nbytes=0)
    first = len(tensors)
    kept = tuple(Tensor(first + i, nbytes, name="generator state") for i, (_, _, nbytes) in enumerate(states))

    def holding(op: Operator) -> Operator:
        default, *others = op.implementations
        read = (first + i for i, (_, last, _) in enumerate(states) if last == op.id)
        written = (first + i for i, (writer, _, _) in enumerate(states) if writer == op.id)
        default = dataclasses.replace(default, inputs=tuple(sorted({*default.inputs, *held.get(op.id, ()), *read})))
        return dataclasses.replace(op, outputs=(*op.outputs, *written), implementations=(default, *others))

    return dataclasses.replace(graph, tensors=(*tensors, *kept), operators=tuple(map(holding, graph.operators)))


class _Regions:
    """The checkpoint regions of one graph; those within a region count as part of it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        cut = graph.forward_count
        self.forward = self._by_region(op for op in graph.operators[:cut] if op.plain)
        self.backward = self._by_region(op for op in graph.operators[cut:] if op.plain)
        self.children: dict[int, list[int]] = {r: [] for r in range(len(graph.regions))}
        for r, region in enumerate(graph.regions):
            if region.parent is not None:
                self.children[region.parent].append(r)

    def _by_region(self, operators: Iterable[Operator]) -> list[list[Operator]]:
        found: list[list[Operator]] = [[] for _ in self.graph.regions]
        for op in operators:
            for r in self._around(op.checkpoint):
                found[r].append(op)
        return found

    def _around(self, region: int | None) -> list[int]:
        """The region and those around it, the outermost first."""
        found: list[int] = []
        while region is not None:
            found.insert(0, region)
            region = self.graph.regions[region].parent
        return found

    @cached_property
    def _saved(self) -> frozenset[int]:
        """What a backward may read of the forward: the forward's operands and results."""
        forward = [op for op in self.graph.operators[: self.graph.forward_count] if op.plain]
        return frozenset(t for op in forward for t in (*op.inputs, *op.outputs))

    def _reads_saved(self, op: Operator) -> bool:
        return not self._saved.isdisjoint(op.inputs)

    def _arguments(self, r: int) -> set[int]:
        read = {t for op in self.forward[r] for t in op.inputs}
        return read.difference(t for op in self.forward[r] for t in op.outputs)

    def _results(self, r: int) -> set[int]:
        """What the rest of the forward reads of a region."""
        inside = {op.id for op in self.forward[r]}
        others = (op for op in self.graph.operators[: self.graph.forward_count] if op.plain and op.id not in inside)
        read = {t for op in others for t in op.inputs}
        return read.intersection(t for op in self.forward[r] for t in op.outputs)

    def _second_run(self, r: int) -> list[Operator]:
        """The operators that a region's second run runs."""
        operators, region = self.forward[r], self.graph.regions[r]
        if region.early_stop and not region.reentrant:
            needed = {t for op in self.backward[r] if op.checkpoint == r for t in op.inputs}
            needed.update(t for child in self.children[r] for t in self._arguments(child))
            last = max((i for i, op in enumerate(operators) if not needed.isdisjoint(op.outputs)), default=-1)
            operators = operators[: last + 1]
        return [op for op in operators if op.replayable and not op.checkpoint_keeps]

    def second_runs(self) -> dict[int, list[int]]:
        """By backward operator: the forward operators that run again right before it, in order."""
        before: dict[int, list[int]] = {}
        seen: set[int] = set()
        for op in self.graph.operators[self.graph.forward_count :]:
            around = self._around(op.checkpoint) if op.plain else []
            if not self._reads_saved(op):  # only reentrant regions run again for it, and what is around them
                reentrant = [i for i, r in enumerate(around) if self.graph.regions[r].reentrant]
                around = around[: reentrant[-1] + 1] if reentrant else []
            for r in around:
                if r not in seen:
                    before.setdefault(op.id, []).extend(again.id for again in self._second_run(r))
                    seen.add(r)
        return before

    def held(self) -> dict[int, set[int]]:
        """By operator: tensors that the plain step does not free before it, beside its operands."""
        found: dict[int, set[int]] = {}
        overwritten = {i.in_place_of for op in self.graph.operators for i in op.implementations[:1]}
        for r, region in enumerate(self.graph.regions):
            backward = self.backward[r]
            reading = [op for op in backward if self._reads_saved(op)]
            if not reading:
                continue
            if region.reentrant:  # a backward within the backward, whose caller has all that goes in and out
                last, held = backward[-1], self._arguments(r) | self._results(r) | self._gradients_into(r)
            else:  # what is saved for the region knows its arguments; an outer region hands them over at once
                last, held = reading[-1], self._arguments(r) if region.parent is None else set()
            found.setdefault(last.id, set()).update(held - overwritten)
            again = self._second_run(r)
            for op in self.forward[r]:
                if op.checkpoint == r and op.checkpoint_keeps:
                    until = next((later for later in again if later.id > op.id), last)
                    found.setdefault(until.id, set()).update(set(op.outputs) - overwritten)
        return {i: tensors for i, tensors in found.items() if tensors}

    def states(self) -> list[tuple[int, int, int]]:
        """Of each generator's state that is kept: an operator before which it is saved, the last that needs it, bytes.

        The first is one that does not run again: its results are written once.
        """
        again = {i for operators in self.second_runs().values() for i in operators}
        once = [op.id for op in self.graph.operators[: self.graph.forward_count] if op.plain and op.id not in again]
        found = []
        for r, region in enumerate(self.graph.regions):
            reading = [op.id for op in self.backward[r] if self._reads_saved(op)]
            within = any(self.graph.regions[o].reentrant for o in self._around(region.parent))
            if region.state_bytes and reading and once and not within:  # a reentrant one saves nothing in the forward
                before = [i for i in once if i < self.forward[r][0].id]
                last = self.graph.operators[-1].id if region.reentrant else reading[-1]  # with its node of autograd
                found.append((before[-1] if before else once[0], last, region.state_bytes))
        return found

    def _gradients_into(self, r: int) -> set[int]:
        """The gradients of a region's results."""
        first = self.backward[r][0].id
        operators = self.graph.operators
        made = {t for op in operators[self.graph.forward_count : first] for t in op.outputs}
        external = {t.id for t in self.graph.tensors if t.external} - self._saved
        return (made | external).intersection(t for op in self.backward[r] for t in op.inputs)
