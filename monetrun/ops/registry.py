"""The registry of alternative implementations: families register generators for the operators they know.

A generator is called with every node of a captured joint graph whose target it was registered for, and yields the
other ways in which that node may run::

    from monetrun.ops.registry import Alternative, Call, Joint, implementation

    @implementation(torch.ops.aten.threshold_backward.default)
    def _from_mask(node, joint):
        grad, result, threshold = node.args
        mask = joint.optional(result, torch.ops.monet.range_mask.default, result, 0.0, math.nan)
        yield Alternative("intermediate:mask", Call(torch.ops.monet.mask_backward.default, (grad, mask, 0.0)))

monetrun's own families are the modules of ``monetrun.ops.families``. Other packages name such a module in the entry
point group ``monetrun.implementations``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import fx

from monetrun.core.graph import KINDS

ENTRY_POINTS = "monetrun.implementations"

FAMILIES = "monetrun.ops.families"


@dataclass(frozen=True)
class Call:
    """A call whose arguments are constants and nodes of the joint graph.

    Attributes:
        target: an operator overload.
        args: positional arguments.
        kwargs: keyword arguments.
        only: where the node gives a tuple of which only this element is used, and the call gives that element alone.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    only: int | None = None

    @classmethod
    def of(cls, node: fx.Node) -> Call:
        """The call that a node of the graph makes."""
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
        exact: whether the result is bitwise identical to the node's. None: a trial on the device, with random operands,
            decides (for calls whose roundings do not depend on the values).
        costs_as: a call that does the same work, to be measured instead: the same kernel measured twice would differ
            by noise, and the planner would pick the lower figure.
        no_faster_than_default: whether its measured seconds are raised to those of the node's own call: for the same
            work done in other portions, which measures faster only where the allocator happens to hold blocks of
            their size.
        guard: a call that reads parameters of the model and constants, and gives one bool: whether ``call`` may replace
            the node at the parameters' present values. It is evaluated before every forward (see ``capture.guards``).
    """

    name: str
    call: Call
    overwrites: fx.Node | None = None
    exact: bool | None = True
    costs_as: Call | None = None
    no_faster_than_default: bool = False
    guard: Call | None = None


class Joint:
    """The joint module as generators see it: they read its nodes, and add optional calls."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._places = {node: place for place, node in enumerate(module.graph.nodes)}
        self._optional: dict[str, fx.Node] = {}
        self._optional_after: dict[fx.Node, list[fx.Node]] = {}

    def optional(self, after: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A call that a schedule makes only for implementations that read its result (MONeT's intermediate node).

        Args:
            after: a forward node; the call runs right after what computes it.
            target: an operator overload that gives one tensor.
            args: its arguments; nodes among them come no later than ``after``.
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
            self._optional_after.setdefault(place, []).append(node)
        return self._optional[key]

    def sort_optional(self) -> None:
        """Bring the optional calls after each node into an order that does not depend on who asked for them first."""
        for place, nodes in self._optional_after.items():
            last = _last_of(place)
            for node in sorted(nodes, key=lambda n: self._described(Call.of(n))):
                last.append(node)
                last = node

    def sort_key(self, alternative: Alternative) -> tuple[Any, ...]:
        """Orders a node's alternatives by name, by what they overwrite, then by what they call."""
        overwritten = "" if alternative.overwrites is None else self._described(alternative.overwrites)
        return alternative.name, overwritten, self._described(alternative.call), repr(alternative.exact)

    def _described(self, value: Any) -> str:
        """A text that is the same whatever nodes are called: a node is its place in the captured graph."""
        if isinstance(value, Call):
            call = value
            return f"{call.target}{self._described(call.args)}{self._described(call.kwargs)}{call.only}"
        if isinstance(value, fx.Node):
            place = self._places.get(value)
            return self._described(Call.of(value)) if place is None else f"%{place:09}"
        if isinstance(value, tuple | list):
            return f"[{','.join(map(self._described, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{k}:{self._described(v)}' for k, v in value.items())}}}"
        return repr(value)


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _last_of(node: fx.Node) -> fx.Node:
    """The last node of ``node`` and the getitem calls that directly follow it."""
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
    for module in pkgutil.iter_modules(importlib.import_module(FAMILIES).__path__):
        importlib.import_module(f"{FAMILIES}.{module.name}")
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.name):
        entry.load()


def registered() -> tuple[Any, ...]:
    """The operators for which a generator is registered."""
    load()
    return tuple(_generators)


def alternatives(module: fx.GraphModule) -> dict[fx.Node, list[Alternative]]:
    """All families' alternatives for the nodes of a joint module, to which their optional calls are added.

    Their order, and that of the optional calls, depends on the graph alone, not on the order of registration.

    Raises:
        ValueError: an alternative's name begins with no known kind.
    """
    load()
    joint = Joint(module)
    found: dict[fx.Node, list[Alternative]] = {}
    for node in list(module.graph.nodes):
        offered = sorted(_offered(node, joint), key=joint.sort_key)
        if offered:
            found[node] = offered
    joint.sort_optional()
    return found


def _offered(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
        return
    for generator in _generators.get(node.target, ()):
        for alternative in generator(node, joint):
            if alternative.name.partition(":")[0] not in KINDS:
                raise ValueError(f"implementation {alternative.name!r} of {node.target}: its kind is none of {KINDS}")
            yield alternative


# ---- for generators: properties of nodes


def real_tensors() -> AbstractContextManager[Any]:
    """A context for the few generators that compute: elsewhere in capture, new tensors are fake."""
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
    """Whether nodes are whole tensors of the same shape, strides and dtype; none is a conjugate or negative view."""
    values = [value_of(n) for n in nodes]
    first = values[0]
    return first is not None and all(
        v is not None
        and is_whole(v)
        and (v.shape, v.stride(), v.dtype) == (first.shape, first.stride(), first.dtype)
        and not (v.is_conj() or v.is_neg())
        for v in values
    )


def are_contiguous(*nodes: Any) -> bool:
    """Whether all tensors among nodes are contiguous: a kernel reads parameters as vectors without gaps."""
    return all(v.is_contiguous() for v in map(value_of, nodes) if v is not None)


def source(node: Any) -> Any:
    """The node at the start of a chain of ``detach`` and ``alias`` calls."""
    aten = torch.ops.aten
    while isinstance(node, fx.Node) and node.target in (aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def uncopied(node: fx.Node) -> fx.Node:
    """The node that a clone copies, otherwise the node: eager clones an input that an in-place call overwrites."""
    return source(node.args[0]) if node.target is torch.ops.aten.clone.default else node  # type: ignore[no-any-return]


def wide(*nodes: Any) -> bool:
    """Whether the tensors among nodes all are float32, or all float64."""
    dtypes = {v.dtype for n in nodes if (v := value_of(n)) is not None}
    return dtypes in ({torch.float32}, {torch.float64})


def argument(node: fx.Node, name: str) -> Any:
    """The argument of a call by its name in the operator's schema; the schema's default where it is not given.

    Raises:
        KeyError: the schema has no such argument.
    """
    schema = node.target._schema  # type: ignore[union-attr]
    for position, declared in enumerate(schema.arguments):
        if declared.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, declared.default_value if declared.has_default_value() else None)
    raise KeyError(name)


def element(call: fx.Node, index: int) -> fx.Node | None:
    """The node of a call's result ``index``; None where nothing reads it."""
    return next((user for user in call.users if len(user.args) == 2 and user.args[1] == index), None)


def call_of(node: Any, target: Any, index: int) -> fx.Node | None:
    """The call of ``target`` whose result ``index`` a node is, through aliases; None for any other node."""
    node = source(node)
    if not isinstance(node, fx.Node) or len(node.args) != 2 or node.args[1] != index:
        return None
    call = node.args[0]
    return call if isinstance(call, fx.Node) and call.target is target else None
