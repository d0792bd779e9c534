"""Gradients for tensors that a compiled call has given, of what depends on them through that call's other outputs.

To autograd the outputs of one compiled graph are side by side: ``torch.autograd.grad(image.sum(), latents)``, where a
model has given both, finds no way from the one to the other, or only part of the ways. Here what lies between is run
again, as TorchDynamo traced it, from the output on that the gradient is for. Where the script watches such a gradient
(``register_hook``, ``retain_grad``), all of the call is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from monetrun.capture.again import ABSENT, Again, again_of, run_from
from monetrun.capture.marks import TWIN
from monetrun.capture.storages import results_of, version_of
from monetrun.core.errors import CaptureFailed

Grad = Callable[..., Any]


def node_of(tensor: Any) -> Any:
    """The autograd node of the call that gave ``tensor``, also where the tensor is a view apart (``output_views``)."""
    node: Any = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
    if node is not None and TWIN in node.metadata:
        while again_of(node) is None:
            node = node.next_functions[0][0]
    return node


def given_by_calls(inputs: Any) -> dict[int, tuple[Again, int]]:
    """Which of ``inputs`` compiled calls gave, and what gave them: where another output depends on it.

    Args:
        inputs: of ``torch.autograd.grad``.

    Returns:
        By the place in ``inputs``: the call, and which of its results.
    """
    found = {}
    for place, tensor in enumerate(listed(inputs)):
        if (node := node_of(tensor)) is None or (again := again_of(node)) is None:
            continue
        of: Any = tensor.grad_fn
        number = of.metadata.get(TWIN)
        if number is None and tensor.output_nr in again.places:
            number = again.places.index(tensor.output_nr)
        if number is not None and _depending(again.module, number):
            found[place] = again, number
    return found


def grad(
    plain: Grad,
    given: dict[int, tuple[Again, int]],
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """``torch.autograd.grad``, with all ways from ``outputs`` to those ``inputs`` that are ``given`` by calls.

    ``plain`` is torch's own, which takes the same from ``outputs`` on; ``given`` is from ``given_by_calls``.

    Raises:
        CaptureFailed: an input of a call is gone that it takes to run it again.
    """
    options = {"retain_graph": retain_graph, "create_graph": create_graph, "is_grads_batched": is_grads_batched}
    wanted = listed(inputs)
    besides: list[tuple[int, int, GradientEdge]] = []  # a place in ``wanted``, a result that depends on it, its edge
    for place, (again, number) in given.items():
        for other in _depending(again.module, number):
            if (output_nr := again.places[other]) >= 0:
                besides.append((place, other, GradientEdge(node_of(wanted[place]), output_nr)))
    edges = [edge for _, _, edge in besides]
    found, of_views = _with_those_of_views(plain, outputs, [*wanted, *edges], grad_outputs, given, options)
    arriving = {}
    for (place, other, edge), gradient in zip(besides, found[len(wanted) :], strict=True):
        gradient = of_views[place].get(edge.output_nr) if gradient is None else gradient
        if gradient is not None:
            arriving[place, other] = gradient
    del found[len(wanted) :]
    for place, (again, number) in given.items():
        others = [other for of, other in arriving if of == place]
        if not others:
            continue
        # known are also results that do not depend on it: an input that is gone may be needed for them alone
        depending = {number, *_depending(again.module, number)}
        known = {n: wanted[p] for p, (other, n) in given.items() if other is again and n not in depending}
        further = plain(
            _results_from(again, {**known, number: wanted[place]}, others),
            [wanted[place]],
            [arriving[place, other] for other in others],
            **{**options, "retain_graph": create_graph},
        )[0]
        found[place] = further if found[place] is None else found[place] + further
    if any(g is None for g in found) and not allow_unused and not materialize_grads:
        return plain(outputs, inputs, grad_outputs, **options)  # torch's own error
    if materialize_grads:
        found = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]
    return tuple(found)


def _with_those_of_views(
    plain: Grad,
    outputs: Any,
    wanted: list[Any],
    grad_outputs: Any,
    given: Mapping[int, tuple[Again, int]],
    options: Mapping[str, Any],
) -> tuple[list[Any], dict[int, Mapping[int, torch.Tensor]]]:
    """What ``plain`` gives, and by the place in ``given``: what came for twins of views, by the node's output."""
    with contextlib.ExitStack() as stack:
        calls = {id(again): again.of_views for again, _ in given.values()}
        if options["is_grads_batched"]:  # what comes is of use within this backward alone
            if any(TWIN in tensor.grad_fn.metadata for tensor in (wanted[place] for place in given)):
                raise CaptureFailed("batched gradients for an output that is a view of another", "take them one by one")
            for of_views in calls.values():
                stack.callback(setattr, of_views, "pass_on", of_views.pass_on)
                of_views.pass_on = True
        heard = {number: stack.enter_context(of_views.listening()) for number, of_views in calls.items()}
        found = list(plain(outputs, wanted, grad_outputs, **options, allow_unused=True))
        return found, {place: dict(heard[id(again)]) for place, (again, _) in given.items()}


def watch(again: Again, number: int, hook: Callable[..., Any]) -> RemovableHandle:
    """Have ``hook`` called with the gradient of a call's result with this number (see ``run_again``)."""
    called = again.watched.setdefault(number, OrderedDict())
    handle = RemovableHandle(called)
    called[handle.id] = hook
    return handle


def retain(tensor: torch.Tensor, again: Again, number: int) -> None:
    """Have the gradient of ``tensor``, a call's result with this number, kept as its ``grad``."""
    kept = weakref.ref(tensor)

    def keep(gradient: torch.Tensor) -> None:
        if (found := kept()) is not None:
            found.grad = gradient if torch.is_grad_enabled() else gradient.detach()

    watch(again, number, keep)


def listed(tensors: Any) -> list[Any]:
    """As torch takes them: one or several. What can be read only once is left to torch."""
    if isinstance(tensors, (list, tuple)):
        return list(tensors)
    return [tensors] if isinstance(tensors, torch.Tensor) else []


def _depending(module: fx.GraphModule, number: int) -> list[int]:
    """Which other results of one of TorchDynamo's graphs depend on the one with this number."""
    results = results_of(module.graph)
    after = {results[number]}
    for node in module.graph.nodes:
        twin = TWIN in node.meta and node.args[0] is results[number]
        if not twin and not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    return [k for k, node in enumerate(results) if k != number and node is not results[number] and node in after]


def _results_from(again: Again, known: Mapping[int, torch.Tensor], others: Sequence[int]) -> list[Any]:
    """Results of a call that runs again, of which some are ``known`` by their number: the ``others``."""
    versions = list(map(version_of, known.values()))
    _, results, unknown = run_from(again, again.given(ABSENT), known)
    if versions != list(map(version_of, known.values())):
        raise CaptureFailed("gradients for an output that the model changes in place", "have the model give a copy")
    if not unknown.isdisjoint(others):
        raise CaptureFailed("an input of the model is gone that gradients for its outputs need", "keep it until then")
    return [results[other] for other in others]
