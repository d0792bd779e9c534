"""Finds the storages of a captured graph: which fx node writes which, and which nodes are only views.

Memory is counted per storage, so a view counts as the tensor that it is a view of. Nodes hold fake tensors, and two
fake tensors share memory exactly where their storages are the same object.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.capture.allocator_history import present_settings
from monetrun.core.errors import CaptureFailed
from monetrun.core.graph import Tensor
from monetrun.ops.registry import Call

aten = torch.ops.aten

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Storages:
    """The storages of a joint module, numbered in the order in which they first appear.

    Attributes:
        tensors: one for each storage.
        by_node: for each fx node that holds one tensor, the id of its storage.
        written: for each node that is an operator, the ids of the storages that it allocates; views have no entry.

    Args:
        module: the joint module.
        calls: its calls, in the order in which the plain step runs them.
        results: the outputs and gradients; storages that the graph allocates for them are ``kept``.
        name: of the model, for messages.

    Raises:
        CaptureFailed: a size is symbolic or unknown.
    """

    def __init__(self, module: fx.GraphModule, calls: Iterable[fx.Node], results: Sequence[Any], name: str) -> None:
        self.tensors: list[Tensor] = []
        self.by_node: dict[fx.Node, int] = {}
        self.written: dict[fx.Node, tuple[int, ...]] = {}
        self._name = name
        self._by_address: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # an address stays unique as long as its storage exists
        for node in module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._add_external(module, node)
        for node in calls:
            written = self._add_results(node)
            if written is not None:
                self.written[node] = written
        for t in {self.by_node[n] for n in results if n in self.by_node}:
            if not self.tensors[t].external:
                self.tensors[t] = dataclasses.replace(self.tensors[t], kept=True)

    def of(self, node: fx.Node) -> list[int]:
        """Ids of the storages of all tensors that a node holds."""
        if node in self.by_node:
            return [self.by_node[node]]
        return [self._by_address[v.untyped_storage()._cdata] for v in tensors_in(node.meta.get("val"))]

    def read_by(self, call: Call) -> set[int]:
        """Ids of the storages that a call's arguments are in."""
        return {t for node in call.nodes for t in self.of(node)}

    def _add_external(self, module: fx.GraphModule, node: fx.Node) -> None:
        value = node.meta.get("val")
        if value is None and node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            node.meta["val"] = value
        if isinstance(value, _SYMBOLIC):
            raise CaptureFailed(f"{self._name}: the graph has a symbolic size, {node.name}")
        if isinstance(value, torch.Tensor):
            self.by_node[node] = self._add(value, node.name, external=True)[0]

    def _add_results(self, node: fx.Node) -> tuple[int, ...] | None:
        """Ids of the storages that a call allocates; None for a view, and for taking an element of a tuple."""
        value = node.meta.get("val")
        written: list[int] = []
        first: int | None = None
        for leaf in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(leaf, _SYMBOLIC):
                raise CaptureFailed(f"{self._name}: {node.name} gives a symbolic size")
            if isinstance(leaf, torch.Tensor):
                tensor, new = self._add(leaf, node.name)
                first = tensor if first is None else first
                if new:
                    written.append(tensor)
        if isinstance(value, torch.Tensor):
            assert first is not None
            self.by_node[node] = first
        is_view = not written and first is not None and not mutates(node)
        return None if is_view or node.target is operator.getitem else tuple(written)

    def _add(self, value: torch.Tensor, name: str, *, external: bool = False) -> tuple[int, bool]:
        """The id of the tensor's storage, and whether it is new."""
        if value.layout != torch.strided:
            raise CaptureFailed(f"{self._name}: {name} is a sparse tensor, whose size is known only when it is there")
        try:
            storage = value.untyped_storage()
            nbytes = block_bytes(storage)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise CaptureFailed(f"{self._name}: the size of {name} is not known ({error})") from error
        self._alive.append(storage)
        if storage._cdata in self._by_address:
            return self._by_address[storage._cdata], False
        tensor = Tensor(len(self.tensors), nbytes, external=external, name=name)
        self.tensors.append(tensor)
        self._by_address[storage._cdata] = tensor.id
        return tensor.id, True


def block_bytes(storage: torch.UntypedStorage) -> int:
    """The bytes that the allocator gives out for a storage: CUDA's rounds them up."""
    nbytes = int(storage.nbytes())
    if storage.device.type != "cuda" or nbytes == 0:
        return nbytes
    return present_settings().rounded(nbytes)


def results_of(graph: fx.Graph) -> list[Any]:
    """What a graph gives, one after the other."""
    (output,) = graph.find_nodes(op="output")
    return list(torch.utils._pytree.arg_tree_leaves(*output.args))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's value: a tensor, or a tuple or list that has some."""
    leaves = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in leaves if isinstance(v, torch.Tensor)]


def mutates(node: fx.Node) -> bool:
    """Whether the operator that a node calls writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def mutated_inputs(module: fx.GraphModule, storages: Storages) -> frozenset[int]:
    """Ids of the storages of inputs that the graph writes to: AOTAutograd copies their new values into them."""
    copies = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return frozenset(t for copy in copies for t in storages.of(copy.args[0]))


def version_of(value: Any) -> int:
    """How often a tensor has been written to, as far as autograd knows; 0 for what is no tensor."""
    try:
        found: int = value._version
    except (AttributeError, RuntimeError):  # no tensor; one made in inference mode, of which autograd knows nothing
        return 0
    return found
