"""Joint graphs with sizes left open: traced once, and made graphs of fixed sizes for each call with new ones.

What is planned has fixed sizes: bytes, costs, and which implementations can run depend on them. But it takes longer to
trace a forward and its backward than to plan them. From the second shape on, TorchDynamo and AOTAutograd therefore
leave open what varies: their graph takes sizes as numbers beside the tensors, and before each call they check what they
have assumed of them. Put the numbers in, and it is the joint graph that they would trace for these sizes.

AOTAutograd lays down once what a forward saves for its backward, and each size's schedule saves something else. So here
a forward saves one tensor without elements, which carries the values that its schedule saves.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from monetrun.capture.generated import graph_module
from monetrun.capture.kernel_strides import as_kernels_give_them
from monetrun.capture.open_numbers import NumberOutputs, deciding_symbols, is_open, number_of, only_in_forms
from monetrun.capture.output_gradients import is_tangent
from monetrun.capture.program import Run
from monetrun.capture.refusal import is_refusal
from monetrun.capture.saved_values import SavedValues
from monetrun.capture.storages import results_of
from monetrun.core.errors import CaptureFailed
from monetrun.machine.device import cpu_memory

aten = torch.ops.aten
_log = logging.getLogger("monetrun")

_START: dict[Any, int] = {aten.slice.Tensor: 2, aten.slice_backward.default: 3}  # which argument is the slice's begin
_SAVED = "_monetrun_saved"  # attribute of the tensor that a forward saves: ``SavedValues``
# Of all graphs of fixed sizes that are kept for one open graph: about 1.5 GB; what was not used for longest goes first.
_MOST_NODES = 400_000
_BYTES_OF_A_NODE = 4_000
_SHARE_OF_HOST = 16  # that they may take where the model is on a GPU
# Results of operators on fake tensors that torch keeps: some kilobytes each.
_MOST_FAKE_CALLS = 1 << 14


def most_nodes() -> int:
    """Of how many nodes graphs of fixed sizes are kept for one open graph: a dropped one is captured again."""
    if not torch.cuda.is_initialized():
        return _MOST_NODES
    own = _host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(_MOST_NODES, own // _SHARE_OF_HOST // _BYTES_OF_A_NODE)


@functools.cache
def _host_bytes() -> int:
    """Of the host, or of the container."""
    return cpu_memory().total_bytes


def has_open_sizes(module: fx.GraphModule) -> bool:
    """Whether a joint module takes numbers that are left open."""
    return any(is_open(node.meta.get("val")) for node in module.graph.find_nodes(op="placeholder"))


@dataclass
class FixedSizes:
    """What runs a graph for one set of numbers, in AOTAutograd's calling convention without the numbers.

    Attributes:
        forward: gives the outputs, then what it saves.
        make_backward: makes what takes that, then the outputs' gradients.
    """

    forward: Run
    make_backward: Callable[[], Run]

    @functools.cached_property
    def backward(self) -> Run:
        """What ``make_backward`` makes, which a forward without a backward does not need."""
        return self.make_backward()


class OpenSizes:
    """Runs a joint graph whose sizes are left open.

    Args:
        module: AOTAutograd's joint module.
        forward_outputs: how many of its outputs are the forward's.
        fix: makes what runs a joint module of fixed sizes.
    """

    def __init__(
        self, module: fx.GraphModule, forward_outputs: int, fix: Callable[[fx.GraphModule], FixedSizes]
    ) -> None:
        self.module = module
        self.forward_outputs = forward_outputs
        self.fix = fix
        primals = [n for n in module.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        values: list[Any] = [node.meta.get("val") for node in primals]
        self.numbers = [k for k, value in enumerate(values) if is_open(value)]
        self._given_on = NumberOutputs(values, results_of(module.graph)[:forward_outputs])
        deciding = deciding_symbols(module) | self._given_on.others
        own = {k: values[k].node.expr.free_symbols for k in self.numbers}
        self._deciding = [k for k in self.numbers if own[k] & deciding]
        self._spare = frozenset[Any]().union(*(symbols - deciding for symbols in own.values()))
        self._tensors = [k for k in range(len(primals)) if k not in self.numbers]
        self._forms = only_in_forms(values)
        self._traced = self._read(values)
        self._fixed: dict[tuple[Any, ...], FixedSizes] = {}  # in the order of their last calls

    def __deepcopy__(self, memo: Any) -> OpenSizes:
        return self  # AOTAutograd copies modules with their meta

    def fixed(self, numbers: tuple[Any, ...]) -> FixedSizes:
        """What runs it with these numbers: those given that decide something, then those of tensors' forms."""
        found = self._fixed.pop(numbers, None)
        if found is None:
            with unset_fake_temporarily():
                expressions = (number.node.expr for number in self._traced)
                module = with_numbers(self.module, dict(zip(expressions, numbers, strict=True)), self._spare)
                found = self.fix(module)
            if len(FakeTensorMode.cache) > _MOST_FAKE_CALLS:  # of every size so far, and torch drops none
                FakeTensorMode.cache_clear()
            while len(self._fixed) >= self.most:
                del self._fixed[next(iter(self._fixed))]
        self._fixed[numbers] = found
        return found

    @property
    def most(self) -> int:
        """How many sizes are kept."""
        return max(most_nodes() // len(self.module.graph.nodes), 1)

    def hints(self) -> tuple[Any, ...]:
        """The numbers that it was traced with."""
        return tuple(number.node.hint for number in self._traced)

    def _read(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The numbers of these inputs."""
        return (*(inputs[k] for k in self._deciding), *(form.read(inputs[form.place]) for form in self._forms))

    def shells(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Modules that have the inputs and outputs of the forward and of the backward, for AOTAutograd to look at."""
        results = results_of(self.module.graph)
        forward, backward, primals, tangents = fx.Graph(), fx.Graph(), {}, {}
        with _mode_of(self.module):
            values = torch.empty(0, device="cpu")
        token = backward.placeholder("carried_values")
        token.meta["val"] = values
        for node in self.module.graph.find_nodes(op="placeholder"):
            if is_tangent(node):
                tangents[node] = backward.node_copy(node)
            else:
                primals[node] = forward.node_copy(node)
        carried = forward.call_function(_in_a_shell)
        carried.meta["val"] = values
        outputs = [_shell_output(forward, n, primals) for n in results[: self.forward_outputs]]
        forward.output((*outputs, carried))
        backward.output(tuple(_shell_output(backward, n, tangents) for n in results[self.forward_outputs :]))
        return graph_module(self.module, forward), graph_module(self.module, backward)

    def forward(self, arguments: list[Any]) -> Any:
        """Run the forward.

        Raises:
            BackendCompilerFailed: as from TorchDynamo, where the graph cannot be captured at these sizes.
        """
        numbers = self._read(arguments)
        try:
            fixed = self.fixed(numbers)
        except Exception as error:
            if is_refusal(error):
                raise
            _log.debug("sizes %s are not left open", numbers, exc_info=error)
            raise BackendCompilerFailed(self.forward, error, None) from error
        tensors = [arguments[k] for k in self._tensors]
        given_on = self._given_on.of(arguments)
        arguments.clear()
        results = list(fixed.forward(tensors))
        for k, number in given_on:
            results[k] = number
        outputs, saved = results[: self.forward_outputs], results[self.forward_outputs :]
        given = {id(o) for o in outputs}
        # an output becomes one of the autograd node that keeps the values: no circle
        values = [v.detach() if id(v) in given and isinstance(v, torch.Tensor) else v for v in saved]
        carried = torch.empty(0, device="cpu")
        setattr(carried, _SAVED, SavedValues(fixed, values))
        return (*outputs, carried)

    forward._boxed_call = True  # type: ignore[attr-defined]

    def backward(self, arguments: list[Any]) -> Any:
        """Run the backward of one call.

        Raises:
            RuntimeError: a saved value has been changed in place; torch's own error.
        """
        saved: SavedValues = getattr(arguments[0], _SAVED)
        saved.check()
        given = [*saved.values, *arguments[1:]]
        arguments.clear()
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            saved.drop()
        return saved.fixed.backward(given)

    backward._boxed_call = True  # type: ignore[attr-defined]


def with_numbers(
    module: fx.GraphModule, known: Mapping[Any, Any], spare: Collection[Any] = frozenset()
) -> fx.GraphModule:
    """The joint module of fixed sizes that an open one is with these numbers.

    Args:
        module: AOTAutograd's joint module.
        known: numbers by their expression in it; those that are inputs it does not take any more.
        spare: symbols that no tensor depends on; numbers that they are in are None.

    Raises:
        CaptureFailed: the module has something whose size does not follow from the numbers.
    """
    mode = _mode_of(module)
    with mode, as_kernels_give_them(), torch.no_grad(), torch._C._DisableAutocast():
        return _Fixing(module, mode, known, frozenset(spare)).module()


class _Fixing:
    """Makes a graph of fixed sizes, operator by operator, each on fake tensors of these sizes."""

    def __init__(
        self, module: fx.GraphModule, mode: FakeTensorMode, known: Mapping[Any, Any], spare: frozenset[Any]
    ) -> None:
        self.open = module
        self.mode = mode
        self.known = dict(known)
        self.spare = spare
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, Any] = {}  # of the open graph: the other graph's node, or a number
        self.values: dict[fx.Node, Any] = {}  # of the other graph's nodes
        self.left_out = _full_slices(module)
        self.other_strides = False  # a gradient comes as it is, not as a copy of the traced strides

    def module(self) -> fx.GraphModule:
        for node in self.open.graph.nodes:
            val = node.meta.get("val")
            if is_open(val):
                given_on = bool(val.node.expr.free_symbols & self.spare)  # then ``NumberOutputs`` has it
                self.nodes[node] = None if given_on else self._number(val)
            elif node.op == "output":
                self.graph.node_copy(node, self.nodes.__getitem__)
            elif not self._checks_numbers(node):
                self._copy(node, val)
        self.graph.eliminate_dead_code()  # what only sizes were read of
        found = graph_module(self.open, self.graph)
        found.meta = dict(self.open.meta)
        return found

    def _checks_numbers(self, node: fx.Node) -> bool:
        """Whether an operator only says something of numbers, such as that one is positive: they are known now."""
        tensors = any(isinstance(self.nodes[n], fx.Node) for n in node.all_input_nodes)
        return node.op == "call_function" and node.meta.get("val") is None and not node.users and not tensors

    def _copy(self, node: fx.Node, val: Any) -> None:
        if node in self.left_out:
            self._leave_out(node, val)
            return
        new = self.nodes[node] = self.graph.node_copy(node, self.nodes.__getitem__)
        if node.op == "placeholder":
            value = self._input(val)
        elif node.op == "get_attr":
            value = val
        elif node.op == "call_function":
            arguments, keywords = fx.map_arg((new.args, new.kwargs), self.values.__getitem__)
            value = node.target(*arguments, **keywords)  # type: ignore[operator]
            self._check(node, val, value)
        else:
            raise CaptureFailed(f"the graph has a {node.op} node, {node.name}", "its sizes are not left open")
        self.values[new] = value
        if "val" in node.meta:
            new.meta["val"] = value
        new.meta.pop("tensor_meta", None)

    def _leave_out(self, node: fx.Node, val: Any) -> None:
        """Put what eager has in the place of a slice of everything, or of its derivative: nothing, or an alias."""
        operand = self.nodes[node.all_input_nodes[0]]
        value = self.values[operand]
        if self.left_out[node]:
            operand = self.graph.call_function(aten.alias.default, (operand,))
            operand.meta = {**node.meta, "val": aten.alias.default(value)}
            self.values[operand] = operand.meta["val"]
        self.other_strides |= tuple(map(self._number, val.stride())) != value.stride()
        self.nodes[node] = operand

    def _input(self, val: Any) -> Any:
        if not isinstance(val, FakeTensor) or not any(map(is_open, (*val.shape, *val.stride(), val.storage_offset()))):
            return val
        elements = self._number(val.untyped_storage().nbytes()) // val.element_size()
        storage = torch.empty(elements, dtype=val.dtype, device=val.device)
        sizes, strides = (tuple(map(self._number, form)) for form in (val.shape, val.stride()))
        return storage.as_strided(sizes, strides, self._number(val.storage_offset()))

    def _check(self, node: fx.Node, val: Any, value: Any) -> None:
        """Check that an operator gives what was traced."""
        if isinstance(val, (tuple, list)):
            for one, other in zip(val, value, strict=True):
                self._check(node, one, other)
        elif isinstance(val, torch.Tensor):
            forms = [(tuple(map(self._number, v.shape)), tuple(map(self._number, v.stride()))) for v in (val, value)]
            if forms[0][: 2 - self.other_strides] != forms[1][: 2 - self.other_strides] or val.dtype != value.dtype:
                raise CaptureFailed(f"{node.name} gives {forms[1]}, not {forms[0]}", "its sizes are not left open")

    def _number(self, value: Any) -> Any:
        if not is_open(value):
            return value
        try:
            return number_of(value, self.known)
        except TypeError:
            message = f"{value} does not follow from the sizes of the inputs"
            raise CaptureFailed(message, "its sizes are not left open") from None


def _full_slices(module: fx.GraphModule) -> dict[fx.Node, bool]:
    """Slices of all that there is, and their derivatives, where eager has none: whether it has an alias there.

    Indexing leaves them out, and gives an alias where nothing else is left of it. While sizes are open it does not.
    """
    found: dict[fx.Node, bool] = {}
    last: dict[str, fx.Node] = {}  # by the indexing's name
    others: set[str] = set()
    for node in module.graph.nodes:
        stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack") or [("", None)]
        if node.op != "call_function" or stack[-1][1] is not operator.getitem:
            continue
        full = node.target in _START and _begins_at_zero(node) and _alike(node, node.args[0])
        if full:
            found[node] = False
        if node.meta.get("partitioner_tag") == "is_forward" and not is_open(node.meta.get("val")):
            if full:
                last[stack[-1][0]] = node
            else:
                others.add(stack[-1][0])
    return {**found, **{node: True for name, node in last.items() if name not in others}}


def _begins_at_zero(node: fx.Node) -> bool:
    """Whether a slice, or the slice of a derivative, is written without another beginning."""
    place = _START[node.target]
    return len(node.args) <= place or bool(node.args[place] == 0)


def _alike(node: fx.Node, other: Any) -> bool:
    """Whether two tensors have the same shape, whatever the numbers."""
    shapes = ([s.node.expr if is_open(s) else s for s in n.meta["val"].shape] for n in (node, other))
    return operator.eq(*shapes)


def _shell_output(graph: fx.Graph, node: Any, inputs: Mapping[fx.Node, fx.Node]) -> Any:
    """What stands for one of the joint graph's results."""
    if not isinstance(node, fx.Node) or node in inputs:
        return inputs.get(node, node)
    new = graph.call_function(_in_a_shell)
    new.meta = dict(node.meta)
    return new


def _in_a_shell() -> Any:
    """Stands for what a module that never runs computes."""
    raise AssertionError("a shell is looked at, and never runs")


def _mode_of(module: fx.GraphModule) -> FakeTensorMode:
    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")])
    if mode is None:
        raise CaptureFailed("a graph with open sizes takes no tensors", "its sizes are not left open")
    return mode
