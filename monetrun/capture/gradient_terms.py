"""Gives the gradient of an input in terms, one for each of its uses in a graph, where other calls use it too.

Autograd adds the terms of a tensor's gradient in the order in which the backward reaches the tensor's uses, the last
one first. The backward of a captured graph adds its own terms by itself: where it has all of them, in eager's order.
But where other calls or the script use the tensor after it, eager has their terms before, and adds the graph's to them
one by one. There the sums are taken out of the backward, and the terms are given by turns (see ``gradient_order``):
autograd adds each as it arrives. Plans are made, and bytes counted, with the sums.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from monetrun.capture.generated import graph_module
from monetrun.ops.families.output_gradients import OPERATOR, add_output_gradient_

EARLIER = "monetrun_earlier_terms"  # in the meta of a sum of terms: which of its arguments has the earlier ones

aten = torch.ops.aten

Edge = tuple[Any, int]  # a node of autograd's graph, and which of its inputs


@dataclass(frozen=True, slots=True)
class Arrival:
    """What arrives in a backward: a term of the gradient of input ``k``, or (``final``) all of it."""

    k: int
    final: bool


@contextlib.contextmanager
def arrivals(outputs: Any, inputs: Sequence[Any]) -> Iterator[list[Arrival]]:
    """What arrives, in order, while gradients of ``outputs`` by ``inputs`` are computed; terms, of sums."""
    found: list[Arrival] = []
    handles = [t.register_hook(lambda _, k=k: found.append(Arrival(k, final=True))) for k, t in enumerate(inputs)]
    of_edge = {edge: k for k, t in enumerate(inputs) if (edge := edge_of(t)) is not None}
    users = list(_users(outputs, of_edge))
    several = {
        edge for edge, count in Counter(edge for _, edges in users for edge in edges if edge).items() if count > 1
    }
    for function, edges in users:
        if several.intersection(edges):
            places = [of_edge[edge] if edge in several else None for edge in edges]  # type: ignore[index]
            handles.append(function.register_hook(lambda given, _, places=places: _note(found, places, given)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _note(found: list[Arrival], places: Sequence[int | None], gradients: Sequence[Any]) -> None:
    pairs = zip(places, gradients, strict=False)
    found.extend(Arrival(k, final=False) for k, gradient in pairs if k is not None and gradient is not None)


def mark_sums(gradient: Any, count: int) -> bool:
    """Mark the sums by which autograd has made ``gradient``, in a joint graph, of ``count`` terms; False: not found."""
    sums = []
    for _ in range(count - 1):
        if not isinstance(gradient, fx.Node) or gradient.target is not aten.add.Tensor or len(gradient.users) != 1:
            return False
        if gradient.kwargs or not all(isinstance(term, fx.Node) for term in gradient.args):
            return False
        sums.append(gradient)
        gradient = gradient.args[0]
    for total in sums:
        total.meta[EARLIER] = 0
    return True


def keep_mark(new: fx.Node, node: fx.Node, arguments: Sequence[Any]) -> None:
    """Mark ``new``, which computes the joint graph's ``node`` from its ``arguments``, as that is."""
    if EARLIER in node.meta and (earlier := node.args[node.meta[EARLIER]]) in arguments[:2]:
        new.meta[EARLIER] = arguments.index(earlier)


def in_terms(module: fx.GraphModule, places: Mapping[int, Sequence[int]]) -> fx.GraphModule:
    """A backward module that gives terms in place of their sums.

    Args:
        module: of ``execute.build``; it is left as it is.
        places: for each result that is a sum, the positions of its terms among the new module's results, in the order
            in which they arrive. A sum that no mark is found at stands in place of the last term.
    """
    graph = fx.Graph()
    results: dict[int, Any] = dict(enumerate(graph.graph_copy(module.graph, {})))  # type: ignore[arg-type]
    for k, positions in places.items():
        total = results[k]
        results.update(dict.fromkeys(positions))
        results.update(zip(reversed(positions), _taken_out(graph, total, len(positions)), strict=False))
    graph.output(tuple(results[k] for k in range(len(results))))
    return graph_module(module, graph)


def _taken_out(graph: fx.Graph, total: Any, count: int) -> list[Any]:
    """The terms of a sum, the last one first; the sums of them are erased."""
    found: list[Any] = []
    while len(found) < count - 1 and isinstance(total, fx.Node) and EARLIER in total.meta and not total.users:
        earlier = total.meta[EARLIER]
        terms = list(total.args[:2])
        if total.target in (OPERATOR, add_output_gradient_):
            with graph.inserting_before(total):
                terms[1] = graph.call_function(shaped, (terms[1], list(total.meta["val"].shape)))
        graph.erase_node(total)
        found.append(terms[1 - earlier])
        total = terms[earlier]
    return [*found, total]


def shaped(gradient: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor | None:
    """An output's gradient, if there is one, in another shape of as many elements."""
    return None if gradient is None else gradient.reshape(shape)


def edge_of(tensor: Any) -> Edge | None:
    """Where autograd gathers the gradient of a tensor; None where it has none."""
    if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
        return None
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def used_elsewhere(roots: Sequence[Any], several: Iterable[Edge], call_of: Callable[[Any], Any]) -> bool:
    """Whether the backward from ``roots`` brings terms of a gradient from elsewhere than one call of a graph.

    Args:
        roots: tensors that are differentiated.
        several: edges of inputs of whose gradients a call gives several terms as a sum.
        call_of: of which call a node of autograd's graph is a gate; None: of none.
    """
    wanted = frozenset(several)
    found = [(edge, edge) for root in roots if (edge := edge_of(root)) in wanted]
    for function, edges in _users(roots, wanted):
        of: Any = call_of(function)
        found += [(edge, of or (function, k)) for k, edge in enumerate(edges) if edge is not None]
    return any(count > 1 for count in Counter(edge for edge, _ in set(found)).values())


def _users(roots: Any, wanted: Container[Any]) -> Iterator[tuple[Any, list[Edge | None]]]:
    """The nodes behind ``roots`` that give gradients to ``wanted`` edges; of all its edges, those that are wanted."""
    for function in nodes_behind(roots):
        edges = function.next_functions
        if any(edge in wanted for edge in edges):
            yield function, [edge if edge in wanted else None for edge in edges]


def within_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def nodes_behind(tensors: Any, ends: Container[Any] = ()) -> Iterator[Any]:
    """The nodes of autograd's graph that the backward of ``tensors`` (one or several) runs, up to ``ends``."""
    given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    waiting = [t.grad_fn for t in given if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        function = waiting.pop()
        if function in ends:
            continue
        yield function
        for following, _ in function.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
