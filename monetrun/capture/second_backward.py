"""A second backward through one call of a compiled graph, for outputs that have nothing in common with the first ones.

To eager such outputs (an actor's and a critic's, a probe's on detached features) belong to several graphs, of which
each has its own backward. AOTAutograd makes one node of them, which frees what it has saved after its first backward.
Here the call runs again then, as it is, and the gradients are those of that run.

Where the script keeps the graph (``retain_graph``), the first backward writes over nothing that is saved. If it then
changes weights that only the first outputs depend on (an optimizer's step for the critic), eager's second backward does
not read them, but that node has saved them: there, too, the call runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.capture.absent_terms import is_written_over
from monetrun.capture.again import Again, again_of, gradients_of, run_from
from monetrun.capture.gradient_order import call_behind, through_gates
from monetrun.capture.gradient_terms import edge_of, nodes_behind
from monetrun.capture.output_gradients import is_tangent
from monetrun.core.errors import CaptureFailed

_REPEATED = "_monetrun_repeated"  # on a function's backward
_NONE = -1  # among the outputs whose backward has run: one that no gradient has reached


def sparing(module: fx.GraphModule, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """``run`` of the backward ``module``, on copies of what it writes over where the script keeps the graph.

    A schedule may write over a saved value that it reads for the last time.
    """
    placeholders = enumerate(module.graph.find_nodes(op="placeholder"))
    written = [k for k, node in placeholders if not is_tangent(node) and is_written_over(node)]
    if not written:
        return run

    def spared(arguments: list[Any]) -> Any:
        if _keeps_graph():
            for k in written:
                if isinstance(arguments[k], torch.Tensor):
                    arguments[k] = arguments[k].clone()
        return run(arguments)

    spared._boxed_call = True  # type: ignore[attr-defined]
    return spared


def _keeps_graph() -> bool:
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def repeat_backwards(function: Any) -> None:
    """Have AOTAutograd's ``function`` give what a second backward of a call asks for, where eager's graph has it.

    Autograd frees what a node has saved after its first backward, which may be for some of the node's outputs. To eager
    these are several graphs, where they have nothing in common.
    """
    once = function.backward
    if hasattr(once, _REPEATED):
        return

    def backward(node: Any, *gradients: Any) -> Any:
        again = again_of(node)
        if again is None:
            return once(node, *gradients)
        boxed = getattr(function, "boxed_grads_call", False)
        of_outputs = again.of_views.filled(gradients[0] if boxed else gradients)
        gradients = gradients if boxed else tuple(of_outputs)
        arriving = {place for place, gradient in enumerate(of_outputs) if gradient is not None}
        ends = set() if _keeps_graph() else arriving or {_NONE}
        of_others = again.freed and _is_freed(node) and not again.freed & arriving
        if of_others or (again.kept and not again.kept & arriving and again.weights_changed):
            given = _gradients_again(node, again, of_outputs)
            if given is not None:
                again.freed.update(ends)
                return given
        else:
            again.freed.update(ends)
        again.kept.update(arriving if _keeps_graph() else ())
        return once(node, *gradients)

    setattr(backward, _REPEATED, True)
    function.backward = staticmethod(backward)


def _is_freed(node: Any) -> bool:
    try:
        node._raw_saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


def _gradients_again(node: Any, again: Again, of_outputs: Sequence[Any]) -> tuple[Any, ...] | None:
    """What the backward of a second run of the call gives; None where eager's graph is freed, too.

    Raises:
        CaptureFailed: an input that the outputs depend on is gone or has been changed.
    """
    number_of = {place: number for number, place in enumerate(again.places) if place >= 0}
    places = [place for place, gradient in enumerate(of_outputs) if gradient is not None]
    if (call := call_behind(node)) is not None:
        call.pass_on()
    if not places:
        return (None,) * len(node.needs_input_grad)
    freed = again.freed - {_NONE}
    if any(place not in number_of for place in (*places, *freed)):
        return None  # a view of what the node gives: it is not among the results
    given, results, unknown = run_from(again, again.unchanged(), {})
    ends = {edge[0] for v in given if (edge := edge_of(v)) is not None}
    earlier, later = ({*nodes_behind([results[number_of[place]] for place in of], ends)} for of in (freed, places))
    if any(_saves(shared) for shared in earlier & later):
        return None
    is_unknown = not unknown.isdisjoint(number_of[place] for place in places)
    if is_unknown and not again.freed:
        return None  # torch says which tensor has been changed
    if again.apart(bool(freed or again.kept)) and is_unknown:
        raise CaptureFailed(
            "a second backward pass runs through a model, for other outputs than the first, and an input or a weight"
            " that they depend on has been changed or dropped since the forward",
            "call the parts of the model one by one, or differentiate the sum",
        )
    by_edge = gradients_of(again, given, results, of_outputs)
    behind = [edge for edge in through_gates(node.next_functions) if edge[0] is not None]
    found = iter([by_edge.get(edge) for edge in behind])
    return tuple(next(found) if needed else None for needed in node.needs_input_grad)


def _saves(node: Any) -> bool:
    """Whether a backward frees something that the node has saved."""
    return hasattr(node, "_forward_cls") or any(name.startswith("_raw_saved") for name in dir(node))
