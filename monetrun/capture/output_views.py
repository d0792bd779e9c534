"""Gradients of outputs that are views of other outputs (``y.T`` beside ``y``), added where eager adds them.

AOTAutograd makes such a view anew from the other output, outside of its graph: the view's gradient is a term of that
output's before the graph's backward begins. Eager adds it where the view was made: after the terms of all that has used
``y`` later in the forward. Sums of three terms then differ by rounding. Here the graph gives each such view once more,
as an output of its own (``_unsafe_view``) which nobody sees, and which gets the view's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from monetrun.capture.marks import AGAIN, GIVEN_APART
from monetrun.capture.storages import results_of


class GradientsOfViews:
    """Those of a call's outputs that go to the call's node past autograd, which refuses to put them in place of None.

    Attributes:
        kept: whether they are there after the node's backward has taken them.
    """

    def __init__(self) -> None:
        self.kept = False
        self._values: dict[int, tuple[int, torch.Tensor]] = {}  # by the node's output: in which backward, and which

    def take(self, place: int, gradient: torch.Tensor | None) -> None:
        """The gradient of the node's output ``place`` has come, in the backward that runs now."""
        self._values.pop(place, None)
        if gradient is not None:
            self._values[place] = torch._C._current_graph_task_id(), gradient

    def filled(self, of_outputs: Sequence[Any]) -> Sequence[Any]:
        """The gradients of the node's outputs, in the backward that runs now; a list is filled in place."""
        if not self._values:
            return of_outputs
        task, found = torch._C._current_graph_task_id(), of_outputs if isinstance(of_outputs, list) else [*of_outputs]
        for place, (of, gradient) in self._values.items():
            if of == task:
                found[place] = gradient
        if not self.kept:
            self._values.clear()
        return found

    def of(self, place: int) -> torch.Tensor | None:
        """The last gradient of the node's output ``place`` that is there."""
        return self._values.get(place, (0, None))[1]

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """In this context they stay there."""
        before, self.kept = self.kept, True
        try:
            yield
        finally:
            self.kept = before
            self._values.clear()

    def clear(self) -> None:
        """None is there any more."""
        self._values.clear()


@contextmanager
def views_apart(module: fx.GraphModule) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """In this context ``module``, one of TorchDynamo's graphs, is compiled.

    It keeps what it gives more, unless an error is raised.

    Yields:
        What makes of the compiled graph one that gives what the module gave before.
    """
    (output,) = module.graph.find_nodes(op="output")
    before, results = output.args, results_of(module.graph)
    late = _added_late(results)
    if not late:
        yield lambda compiled: compiled
        return
    more = []
    for node in (results[k] for k in late):
        with module.graph.inserting_before(output):  # what comes from outside is the first term of its gradient
            size = module.graph.call_method("size", (node,))
            more.append(module.graph.call_function(torch.ops.aten._unsafe_view.default, (node, size)))
        more[-1].meta = {name: value for name, value in node.meta.items() if name != "example_value"}
        more[-1].meta[GIVEN_APART] = True
    output.args = ((*results, *more),)
    module.recompile()
    try:
        yield lambda compiled: _without_more(compiled, len(results), late)
    except BaseException:
        output.args = before
        module.recompile()
        raise


def _added_late(results: list[Any]) -> list[int]:
    """Outputs that are views of a tensor of which other outputs are, too, and of which more was made after one of them.

    Eager adds the gradient of such a view after that of what was made later.
    """
    views: dict[int, list[int]] = {}  # by the storage
    for k, node in enumerate(results):
        if (value := _tensor(node)) is not None and value.requires_grad and value._is_view() and not value._version:
            views.setdefault(value.untyped_storage()._cdata, []).append(k)
    return sorted(k for key, places in views.items() if _is_used_later(key, places, results) for k in places)


def _is_used_later(storage: int, views: list[int], results: list[Any]) -> bool:
    """Whether something is made of ``storage`` after one of the ``views``, outputs that are not the only one of it."""
    first = min(results[k] for k in views)
    alike = [n for n in first.graph.nodes if (v := _tensor(n)) is not None and v.untyped_storage()._cdata == storage]
    if any(n.op == "placeholder" for n in alike) or len({n for n in results if n in alike}) == 1:
        return False
    users = (user for n in alike for user in n.users if user not in alike and user.op != "output")
    return any(first < user and (of := _tensor(user)) is not None and of.requires_grad for user in users)


def _tensor(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) and value.layout == torch.strided else None


def _without_more(compiled: Callable[..., Any], count: int, late: list[int]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        results = compiled(*arguments)
        for k, extra in zip(late, results[count:], strict=True):
            _give(results[k], extra, k)
        return results[:count]

    if hasattr(compiled, "_boxed_call"):
        call._boxed_call = compiled._boxed_call  # type: ignore[attr-defined]
    return call


def _give(view: torch.Tensor, extra: torch.Tensor, number: int) -> None:
    """Have ``extra``, an output of a compiled graph, get the gradient of ``view``, its result with this number."""
    node: Any = extra.grad_fn
    of: Any = view.grad_fn
    place = extra.output_nr
    again = None if node is None else node.metadata.get(AGAIN)
    if again is None or of is None or of is node:
        return
    of_views: GradientsOfViews = again.of_views

    def take(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        of_views.take(place, gradients[0])
        return (None,) * len(gradients)

    of.register_prehook(take)
    of.metadata[GIVEN_APART] = number
