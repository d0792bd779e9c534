"""Who offers which implementations: each family is a file that registers generators for the operators it knows.

A generator is called with every node of a captured joint graph whose target it was registered for, and yields the
other ways in which that node may run::

    from monetrun.ops.registry import Alternative, Call, Joint, implementation

    @implementation(torch.ops.aten.threshold_backward.default)
    def _from_mask(node, joint):
        grad, result, threshold = node.args
        mask = joint.optional(result, torch.ops.monet.range_mask.default, result, 0.0, math.nan)
        yield Alternative("intermediate:mask", Call(torch.ops.monet.mask_backward.default, (grad, mask, 0.0)))

Packages beside monetrun name such a module in the entry point group ``monetrun.implementations``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import fx

from monetrun.core.graph import KINDS

ENTRY_POINTS = "monetrun.implementations"

_FAMILIES = (
    "in_place",
    "rectifiers",
    "exponential",
    "hardswish",
    "pooling",
    "convolution",
    "layout",
    "cudnn_convolution",
    "parts",
    "dropout",
    "normalization",
    "normalization_output",
    "cross_entropy",
)


@dataclass(frozen=True)
class Call:
    """One call: its arguments are constants and nodes of the joint graph.

    Attributes:
        target: an operator overload.
        args: positional arguments.
        kwargs: keyword arguments.
        only: where the node gives a tuple of which this element alone is used: the call gives just that.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    only: int | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Call:
        """What a node of the graph calls."""
        return cls(node.target, node.args, dict(node.kwargs))

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes among the arguments, each once, in order."""
        found: dict[fx.Node, None] = {}
        fx.map_arg((self.args, self.kwargs), lambda n: found.setdefault(n))
        return list(found)


@dataclass(frozen=True)
class Alternative:
    """Another way to run a node.

    Attributes:
        name: ``"KIND"`` or ``"KIND:which"``, KIND one of ``graph.KINDS``.
        call: gives what the node gives (the same tensors, in the same order).
        overwrites: the argument whose storage the (only) result takes over, or None.
        exact: whether the result has the same bits as the node's; None: where a trial on the device, with random
            operands, shows so (for calls whose roundings do not depend on the values).
        costs_as: the call to measure in its place, one that runs the same kernel out of place too: the same work
            measured twice would differ by noise, and the planner would take the luckier one.
        no_faster: whether it is never to count as faster than the node's own call: the same work in other portions,
            which measures less where the allocator happens to have them at hand.
        guard: a call that reads parameters of the model and constants, and gives one bool: whether ``call`` may stand
            for the node as the parameters are now. It is asked again before every forward (see ``guards``).
    """

    name: str
    call: Call
    overwrites: fx.Node | None = None
    exact: bool | None = True
    costs_as: Call | None = None
    no_faster: bool = False
    guard: Call | None = None


class Joint:
    """The joint module, as generators see it.

    ``notes`` is for what a generator finds out about the whole module once.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._optional: dict[str, fx.Node] = {}
        self.notes: dict[Any, Any] = {}

    def optional(self, after: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A call that is in a schedule only where an implementation that reads it is (MONeT's intermediate node).

        Args:
            after: a forward node; the call runs right after what computes it.
            target: an operator overload that gives one tensor.
            args: its arguments, of which those that are nodes come no later than ``after``.
        """
        key = repr((target, args))
        if key not in self._optional:
            place = after
            while place.target is torch.ops.aten.detach.default or _is_getitem(place):
                place = place.args[0]  # type: ignore[assignment]
            with self.module.graph.inserting_after(_last_of(place)):
                node = self.module.graph.call_function(target, args)
            values = fx.map_arg(args, lambda n: n.meta["val"])
            mode = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
            for value in values:
                mode = getattr(value, "fake_mode", None) or mode
            with mode:
                node.meta["val"] = target(*values)
            if "nn_module_stack" in place.meta:
                node.meta["nn_module_stack"] = place.meta["nn_module_stack"]
            node.meta["partitioner_tag"] = "is_forward"
            node.meta["monetrun_optional"] = True
            self._optional[key] = node
        return self._optional[key]


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _last_of(node: fx.Node) -> fx.Node:
    """The node behind which what reads any part of ``node`` may stand: its own last getitem."""
    last = node
    while _is_getitem(last.next) and last.next.args[0] is node:
        last = last.next
    return last


Generator = Callable[[fx.Node, Joint], Iterable[Alternative]]

_generators: dict[Any, list[Generator]] = {}


def implementation(*targets: Any) -> Callable[[Generator], Generator]:
    """Register a generator for the operators ``targets``."""

    def register(generator: Generator) -> Generator:
        for target in targets:
            _generators.setdefault(target, []).append(generator)
        return generator

    return register


@functools.cache
def load() -> None:
    """Import all families: monetrun's own, and those that installed packages name."""
    for name in _FAMILIES:
        importlib.import_module(f"monetrun.ops.{name}")
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.name):
        entry.load()


def registered() -> tuple[Any, ...]:
    """The operators that some family knows."""
    load()
    return tuple(_generators)


def alternatives(module: fx.GraphModule) -> dict[fx.Node, list[Alternative]]:
    """What all families offer for the nodes of a joint module; optional calls are added to it."""
    load()
    joint = Joint(module)
    found: dict[fx.Node, list[Alternative]] = {}
    for node in list(module.graph.nodes):
        offered = list(_offered(node, joint))
        if offered:
            found[node] = offered
    return found


def _offered(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
        return
    for generator in _generators.get(node.target, ()):
        for alternative in generator(node, joint):
            if alternative.name.partition(":")[0] not in KINDS:
                raise ValueError(f"implementation {alternative.name!r} of {node.target}: its kind is none of {KINDS}")
            yield alternative


# ---- what generators ask about nodes


def real_tensors() -> AbstractContextManager[Any]:
    """For the few generators that compute: a graph is captured with fake tensors."""
    return torch._subclasses.fake_tensor.unset_fake_temporarily()


def value_of(node: Any) -> torch.Tensor | None:
    """The (fake) tensor of a node, None for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_whole(value: Any) -> bool:
    """Whether a (fake) tensor is all of its storage, without overlap."""
    if not isinstance(value, torch.Tensor) or value.storage_offset() != 0:
        return False
    if value.untyped_storage().nbytes() != value.numel() * value.element_size():
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))


def alike(*nodes: Any) -> bool:
    """Whether nodes are whole tensors of the same shape, strides and dtype."""
    values = [value_of(n) for n in nodes]
    first = values[0]
    return first is not None and all(
        v is not None and is_whole(v) and (v.shape, v.stride(), v.dtype) == (first.shape, first.stride(), first.dtype)
        for v in values
    )


def source(node: Any) -> Any:
    """The node that a chain of ``detach`` and same-shaped aliases stands for."""
    aten = torch.ops.aten
    while isinstance(node, fx.Node) and node.target in (aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def uncopied(node: fx.Node) -> fx.Node:
    """What a clone copies, else the node: an input that was cloned before it was overwritten is the input still."""
    return source(node.args[0]) if node.target is torch.ops.aten.clone.default else node  # type: ignore[no-any-return]


def wide(*nodes: Any) -> bool:
    """Whether the tensors among nodes are all of float32, or all of float64."""
    dtypes = {v.dtype for n in nodes if (v := value_of(n)) is not None}
    return dtypes in ({torch.float32}, {torch.float64})


def argument(node: fx.Node, name: str) -> Any:
    """The argument of a call by its name in the operator's schema, its default where it is not given."""
    schema = node.target._schema  # type: ignore[union-attr]
    for position, declared in enumerate(schema.arguments):
        if declared.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, declared.default_value if declared.has_default_value() else None)
    raise KeyError(name)


def element(call: fx.Node, index: int) -> fx.Node | None:
    """The node of a call's result ``index``, if anything reads that."""
    return next((user for user in call.users if len(user.args) == 2 and user.args[1] == index), None)


def call_of(node: Any, target: Any, index: int) -> fx.Node | None:
    """The call of ``target`` whose result ``index`` a node is, through aliases; None where it is none."""
    node = source(node)
    if not isinstance(node, fx.Node) or len(node.args) != 2 or node.args[1] != index:
        return None
    call = node.args[0]
    return call if isinstance(call, fx.Node) and call.target is target else None
