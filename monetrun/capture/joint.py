"""From AOTAutograd's joint graph to monetrun's: which storages there are, and which operators write them.

TorchDynamo and AOTAutograd trace the model. Here their joint module is made to call what eager calls (operators kept
whole, a convolution's backward split into the input's and the weight's gradient, MONeT section 4), views are merged
into their storage, and the result is described by ``graph.Graph``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey

from monetrun.capture.guards import Guard, Guards
from monetrun.core.errors import CaptureFailed
from monetrun.core.graph import BACKWARD, FORWARD, Graph, Implementation, Operator, Tensor
from monetrun.ops import dtypes, random, registry, replay
from monetrun.ops.registry import Alternative, Call

aten = torch.ops.aten

# AOTAutograd replaces these by Python decompositions that launch other kernels than eager does (a bilinear upsampling:
# 118% of eager's peak and twice its time; dropout at p = 0.15: other bits). Without the Python entries the C++
# operator is traced, with its own derivative.
_KEPT_WHOLE = re.compile(r"aten\.(_?upsample_\w+|dropout|hardshrink|softshrink|matmul|multi\w*_margin_loss\w*)\.")
_PYTHON_ENTRIES = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def operators_kept_whole() -> Iterator[None]:
    """While tracing: operators that AOTAutograd would decompose by itself stay the single call that eager makes."""
    removed = []
    for overload in _whole_overloads():
        for key in _PYTHON_ENTRIES:
            if key in overload.py_kernels:
                removed.append((overload, key, overload.py_kernels.pop(key)))
                overload._dispatch_cache.clear()
    try:
        yield
    finally:
        for overload, key, kernel in removed:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()


def _whole_overloads() -> list[Any]:
    overloads = []
    for name in dir(aten):
        if not _KEPT_WHOLE.match(f"aten.{name}."):
            continue
        packet = getattr(aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            overloads += [getattr(packet, o) for o in packet.overloads()]
    return overloads


@dataclass(frozen=True)
class JointGraph:
    """A captured joint graph and the fx nodes behind it.

    Attributes:
        module: the fx module that AOTAutograd gave, with convolution backwards split.
        graph: what solvers see.
        nodes: for each operator its fx node: the call of its default implementation.
        calls: for each (operator, implementation) beside the default the call that it makes.
        signatures: for each operator and implementation what it costs as: a key of ``timed``.
        timed: for each signature a call to measure, and a node whose result has the form of its result.
        exactness_trials: for each signature whose exactness only a trial can show, the call and the default's.
        no_faster_than_default: the (operator, implementation) whose seconds are at least the default's.
        storage: for each fx node that holds one tensor, the id of the tensor (storage) in ``graph``.
        outputs: the forward's outputs (nodes, or constants) in AOTAutograd's order.
        gradients: the backward's outputs, likewise.
        transient: external tensors that are neither parameters nor buffers: activations given by others, tangents.
        guards: of the implementations that depend on the weights.
    """

    module: fx.GraphModule
    graph: Graph
    nodes: tuple[fx.Node, ...]
    calls: dict[tuple[int, int], Call]
    signatures: tuple[tuple[str, ...], ...]
    timed: dict[str, tuple[Call, fx.Node]]
    exactness_trials: dict[str, tuple[Call, Call]]
    no_faster_than_default: frozenset[tuple[int, int]]
    storage: dict[fx.Node, int]
    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    transient: frozenset[int]
    guards: Guards

    @property
    def primals(self) -> list[fx.Node]:
        """The forward's inputs, in order."""
        return [n for n in self.module.graph.find_nodes(op="placeholder") if not is_tangent(n)]

    @property
    def tangents(self) -> list[fx.Node]:
        """The gradients of the outputs, in order."""
        return [n for n in self.module.graph.find_nodes(op="placeholder") if is_tangent(n)]


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is the gradient of an output."""
    return "tangents" in str(node.target)


def split_convolution_backward(module: fx.GraphModule) -> None:
    """Let each convolution's backward be two operators: the input's gradient, and the weight's (and bias's)."""
    for node in list(module.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)):
        *rest, (of_input, of_weight, of_bias) = node.args
        if not (of_input and (of_weight or of_bias)):
            continue
        value = node.meta["val"]
        with module.graph.inserting_before(node):
            weight = module.graph.call_function(node.target, (*rest, [False, of_weight, of_bias]))
            into = module.graph.call_function(node.target, (*rest, [True, False, False]))
        for part, present in ((weight, (1, 2)), (into, (0,))):
            part.meta = dict(node.meta)
            part.meta["val"] = tuple(v if i in present else None for i, v in enumerate(value))
        for user in list(node.users):
            user.replace_input_with(node, into if user.args[1] == 0 else weight)
        module.graph.erase_node(node)


def capture(module: fx.GraphModule, forward_outputs: int, name: str, static_inputs: Sequence[int] = ()) -> JointGraph:
    """Describe a joint module.

    Args:
        module: AOTAutograd's joint module; convolution backwards in it are split in place.
        forward_outputs: how many of its outputs are the forward's; the others are gradients.
        name: of the model, for messages.
        static_inputs: positions of the inputs that are parameters or buffers.

    Raises:
        CaptureFailed: the module has symbolic shapes, or an operator whose outputs are not tensors.
    """
    split_convolution_backward(module)
    dtypes.correct_norms(module)
    random.note_states(module)
    alternatives = registry.alternatives(module)
    return _Reader(module, forward_outputs, name, frozenset(static_inputs), alternatives).read()


class _Reader:
    def __init__(
        self,
        module: fx.GraphModule,
        forward_outputs: int,
        name: str,
        static: frozenset[int],
        alternatives: dict[fx.Node, list[Alternative]],
    ) -> None:
        self.module = module
        self.alternatives = alternatives
        self.static = static
        self.name = name
        self.tensors: list[Tensor] = []
        self.by_storage: dict[int, int] = {}
        self.storage: dict[fx.Node, int] = {}
        self.places = {n: p for p, n in enumerate(module.graph.find_nodes(op="placeholder"))}
        self.alive: list[Any] = []  # keeps fake storages, whose addresses are the keys
        (output,) = module.graph.find_nodes(op="output")
        flat = torch.utils._pytree.arg_tree_leaves(*output.args)
        self.outputs = tuple(flat[:forward_outputs])
        self.gradients = tuple(flat[forward_outputs:])

    def read(self) -> JointGraph:
        forward, backward = self._phases()
        mutated = self._mutated_inputs()
        found: list[tuple[fx.Node, str, list[int]]] = []
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._external(node)
        for phase, nodes in ((FORWARD, forward), (BACKWARD, backward)):
            for node in nodes:
                written = self._written(node)
                if written is not None:
                    found.append((node, phase, written))
        kept = {self.storage[n] for n in (*self.outputs, *self.gradients) if n in self.storage}
        tensors = tuple(
            Tensor(t.id, t.nbytes, t.external, t.id in kept and not t.external, t.name) for t in self.tensors
        )
        operators: list[Operator] = []
        calls: dict[tuple[int, int], Call] = {}
        signatures: list[tuple[str, ...]] = []
        timed: dict[str, tuple[Call, fx.Node]] = {}
        tried: dict[str, tuple[Call, Call]] = {}
        no_faster: set[tuple[int, int]] = set()
        guards: list[Guard] = []
        readable = {t.id for t in tensors if t.external}
        for i, (node, phase, written) in enumerate(found):
            alternatives = self._legal(node, written, tensors, readable)
            operators.append(self._operator(i, node, phase, written, mutated, alternatives))
            calls.update({(i, k): a.call for k, a in enumerate(alternatives, 1)})
            guards += [
                Guard.of(a.guard, self.places, i, k, f"{operators[i].name} as {a.name}")
                for k, a in enumerate(alternatives, 1)
                if a.guard is not None
            ]
            default = Call.of(node)
            costs_as = [default, *(a.costs_as or a.call for a in alternatives)]
            signatures.append(tuple(signature(call) for call in costs_as))
            for key, call in zip(signatures[-1], costs_as, strict=True):
                timed.setdefault(key, (call, node))
            no_faster.update((i, k) for k, a in enumerate(alternatives, 1) if a.no_faster_than_default)
            pairs = zip(signatures[-1][1:], alternatives, strict=True)
            tried.update({key: (a.call, default) for key, a in pairs if a.exact is None})
            readable.update(written)
        run_nodes = tuple(node for node, _, _ in found)
        graph = Graph(self.name, tensors, self._with_needless(tensors, operators, run_nodes))
        return JointGraph(
            self.module,
            graph,
            run_nodes,
            calls,
            tuple(signatures),
            timed,
            tried,
            frozenset(no_faster),
            self.storage,
            self.outputs,
            self.gradients,
            self._transient(),
            Guards(graph, guards),
        )

    def _legal(
        self, node: fx.Node, written: list[int], tensors: tuple[Tensor, ...], readable: set[int]
    ) -> list[Alternative]:
        """The alternatives that read what is there by then, overwrite what is neither external nor kept, and whose
        guards can be asked at any time: of parameters and buffers alone.
        """
        legal = []
        for alternative in self.alternatives.get(node, ()):
            if not self._reads(alternative.call) <= readable:
                continue
            if alternative.guard is not None and not all(self._static(n) for n in alternative.guard.nodes):
                continue
            if alternative.overwrites is not None:
                target = tensors[self.storage[alternative.overwrites]]
                fits = bool(written) and target.nbytes == tensors[written[0]].nbytes
                if not fits or target.external or target.kept:
                    continue
            legal.append(alternative)
        return legal

    def _reads(self, call: Call) -> set[int]:
        return {t for a in call.nodes for t in self._storages(a)}

    def _static(self, node: fx.Node) -> bool:
        """Whether it is a parameter or a buffer."""
        return self.places.get(node, -1) in self.static

    def _transient(self) -> frozenset[int]:
        inputs = [n for n in self.places if n in self.storage]
        static = {self.storage[n] for n in inputs if self._static(n)}
        return frozenset(self.storage[n] for n in inputs) - static

    def _phases(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """Nodes of the forward and of the backward, in order; input mutations end the forward."""
        forward, backward, mutations = [], [], []
        late: set[fx.Node] = set()
        for node in self.module.graph.nodes:
            tag = node.meta.get("partitioner_tag")
            if node.op == "placeholder":
                if is_tangent(node):
                    late.add(node)
                continue
            if node.op != "call_function":
                if node.op not in ("get_attr", "output"):
                    raise CaptureFailed(f"{self.name}: the graph has a {node.op} node, {node.name}")
                continue
            if tag == "must_be_in_forward":
                mutations.append(node)
            elif tag in ("is_backward", "must_be_in_backward") or any(a in late for a in node.all_input_nodes):
                late.add(node)
                backward.append(node)
            else:
                forward.append(node)
        return forward + mutations, backward

    def _mutated_inputs(self) -> set[int]:
        """Fake storages of inputs that the graph writes to."""
        mutated = set()
        for node in self.module.graph.find_nodes(op="call_function", target=aten.copy_.default):
            mutated.add(node.args[0].meta["val"].untyped_storage()._cdata)
        return mutated

    def _external(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if value is None and node.op == "get_attr":
            value = getattr(self.module, str(node.target), None)
            node.meta["val"] = value
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureFailed(f"{self.name}: the graph has a symbolic size, {node.name}")
        if isinstance(value, torch.Tensor):
            self.storage[node] = self._tensor(value, node.name, external=True)[0]

    def _tensor(self, value: torch.Tensor, name: str, *, external: bool = False) -> tuple[int, bool]:
        """The id of the tensor's storage, and whether it is new."""
        try:
            storage = value.untyped_storage()
            nbytes = int(storage.nbytes())
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise CaptureFailed(f"{self.name}: the size of {name} is not known ({error})") from error
        self.alive.append(storage)
        if storage._cdata in self.by_storage:
            return self.by_storage[storage._cdata], False
        tensor = Tensor(len(self.tensors), nbytes, external=external, name=name)
        self.tensors.append(tensor)
        self.by_storage[storage._cdata] = tensor.id
        return tensor.id, True

    def _written(self, node: fx.Node) -> list[int] | None:
        """Ids of the storages that the node allocates; None when it is a view (or only takes a tuple apart)."""
        value = node.meta.get("val")
        leaves = list(value) if isinstance(value, (tuple, list)) else [value]
        written: list[int] = []
        first: int | None = None
        for leaf in leaves:
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise CaptureFailed(f"{self.name}: {node.name} gives a symbolic size")
            if isinstance(leaf, torch.Tensor):
                tensor, new = self._tensor(leaf, node.name)
                first = tensor if first is None else first
                if new:
                    written.append(tensor)
        if isinstance(value, torch.Tensor):
            assert first is not None
            self.storage[node] = first
        if node.target is operator.getitem:
            return None
        if not written and first is not None and not _mutates(node):
            return None
        return written

    def _operator(
        self,
        i: int,
        node: fx.Node,
        phase: str,
        written: list[int],
        mutated: set[int],
        alternatives: list[Alternative],
    ) -> Operator:
        state = random.state_of(node)
        of_state = set() if state is None else {self.storage[state]}
        reads_mutated = any(
            v.untyped_storage()._cdata in mutated for a in node.all_input_nodes for v in _tensors(a.meta.get("val"))
        )
        replayable = (
            phase == FORWARD
            and not _mutates(node)
            and (state is not None or not random.is_random(node))
            and (not reads_mutated or replay.reads_no_mutated_input(node))
        )
        implementations = [
            Implementation(
                a.name,
                tuple(sorted(self._reads(a.call) | of_state)),
                in_place_of=None if a.overwrites is None else self.storage[a.overwrites],
                exact=bool(a.exact),
            )
            for a in alternatives
        ]
        inputs = tuple(sorted(self._reads(Call.of(node)) | of_state))
        return Operator(
            id=i,
            name=_name(node),
            target=str(node.target),
            phase=phase,
            outputs=tuple(written),
            implementations=(Implementation("default", inputs), *implementations),
            replayable=replayable and "monetrun_optional" not in node.meta,
            optional="monetrun_optional" in node.meta,
            plain="monetrun_optional" not in node.meta,
            signature=signature(Call.of(node)),
        )

    def _with_needless(
        self, tensors: tuple[Tensor, ...], operators: list[Operator], nodes: Sequence[fx.Node]
    ) -> tuple[Operator, ...]:
        """``operators``, those optional that need not run in their pass.

        Such an operator could run later as well, or changes nothing else; and all that can not run without it in its
        pass, by any implementation, need not run either. What only the backward pass reads is one (a copy of what an
        activation overwrites), and an addition that a fused kernel does on its way.
        """
        needless: set[int] = set()
        readers: dict[int, list[Operator]] = {}
        for op in reversed(operators):
            node = nodes[op.id]
            pure = not random.is_random(node) and (op.replayable if op.phase == FORWARD else not _mutates(node))
            kept = any(tensors[t].kept for t in op.outputs)
            if op.outputs and pure and not kept and _can_be_left_out(op, readers, needless):
                needless.add(op.id)
            for t in {t for k in op.implementations for t in k.inputs}:
                readers.setdefault(t, []).append(op)
        return tuple(dataclasses.replace(op, optional=op.optional or op.id in needless) for op in operators)

    def _storages(self, node: fx.Node) -> list[int]:
        if node in self.storage:
            return [self.storage[node]]
        return [self.by_storage[v.untyped_storage()._cdata] for v in _tensors(node.meta.get("val"))]


def _can_be_left_out(op: Operator, readers: dict[int, list[Operator]], needless: set[int]) -> bool:
    """Whether all that can not run in ``op``'s pass without it, by any implementation, is among ``needless``."""
    missing, waiting = set(op.outputs), list(op.outputs)
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            if reader.phase != op.phase or any(missing.isdisjoint(k.inputs) for k in reader.implementations):
                continue
            if not (reader.optional or reader.id in needless):
                return False
            waiting += (t for t in reader.outputs if t not in missing)
            missing.update(reader.outputs)
    return True


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in leaves if isinstance(v, torch.Tensor)]


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def _name(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return node.name
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?", "", str(path)).replace("._modules", "")
    path = re.sub(r"\['(\w+)'\]", r".\1", path).strip(".")
    return f"{path}.{node.name}" if path else node.name


def signature(call: Call) -> str:
    """Hash of a call's target, of its arguments' shapes, strides and dtypes, and of its constants."""

    def describe(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return [
                (tuple(v.shape), v.stride() if v.layout == torch.strided else (), str(v.dtype), v.device.type)
                for v in _tensors(value.meta.get("val"))
            ]
        if isinstance(value, (tuple, list)):
            return [describe(v) for v in value]
        return value.type if isinstance(value, torch.device) else str(value)  # each rank has its own device

    described = [str(call.target), describe(call.args), {k: describe(v) for k, v in sorted(call.kwargs.items())}]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:24]
