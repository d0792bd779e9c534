"""The joint forward and backward graph of a model, and what its operators cost.

Torch is not imported here: a graph is made of frozen dataclasses of ints and strings, and has a JSON form (``codec``).
A ``Tensor`` is one *storage*: views of it are not in the graph, since they have no memory of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from monetrun.core import codec

FORWARD = "forward"
BACKWARD = "backward"

# Kinds of implementations beside the default: those of the paper (section 4), and ``fused``, which it does not have.
KINDS = ("in-place", "conv", "output", "intermediate", "layout", "fused")
MOST_BYTES = 1 << 53  # 8 PiB: more than any device has, and a float represents every integer below
_MOST_SECONDS = 1e6
# Among kinds, or alone: only implementations that are bitwise identical to the default.
EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One storage.

    Attributes:
        id: its index in ``Graph.tensors``.
        nbytes: bytes allocated for it.
        external: it exists before the graph runs (parameters, the batch, tangents, constants). It is always alive, and
            its bytes are not counted in the graph: they are part of what the step has allocated before.
        kept: it stays from its first write to the end (the model's outputs, the gradients).
        name: for messages.
    """

    id: int
    nbytes: int
    external: bool = False
    kept: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an operator.

    Attributes:
        name: ``"default"`` is the kernel that eager launches; others, ``"KIND"`` or ``"KIND:which"``, are declared in
            ``monetrun.ops``.
        inputs: ids of the tensors that it reads (a ReLU's backward may read the ReLU's input or its output).
        in_place_of: id of the input whose storage the first output takes over, or None. Legal only in a step
            after which that input is not read again before it is next written; never an external or kept one.
        exact: whether its result is bitwise identical to the default's.
        usable: False where its guard failed for the current weights. Not part of a fingerprint: weights change.
    """

    name: str
    inputs: tuple[int, ...]
    in_place_of: int | None = None
    exact: bool = True
    usable: bool = True

    @property
    def kind(self) -> str:
        """The kind by which ``--implementations`` allows it, one of ``KINDS``; ``"default"`` for the default."""
        return self.name.partition(":")[0]

    def allowed_by(self, kinds: tuple[str, ...] | None) -> bool:
        """Whether it is usable and of one of the kinds allowed beside the default (None: all)."""
        if not self.usable:
            return False
        if kinds is None or self.name == "default":
            return True
        if EXACT in kinds:
            kinds = tuple(kind for kind in kinds if kind != EXACT) or KINDS
            if not self.exact:
                return False
        return self.kind in kinds and (self.in_place_of is None or "in-place" in kinds)


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator.

    Attributes:
        id: its index in ``Graph.operators``, which is also the order in which the plain step runs them.
        name: for messages (``"layer1.0.conv1"``, or the graph node's name).
        target: what it calls (``"aten.convolution.default"``).
        phase: ``"forward"`` or ``"backward"``. All forward operators come before all backward ones.
        outputs: ids of the tensors it writes. Every non-external tensor has exactly one writer.
        implementations: at least one; the first is the default.
        replayable: it may run again in the backward pass: it mutates nothing, and draws no random numbers, or reads a
            state that repeats those of its first run.
        reads_changed: it is not replayable only because the script changes an input of it before the backward.
        optional: a schedule may leave it out of its pass if nothing reads its outputs before they are next written.
        plain: the plain step runs it. False if only other implementations read its outputs (a ReLU's bit mask).
        signature: hash of target, shapes, dtypes, layouts and constants: operators of one signature cost the same.
        checkpoint: number of the innermost of the script's checkpoint regions (``torch.utils.checkpoint``) that it is
            in, or None; of a backward operator that of the forward call whose derivative it is. The plain step drops
            what a region computes, and computes it again in the backward pass.
        checkpoint_keeps: not its outputs: the region's policy keeps them.
        one_call_with_next: eager runs it and the next operator as one call, which has the results of both throughout.
        plain_holds: with it a node of autograd's graph ends, which till then holds these tensors: operands of its
            earlier operators. Only the plain step does.
    """

    id: int
    name: str
    target: str
    phase: str
    outputs: tuple[int, ...]
    implementations: tuple[Implementation, ...]
    replayable: bool = True
    optional: bool = False
    plain: bool = True
    signature: str = ""
    checkpoint: int | None = None
    checkpoint_keeps: bool = False
    one_call_with_next: bool = False
    reads_changed: bool = False
    plain_holds: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """Ids of the tensors that the default implementation reads."""
        return self.implementations[0].inputs


@dataclass(frozen=True, slots=True)
class Region:
    """A checkpoint region of the script.

    Attributes:
        parent: number of the region that it is in, or None.
        reentrant: its second run is a whole one, and its backward runs within that of the rest.
        early_stop: its second run ends with the last tensor that is saved in it.
        state_bytes: of the random number generator's state, which is kept from one run to the other.
    """

    parent: int | None = None
    reentrant: bool = False
    early_stop: bool = True
    state_bytes: int = 0


@dataclass(frozen=True)
class Graph:
    """A joint graph in the order in which the plain step runs it."""

    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    regions: tuple[Region, ...] = ()

    @cached_property
    def forward_count(self) -> int:
        """How many operators, from the first, are forward ones."""
        return sum(op.phase == FORWARD for op in self.operators)

    @cached_property
    def writer(self) -> tuple[int, ...]:
        """For each tensor the operator that writes it, -1 for an external one."""
        writer = [-1] * len(self.tensors)
        for op in self.operators:
            for t in op.outputs:
                writer[t] = op.id
        return tuple(writer)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of structure, shapes, dtypes, layouts, and each operator's implementations in order.

        Two graphs of one fingerprint agree on what an implementation's index means. Left out are the names of tensors
        and operators, and what is known after capture: ``usable``, ``exact``, ``reads_changed``.
        """
        return _digest(
            [
                [(t.nbytes, t.external, t.kept) for t in self.tensors],
                [
                    (_structure(op), op.signature, [(i.name, i.inputs, i.in_place_of) for i in op.implementations])
                    for op in self.operators
                ],
            ]
        )

    @cached_property
    def structural_fingerprint(self) -> str:
        """Hash of the structure alone: the same model at another batch size or length has the same one.

        Implementations beside the default are left out: a library offers its algorithms by size, and whether an
        operator can run in place depends on which inputs are broadcast.
        """
        return _digest([[(t.external, t.kept) for t in self.tensors], [_structure(op) for op in self.operators]])


def _structure(op: Operator) -> tuple[object, ...]:
    """What ``op`` calls, reads and writes, whatever the shapes."""
    return (op.target, op.phase, op.inputs, op.outputs, op.replayable or op.reads_changed, op.optional)


def _digest(value: object) -> str:
    return hashlib.sha256(codec.dumps(value).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Requests:
    """What one call of an operator asks a caching allocator for.

    Attributes:
        sizes: bytes requested, in order; ``-n`` frees what the n-th request of the call gave (the first is 1).
        results: the numbers of the requests that gave the outputs, but for one that is written in place, in the order
            of the outputs. Empty where they are not known: outputs then come in their order, before the workspace.
    """

    sizes: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: something is freed, or given, that was never requested.
        """
        made, freed = 0, set[int]()
        for n in self.sizes:
            made += n > 0
            if n < 0 and (-n > made or -n in freed):
                raise ValueError(f"{n} in {self.sizes}: not a request that is there")
            freed.update([-n] if n < 0 else [])
        if not set(self.results) <= set(range(1, made + 1)) - freed:
            raise ValueError(f"results {self.results} are not among the requests {self.sizes}")


@dataclass(frozen=True)
class Costs:
    """What each implementation of each operator costs on one device.

    Attributes:
        device: where they were measured, or the name of the cost model that computed them.
        seconds: ``seconds[operator][implementation]``.
        workspace_bytes: bytes allocated and freed inside the operator, beside its outputs; same indices.
        requests: what a call asks a caching allocator for; same indices, or empty where no operator's are known.
    """

    device: str
    seconds: tuple[tuple[float, ...], ...]
    workspace_bytes: tuple[tuple[int, ...], ...]
    requests: tuple[tuple[Requests, ...], ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all values."""
        return _digest([self.device, self.seconds, self.workspace_bytes, self.requests])


def extra_share(operator: Operator, seconds: Sequence[float], implementation: int, *, again: bool) -> float:
    """The share of a run's time that the plain step does not take: all of it, or what is beyond the default's seconds.

    An implementation that is faster than the default alone may not be so in a step: nothing is counted for it.

    Args:
        operator: that runs.
        seconds: of its implementations; empty: they are not known.
        implementation: with which it runs.
        again: it has run, and does not run again in the plain step.
    """
    if again or not operator.plain:
        return 1.0
    own = seconds[implementation] if seconds else 0.0
    return max(0.0, 1 - seconds[0] / own) if own else 0.0


def check(graph: Graph, costs: Costs | None = None) -> None:
    """Check graphs read from files or made by tests.

    Raises:
        ValueError: the graph, or its costs, contradict the documentation of their fields.
    """
    parents = [region.parent for region in graph.regions]
    if not {op.checkpoint for op in graph.operators} <= {None, *range(len(parents))}:
        raise ValueError("an operator is in a region that does not exist")
    if any(parent is not None and not 0 <= parent < i for i, parent in enumerate(parents)):
        raise ValueError("a region is in one that comes after it")
    writer: dict[int, int] = {}
    phases = [op.phase for op in graph.operators]
    if phases != sorted(phases, key=(FORWARD, BACKWARD).index):
        raise ValueError("a forward operator comes after a backward one")
    for i, t in enumerate(graph.tensors):
        if t.id != i or t.nbytes < 0:
            raise ValueError(f"tensor {i}: id {t.id}, {t.nbytes} bytes")
    check_bytes(tensors=sum(t.nbytes for t in graph.tensors))
    for i, op in enumerate(graph.operators):
        if op.id != i or not op.implementations:
            raise ValueError(f"operator {i}: id {op.id}, {len(op.implementations)} implementations")
        for impl in op.implementations:
            for read in impl.inputs:
                if not 0 <= read < len(graph.tensors):
                    raise ValueError(f"operator {i} reads tensor {read}, which does not exist")
                if not graph.tensors[read].external and read not in writer:
                    raise ValueError(f"operator {i} reads tensor {read} before it is written")
            if impl.in_place_of is not None and (impl.in_place_of not in impl.inputs or not op.outputs):
                raise ValueError(f"operator {i} is in place of tensor {impl.in_place_of}, which it does not read")
        for written in op.outputs:
            if not 0 <= written < len(graph.tensors):
                raise ValueError(f"operator {i} writes tensor {written}, which does not exist")
            if written in writer or graph.tensors[written].external:
                raise ValueError(f"tensor {written} is written by operator {i} and by another, or is external")
            writer[written] = i
    for t in graph.tensors:
        if not t.external and t.id not in writer:
            raise ValueError(f"tensor {t.id} is never written")
    plain = {t for op in graph.operators if op.plain for t in op.outputs}
    for op in graph.operators:
        if op.plain and op.optional and any(graph.tensors[t].kept for t in op.outputs):
            raise ValueError(f"operator {op.id} writes what is kept, and is optional")
        if not (op.plain or op.optional):
            raise ValueError(f"operator {op.id} is not in the plain step, but must run")
        for read in op.inputs if op.plain else ():
            if not (graph.tensors[read].external or read in plain):
                raise ValueError(f"operator {op.id} of the plain step reads tensor {read}, which that does not write")
    if costs is not None:
        for table in (costs.seconds, costs.workspace_bytes, costs.requests or costs.seconds):
            if [len(row) for row in table] != [len(op.implementations) for op in graph.operators]:
                raise ValueError("costs and graph have different operators or implementations")
        for seconds, spaces in zip(costs.seconds, costs.workspace_bytes, strict=True):
            for each, space in zip(seconds, spaces, strict=True):
                check_cost(each, space)
        for op, row in zip(graph.operators, costs.requests, strict=False):
            for impl, requests in zip(op.implementations, row, strict=True):
                if len(requests.results) not in (0, len(op.outputs) - (impl.in_place_of is not None)):
                    raise ValueError(f"operator {op.id} asks for other results than its outputs")


def check_cost(seconds: float, workspace_bytes: int) -> None:
    """Check the cost of one implementation, read from a file.

    Raises:
        ValueError: it is negative, not finite, or more than any operator takes.
    """
    if not 0.0 <= seconds <= _MOST_SECONDS:
        raise ValueError(f"an operator that takes {seconds} seconds")
    if not 0 <= workspace_bytes <= MOST_BYTES:
        raise ValueError(f"a workspace of {workspace_bytes} bytes")


def check_bytes(**amounts: int) -> None:
    """Check amounts of memory, given by name, that were read from a file.

    Raises:
        ValueError: one is negative, or more than any device has.
    """
    for name, nbytes in amounts.items():
        if not 0 <= nbytes <= MOST_BYTES:
            raise ValueError(f"{name.replace('_', ' ')}: {nbytes} bytes, where 0 to {MOST_BYTES} are possible")


def counterpart(op: Operator, k: int) -> int:
    """The implementation of which k is the in-place variant: it reads the same, with k's name if there is one.

    Returns k itself if k is not in place, or if no other implementation reads the same.
    """
    chosen = op.implementations[k]
    if chosen.in_place_of is None:
        return k
    reads = set(chosen.inputs)
    alike = [j for j, o in enumerate(op.implementations) if o.in_place_of is None and set(o.inputs) == reads]
    return min(alike, key=lambda j: op.implementations[j].name != chosen.name, default=k)


def replace(graph: Graph, **changes: object) -> Graph:
    """A copy of ``graph`` with some fields changed."""
    return dataclasses.replace(graph, **changes)  # type: ignore[arg-type]
