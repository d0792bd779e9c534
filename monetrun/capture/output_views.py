"""Gradients of outputs that are views of one tensor (``y`` and ``y.T``), added where eager adds them.

AOTAutograd makes such a view anew from the tensor, outside of its graph. The gradients of all views are one, the
tensor's, before the graph's backward begins. Eager adds each view's where the view was made: after the terms of what
has used the tensor later in the forward. Sums of three terms then differ by rounding, and nobody can tell what came for
which output. Here the graph gives each such view once more, as an output of its own: its twin (``_unsafe_view``), which
nobody sees, and which gets the view's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from monetrun.capture.boxed import passed_on
from monetrun.capture.marks import AGAIN, TWIN
from monetrun.capture.storages import results_of


class GradientsOfViews:
    """Those that go to the twins of one call's outputs past autograd, which refuses to put them in place of None.

    Attributes:
        read_twice: whether something after the backward of the call's node reads them, too.
        pass_on: whether autograd has them add to what the views are made of, as if there were no twins.
    """

    def __init__(self) -> None:
        self.read_twice = self.pass_on = False
        self._values: dict[tuple[int, int], torch.Tensor] = {}  # by the backward that runs, and the node's output
        self._listening: list[dict[int, torch.Tensor]] = []

    def take(self, place: int, gradient: torch.Tensor) -> None:
        """The gradient of the node's output ``place`` has come."""
        self._values[torch._C._current_graph_task_id(), place] = gradient
        for found in self._listening:
            found[place] = gradient

    def filled(self, of_outputs: Sequence[Any], *, again: bool = False) -> Sequence[Any]:
        """The gradients of the node's outputs; a list is filled in place. ``again``: after the node's backward."""
        if not self._values:
            return of_outputs
        found = of_outputs if isinstance(of_outputs, list) else [*of_outputs]
        task = torch._C._current_graph_task_id()
        for key in [key for key in self._values if key[0] == task]:
            keep = self.read_twice and not again
            found[key[1]] = self._values[key] if keep else self._values.pop(key)
        return found

    @contextmanager
    def listening(self) -> Iterator[dict[int, torch.Tensor]]:
        """Those that come in this context, by the node's output. They are not there for a backward afterwards."""
        before, found = {*self._values}, dict[int, torch.Tensor]()
        self._listening.append(found)
        try:
            yield found
        finally:
            self._listening.remove(found)
            for key in self._values.keys() - before:
                del self._values[key]


@contextmanager
def views_apart(module: fx.GraphModule) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """In this context ``module``, one of TorchDynamo's graphs, is compiled, and has twins.

    It keeps them, unless an error is raised.

    Yields:
        What makes of the compiled graph one that gives what the module gave before.
    """
    graph, results = module.graph, results_of(module.graph)
    views = _views_of_one_tensor(graph, results)
    if not views:
        yield lambda compiled: compiled
        return
    (output,) = graph.find_nodes(op="output")
    before, added, twins = output.args, [], []
    for node in (results[k] for k in views):
        with graph.inserting_before(output):  # what comes from outside is the first term of its gradient
            size = graph.call_method("size", (node,))
            twin = graph.call_function(torch.ops.aten._unsafe_view.default, (node, size))
        twin.meta = {**{name: value for name, value in node.meta.items() if name != "example_value"}, TWIN: True}
        added += [size, twin]
        twins.append(twin)
    output.args = ((*results, *twins),)
    module.recompile()
    try:
        yield lambda compiled: _without_twins(compiled, len(results), views)
    except BaseException:
        output.args = before
        for node in reversed(added):
            graph.erase_node(node)
        module.recompile()
        raise


def twins_are_views(graph: fx.Graph) -> None:
    """Have the twins in a joint graph hold views, as they do when it runs.

    AOTAutograd's functional tensors have a copy there, where the view is of other strides than its shape tells.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._unsafe_view.default):
        value, of = node.meta["val"], node.all_input_nodes[0].meta["val"]
        if value.shape == of.shape and value.untyped_storage()._cdata != of.untyped_storage()._cdata:
            with of.fake_mode:
                node.meta["val"] = torch.ops.aten.alias.default(of)


def _views_of_one_tensor(graph: fx.Graph, results: list[Any]) -> list[int]:
    """Which of a graph's results are views of a tensor, no input, that another result is, or is a view of, too."""
    groups: dict[int, list[int]] = {}  # by the storage
    for k, node in enumerate(results):
        if (value := _differentiable(node)) is not None:
            groups.setdefault(value.untyped_storage()._cdata, []).append(k)
    for value in map(_differentiable, graph.find_nodes(op="placeholder")):
        if value is not None:
            groups.pop(value.untyped_storage()._cdata, None)
    several = (places for places in groups.values() if len({results[k] for k in places}) > 1)
    return sorted(k for places in several for k in places if results[k].meta["example_value"]._is_view())


def _differentiable(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.requires_grad:
        return None
    return value


def _without_twins(compiled: Callable[..., Any], count: int, views: list[int]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        results = compiled(*arguments)
        for k, twin in zip(views, results[count:], strict=True):
            _give(results[k], twin, k)
        return results[:count]

    return passed_on(call, compiled)


def _give(view: torch.Tensor, twin: torch.Tensor, number: int) -> None:
    """Have ``twin`` get the gradient of ``view``, a call's result with this number."""
    node: Any = twin.grad_fn
    of: Any = view.grad_fn
    place = twin.output_nr
    again = None if node is None else node.metadata.get(AGAIN)
    if again is None or of is None or of is node:
        return
    of_views: GradientsOfViews = again.of_views

    def take(gradients: tuple[Any, ...]) -> Any:
        if of_views.pass_on or gradients[0] is None:
            return None
        of_views.take(place, gradients[0])
        return (None,) * len(gradients)

    of.register_prehook(take)
    of.metadata[TWIN] = number
