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
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.capture.gradient_terms import Arrival, Edge, arrivals, in_terms, mark_sums, used_elsewhere
from monetrun.capture.in_turn import InTurn, Turns, in_turn
from monetrun.capture.output_gradients import is_tangent
from monetrun.capture.storages import results_of
from monetrun.core.patched import patched


class GradientOrder:
    """The order in which one joint graph's inputs get their gradients in the plain backward.

    Args:
        in_terms: gradients that are sums over an input's uses can be given in their terms (see ``gradient_terms``).
        by_turns: gradients can be given by turns also where they do not communicate.

    Attributes:
        results: positions among the backward's results; empty until the graph is traced, and where the order of some
            cannot be kept.
        turns: the inputs whose gradients the backward gives in each turn; empty: it gives all at once.
        sums: the inputs whose gradients are sums over several uses.
    """

    def __init__(self, in_terms: bool = False, by_turns: bool = False) -> None:
        self.results: tuple[int, ...] = ()
        self.turns: tuple[tuple[int, ...], ...] = ()
        self.sums: tuple[int, ...] = ()
        self._in_terms, self._by_turns = in_terms, by_turns
        self._count = 0  # of the backward's results
        self._terms: dict[int, tuple[int, ...]] = {}  # positions of the terms that are further results, and of the sum
        self._input_of: dict[int, int] = {}  # position among the graph's inputs, by that among the results
        self._arrived: list[Arrival] = []
        self._absent: list[bool] = []
        self._of: dict[int, torch.Tensor] = {}  # what results are the gradients of

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """While tracing: observe the plain backward."""
        original = torch.autograd.grad

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with arrivals(outputs, inputs) as arrived:
                gradients = original(outputs, inputs, *args, **kwargs)
            self._arrived, self._absent = arrived, [g is None for g in gradients]
            return gradients

        with patched(torch.autograd, "grad", grad):
            yield

    def traced(self, module: fx.GraphModule, forward_outputs: int) -> None:
        """The observed backward is that of ``module``, a joint one: find its results, and the inputs they belong to."""
        gradients = results_of(module.graph)[forward_outputs:]
        primals = [n for n in module.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        present = [(k, n) for k, (n, g) in enumerate(zip(primals, gradients, strict=False)) if g is not None]
        traced = [k for k, absent in enumerate(self._absent) if not absent]
        inputs = {k: i for k, n in present if (i := getattr(n.meta.get("desc"), "idx", None)) is not None}
        if not len(traced) == len(present) == len(inputs) or any(k != i for k, i in inputs.items()):
            return  # gradients of something else than inputs, or inputs in another order
        place = {k: position for k, (position, _) in zip(traced, present, strict=True)}
        arrived = [(place[a.k], a.final) for a in self._arrived if a.k in place]
        if sorted(k for k, final in arrived if final) != sorted(inputs):
            return
        self._count, self._input_of = len(gradients), inputs
        counts = Counter(k for k, final in arrived if not final)
        sums = {k: n for k, n in counts.items() if n > 1 and mark_sums(gradients[k], n)}
        self.sums = tuple(inputs[k] for k in sums)
        for k, n in sums.items() if self._in_terms else ():
            first = self._count + len(self._input_of) - len(inputs)
            self._terms[k] = (*range(first, first + n - 1), k)
            self._input_of = {**self._input_of, **dict.fromkeys(self._terms[k], inputs[k])}
        waiting = {k: list(positions) for k, positions in self._terms.items()}
        taken = [k for k, final in arrived if final == (k not in waiting)]
        self.results = tuple(waiting[k].pop(0) if k in waiting else k for k in taken)

    def in_turn(self, module: fx.GraphModule, inputs: Sequence[fx.Node]) -> tuple[fx.GraphModule, InTurn | None]:
        """The backward ``module`` by turns, for a graph that is called behind gates; None where that is of no use.

        Also the module that gives the same results: ``module``, or one with terms in place of sums. ``inputs`` are
        those of the joint graph.
        """
        if not self.results or not (self._terms or self._by_turns or communicates()):
            return module, None
        given = [node.meta.get("val") for node in results_of(module.graph) if isinstance(node, fx.Node)]
        if len({value.device for value in given if isinstance(value, torch.Tensor)}) > 1:
            return module, None  # autograd has a thread for each device, of which one runs the backward
        module = in_terms(module, self._terms) if self._terms else module
        nodes = {getattr(node.meta.get("desc"), "idx", None): node for node in inputs}  # numbers are not among them
        own = {k: nodes[i] for k, i in self._input_of.items() if k < self._count and i in nodes}
        values = {k: node.meta.get("val") for k, node in own.items()}
        self._of = {k: v for k, v in values.items() if isinstance(v, torch.Tensor) and v.layout == torch.strided}
        backward = self.of_turns(module)
        self.turns = tuple(tuple(self._input_of[k] for k in turn) for turn in backward.turns)
        return module, backward

    def of_turns(self, module: fx.GraphModule) -> InTurn:
        """``module``, the backward that ``in_turn`` has given or that one with more calls, by turns."""
        return in_turn(module, self.results, self._of)

    def by_turns(self, backward: InTurn, run: Turns) -> Callable[[list[Any]], Any]:
        """What AOTAutograd calls as the backward: it begins ``run``, and the gates of the call continue it.

        Args:
            backward: in the order of ``results``, which are all that it gives.
            run: runs it.
        """

        def begin(arguments: list[Any]) -> Any:
            call, gradients = _call_of_this_backward(), run(arguments)
            if call is None:
                with torch._C._DisableAutocast():
                    return self._at_once(backward, gradients)
            call.begin(gradients, len(backward.turns))
            return (None,) * self._count

        begin._boxed_call = True  # type: ignore[attr-defined]
        return begin

    def _at_once(self, backward: InTurn, gradients: Generator[list[Any], None, Any]) -> tuple[Any, ...]:
        """All results of a backward, terms added up."""
        own = {i: k for k, i in self._input_of.items() if k < self._count}
        results: list[Any] = [None] * self._count
        for positions, given in zip(backward.turns, gradients, strict=True):
            for position, gradient in zip(positions, given, strict=True):
                k = own[self._input_of[position]]
                if gradient is not None:
                    results[k] = gradient if results[k] is None else results[k] + gradient
        return tuple(results)

    def at_once(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """``run``, a backward that gives all at once, for calls that may be behind gates."""

        def all_of_it(arguments: list[Any]) -> Any:
            if (call := _call_of_this_backward()) is not None:
                call.pass_on()
            return run(arguments)

        all_of_it._boxed_call = True  # type: ignore[attr-defined]
        return all_of_it

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While AOTAutograd compiles: if the graph's backward gives gradients by turns, it is called behind gates.

        They lie within what AOTAutograd calls it in: outputs that are views of inputs are not made behind them.
        """
        from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper  # imports Dynamo

        original = RuntimeWrapper.post_compile

        def post_compile(wrapper: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(wrapper, self._gated(run) if wrapper.trace_joint else run, *args, **kwargs)

        with patched(RuntimeWrapper, "post_compile", post_compile):
            yield

    def _gated(self, run: Callable[..., Any]) -> Callable[..., Any]:
        boxed = getattr(run, "_boxed_call", False)

        def gated(inputs: list[Any]) -> Any:
            given = list(_behind_gates(inputs, self.turns) if self.turns else inputs)
            inputs.clear()
            return run(given) if boxed else run(*given)

        gated._boxed_call = True  # type: ignore[attr-defined]
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
        self._instead: dict[tuple[int, int], Any] | None = None

    def begin(self, gradients: Generator[list[Any], None, Any], turns: int) -> None:
        """The node of the graph runs; its gates run after it."""
        self._gradients, self._given, self._turns = gradients, [], turns
        self._instead = None
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """Autograd's backward has ended: where it wanted some gradients only, the rest is not computed."""
        if self._gradients is not None:
            self._gradients.close()
        self._gradients, self._given = None, []

    def pass_on(self) -> None:
        """The node of the graph runs, and gives all at once: the gates pass it on."""
        self._gradients = self._instead = None

    def give_instead(self, gate: Any, place: int, gradient: Any) -> None:
        """The gates give other gradients than the backward's."""
        self._gradients, self._instead = None, self._instead or {}
        self._instead[id(gate), place] = gradient

    def take(self, gate: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        """Run the backward up to the gradients of a gate, which has got ``gradients``, and give them."""
        if self._instead is not None:
            return [self._instead.pop((id(gate), place), None) for place in range(len(gradients))]
        return gradients if self._gradients is None else self._take_turn(gate.turn)

    def _take_turn(self, turn: int) -> tuple[Any, ...]:
        assert self._gradients is not None
        with torch._C._DisableAutocast():  # see ``backward_autocast.off_in``
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
        # as inputs themselves they would be views, of which no base may change before the backward, read or not
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        taken = ctx.call.take(ctx, gradients)
        return (None, None, *taken, *(None for _ in gradients[len(taken) :]))


def _behind_gates(inputs: Sequence[Any], turns: Sequence[Sequence[int]]) -> Sequence[Any]:
    if not torch.is_grad_enabled() or not all([inputs[i].requires_grad for turn in turns for i in turn]):
        return inputs
    given, call = list(inputs), _Call()
    for k in range(len(turns) - 1, -1, -1):
        turn = turns[k]
        # an input of several terms has a gate for each, which all lie behind the graph: one behind the other
        later = [given[i] for i in dict.fromkeys(turn) if given[i] is not inputs[i]]
        aliases = _Gate.apply(call, k, *[inputs[i] for i in turn], *later)  # type: ignore[no-untyped-call]
        for i, alias in zip(turn, aliases, strict=False):
            alias.monetrun_owner = inputs[i]
            given[i] = alias
    return given


def owner(tensor: torch.Tensor) -> torch.Tensor:
    """The input of which ``tensor`` is an alias that lives for one call, or itself."""
    return getattr(tensor, "monetrun_owner", tensor)


def brings_other_terms(roots: Sequence[Any], sums: Iterable[Edge]) -> bool:
    """Whether, in the backward from ``roots``, more than one call of a graph gives terms of a gradient in ``sums``."""
    return used_elsewhere(roots, sums, lambda node: node.call if _is_gate(node) else None)


def _is_gate(node: Any) -> bool:
    return getattr(node, "_forward_cls", None) is _Gate


def through_gates(edges: Iterable[Edge]) -> Iterator[Edge]:
    """Where what a node gives along ``edges`` comes to, gates left out."""
    for function, place in edges:
        yield function.next_functions[place] if _is_gate(function) else (function, place)


def give_instead(edges: Iterable[Edge], gradients: Iterable[Any], others: Iterable[Any]) -> tuple[Any, ...]:
    """Have ``others`` in place of the ``gradients`` that a node gives along ``edges``: gives the node's own."""
    found = []
    for (function, place), gradient, other in zip(edges, gradients, others, strict=True):
        if _is_gate(function):
            function.call.give_instead(function, place, other)
        found.append(gradient if gradient is None else other)
    return tuple(found)


def _call_of_this_backward() -> _Call | None:
    """The call whose backward autograd runs now; None where its inputs have no gates."""
    return call_behind(torch._C._current_autograd_node())


def call_behind(node: Any) -> _Call | None:
    """The call whose backward an autograd node begins; None where its inputs have no gates."""
    behind = () if node is None else (function for function, _ in node.next_functions)
    return next((gate.call for gate in behind if _is_gate(gate)), None)
