"""Gives parameters their gradients in the order of the plain backward.

A captured graph's backward is one node of autograd's graph: by itself it gives all gradients at once, when it has
ended, and autograd passes them on in an order of its own. What communicates gradients depends on both:
DistributedDataParallel reduces a bucket as soon as its last gradient is there, so that this hides behind the rest of
the backward; and it fills its buckets anew in the order in which the first gradients arrived, and with three ranks or
more the buckets decide how sums round.

While the joint graph is traced, autograd runs the plain backward: there the order is observed. To keep it, a call of
the graph gets aliases of its parameters from *gates*, nodes of autograd's graph: one for each turn of the backward
(``in_turn``), the last one made first. Autograd runs the backward of what was made last first, and accumulates a
gradient that has passed its gate before the next gate runs. The node of the graph only begins the backward; each gate
continues it up to the gradients of its turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.capture.in_turn import InTurn, Turns, in_turn
from monetrun.capture.joint import JointGraph


class GradientOrder:
    """The order in which one joint graph's inputs get their gradients in the plain backward.

    Attributes:
        results: positions among the backward's results; empty until the graph is captured, and where the order of some
            cannot be kept.
        turns: the inputs whose gradients the backward gives in each turn; empty: it gives all at once.
    """

    def __init__(self) -> None:
        self.results: tuple[int, ...] = ()
        self.turns: tuple[tuple[int, ...], ...] = ()
        self._input_of: dict[int, int] = {}  # position among the graph's inputs, by that among the results
        self._arrived: list[int] = []
        self._absent: list[bool] = []

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """While tracing: observe the plain backward."""
        original = torch.autograd.grad

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            arrived: list[int] = []
            handles = [t.register_hook(lambda _, k=k: arrived.append(k)) for k, t in enumerate(inputs)]  # type: ignore[misc]
            try:
                gradients = original(outputs, inputs, *args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()
            self._arrived, self._absent = arrived, [g is None for g in gradients]
            return gradients

        torch.autograd.grad = grad
        try:
            yield
        finally:
            torch.autograd.grad = original

    def captured(self, joint: JointGraph) -> None:
        """The observed backward is that of ``joint``: find its results, and the inputs that they are gradients of."""
        pairs = enumerate(zip(joint.primals, joint.gradients, strict=False))
        present = [(k, node) for k, (node, gradient) in pairs if gradient is not None]
        place = {k: i for i, k in enumerate(k for k, absent in enumerate(self._absent) if not absent)}
        if len(place) != len(present):
            return  # gradients of something else than inputs
        arrived = [present[place[k]] for k in self._arrived if k in place]
        inputs = [(k, getattr(node.meta.get("desc"), "idx", None)) for k, node in arrived]
        found = {k: i for k, i in inputs if i is not None}
        if len(found) == len(present):
            self._input_of, self.results = found, tuple(found)

    def in_turn(self, module: fx.GraphModule) -> InTurn | None:
        """The backward ``module`` by turns, for a graph that is called behind gates; None where that is of no use."""
        if not self.results or not communicates():
            return None
        backward = in_turn(module, self.results)
        self.turns = tuple(tuple(self._input_of[k] for k in turn) for turn in backward.turns)
        return backward

    def by_turns(self, backward: InTurn, run: Turns) -> Callable[[list[Any]], Any]:
        """What AOTAutograd calls as the backward: it begins ``run``, and the gates of the call continue it.

        Args:
            backward: in the order of ``results``, which are all that it gives.
            run: runs it.
        """

        def begin(arguments: list[Any]) -> Any:
            call, gradients = _call_of_this_backward(), run(arguments)
            if call is None:
                return _at_once(backward, gradients)
            call.begin(gradients, len(backward.turns))
            return (None,) * backward.count

        begin._boxed_call = True  # type: ignore[attr-defined]
        return begin

    def kept(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which takes the graph's inputs; if its backward gives gradients by turns, behind gates."""

        def gated(*inputs: Any) -> Any:
            return run(*(_behind_gates(inputs, self.turns) if self.turns else inputs))

        return gated


def communicates() -> bool:
    """Whether gradients may go to other ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class _Call:
    """One call of a graph whose backward gives gradients by turns."""

    def __init__(self) -> None:
        self._gradients: Generator[list[Any], None, Any] | None = None
        self._given: list[list[Any]] = []  # of the turns so far; empty once its gate has taken them
        self._turns = 0

    def begin(self, gradients: Generator[list[Any], None, Any], turns: int) -> None:
        """The node of the graph runs; its gates run after it."""
        self._gradients, self._given, self._turns = gradients, [], turns

    def take(self, turn: int) -> tuple[Any, ...] | None:
        """Run the backward up to the gradients of ``turn``; None where it has not begun."""
        if self._gradients is None:
            return None
        while len(self._given) <= turn:
            self._given.append(next(self._gradients))
        if turn == self._turns - 1:
            for _ in self._gradients:
                raise AssertionError("a backward of more turns than it has gates")
        found = tuple(self._given[turn])
        self._given[turn].clear()
        return found


class _Gate(torch.autograd.Function):
    """Gives a call aliases of inputs; its backward continues the call's up to the gradients of these inputs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, turn: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.turn = call, turn
        return tuple(torch.ops.aten.alias.default(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        taken = ctx.call.take(ctx.turn)
        return (None, None, *(gradients if taken is None else taken))


def _behind_gates(inputs: Sequence[Any], turns: Sequence[Sequence[int]]) -> Sequence[Any]:
    given = list(inputs)
    if not torch.is_grad_enabled() or not all(given[i].requires_grad for turn in turns for i in turn):
        return inputs
    call = _Call()
    for k in reversed(range(len(turns))):
        for i, alias in zip(turns[k], _Gate.apply(call, k, *(given[i] for i in turns[k])), strict=True):  # type: ignore[no-untyped-call]
            given[i] = alias
    return given


def _call_of_this_backward() -> _Call | None:
    """The call whose backward autograd runs now; None where its inputs have no gates."""
    node: Any = torch._C._current_autograd_node()
    behind = () if node is None else (function for function, _ in node.next_functions)
    return next((gate.call for gate in behind if getattr(gate, "_forward_cls", None) is _Gate), None)


def _at_once(backward: InTurn, gradients: Generator[list[Any], None, Any]) -> tuple[Any, ...]:
    """All results of a backward."""
    results: list[Any] = [None] * backward.count
    for positions, given in zip(backward.turns, gradients, strict=True):
        for k, gradient in zip(positions, given, strict=True):
            results[k] = gradient
    return tuple(results)
