"""Backward modules that give each gradient as soon as it is final, in an order that was asked for.

What communicates gradients can then start while the rest of the backward computes. The module's generated code becomes
a generator: it stops where a gradient is ready, and all before it in the order are.
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from monetrun.capture.marks import ONE_CALL_WITH_NEXT, STEP
from monetrun.core.plan import Step

# Runs a backward: yields a list with the gradients of each turn, to be emptied by who takes them, then returns all
# results, in which they are None.
Turns = Callable[[list[Any]], Generator[list[Any], None, Any]]


@dataclass(frozen=True, slots=True)
class InTurn:
    """A backward that gives its gradients in turn.

    Attributes:
        run: takes the backward's arguments in a list, and empties it.
        turns: for each turn the results' positions.
        after: for each turn the highest operator that runs before it, the last one of the backward if any has run; -1:
            none.
        count: of results.
    """

    run: Turns
    turns: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]
    count: int


def in_turn(module: fx.GraphModule, order: Sequence[int], inputs: Mapping[int, torch.Tensor]) -> InTurn:
    """A backward module of ``execute.build`` as one that gives its results in turn.

    A gradient is given after the last call that reads it: autograd keeps what it alone holds, and copies it otherwise.
    And after the last one that reads what it is the gradient of: a hook may change a weight once it has its gradient
    (an optimizer's step within the backward). What eager has from one call is given after the whole of it.

    Args:
        module: is left as it is.
        order: of the results' positions; results that are not in it are returned.
        inputs: by position, what the gradient is of, as the module's values have it: a part of the same storage.
    """
    graph = fx.Graph()
    results = list(graph.graph_copy(module.graph, {}))  # type: ignore[arg-type]
    _take_views_early(graph, results)
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    at = max((i for i, node in enumerate(nodes) if node.op == "placeholder"), default=-1)
    turns: list[tuple[int, list[int]]] = []
    others, read = _other_halves(nodes), _last_reads(nodes)
    for position in order:
        final = max(place[node] for node in (results[position], *results[position].users))
        given = results[position]
        final = max(final, others.get(given.args[0] if given.target is operator.getitem else given, 0))
        if (of := inputs.get(position)) is not None:
            storage, begin, end = _extent(of)
            reads = read.get(storage, ())
            final = max([final, *(p for p, other_begin, other_end in reads if other_begin < end and begin < other_end)])
        while final + 1 < len(nodes) and nodes[final + 1].target is operator.getitem:
            final += 1
        at = max(at, final)
        if not turns or turns[-1][0] != at:
            turns.append((at, []))
        turns[-1][1].append(position)
    graph.output(tuple(None if i in set(order) else result for i, result in enumerate(results)))
    for at, positions in turns:
        with graph.inserting_after(nodes[at]):
            given = graph.call_function(_box, tuple(results[i] for i in positions))
        with graph.inserting_after(given):
            graph.call_function(_give, (given,))
    by_turn = tuple(tuple(positions) for _, positions in turns)
    return InTurn(_generator(module, graph), by_turn, _last_operators(nodes, [at for at, _ in turns]), len(results))


def _last_operators(nodes: Sequence[fx.Node], places: Sequence[int]) -> tuple[int, ...]:
    """The highest operator up to each place: those of the backward come last, and run in their order."""
    steps = (node.meta.get(STEP) for node in nodes)
    highest = list(itertools.accumulate((-1 if step is None else step.operator for step in steps), max))
    return tuple(highest[place] if place >= 0 else -1 for place in places)


def _other_halves(nodes: Sequence[fx.Node]) -> dict[Any, int]:
    """The places of calls that eager makes together with the one before: by the first of the two."""
    found: dict[Any, int] = {}
    first: dict[int, fx.Node] = {}  # by the number of the operator that belongs to it
    for place, node in enumerate(nodes):
        step: Step | None = node.meta.get(STEP)
        if step is None:
            continue
        if (waiting := first.pop(step.operator, None)) is not None:
            found[waiting] = place
        if ONE_CALL_WITH_NEXT in node.meta:
            first[step.operator + 1] = node
    return found


def _last_reads(nodes: Sequence[fx.Node]) -> dict[int, list[tuple[int, int, int]]]:
    """By storage the places of calls that read it, also through views, and from which element to before which other."""
    found: dict[int, dict[tuple[int, int], int]] = {}
    for place, node in enumerate(nodes):
        for source in node.all_input_nodes if node.op == "call_function" else ():
            value = source.meta.get("val")
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                storage, begin, end = _extent(value)
                found.setdefault(storage, {})[begin, end] = place
    return {storage: [(place, *span) for span, place in spans.items()] for storage, spans in found.items()}


def _extent(value: torch.Tensor) -> tuple[int, int, int]:
    """A tensor's storage, and the elements that it spans there: parameters may be parts of one."""
    begin = int(value.storage_offset())
    last = int(sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)))
    return value.untyped_storage()._cdata, begin, begin + last + 1 if value.numel() else begin


def _take_views_early(graph: fx.Graph, results: Sequence[Any]) -> None:
    """Move the views that are results right behind what they are views of: ``execute.build`` has them at the end."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for result in results:
        chain = []
        while isinstance(result, fx.Node) and _is_view(result):
            chain.append(result)
            result = result.all_input_nodes[0]
        for view in reversed(chain):
            (source,) = view.all_input_nodes
            while source.next.target is operator.getitem and place[source.next] < place[view]:
                source = source.next
            source.append(view)


def _is_view(node: fx.Node) -> bool:
    """Whether a call gives a view of its one argument."""
    if node.op != "call_function" or node.target is operator.getitem or len(node.all_input_nodes) != 1:
        return False
    value, of = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(of, torch.Tensor) or value.layout != torch.strided:
        return False
    return of.layout == torch.strided and value.untyped_storage()._cdata == of.untyped_storage()._cdata


def _box(*gradients: Any) -> list[Any]:
    return list(gradients)


def _give(gradients: list[Any]) -> None:
    """Stands in the graph for ``yield gradients``."""


def _generator(module: fx.GraphModule, graph: fx.Graph) -> Turns:
    """Runs ``graph``, in which each call of ``_give`` is a ``yield``; constants are ``module``'s."""
    forward = functools.cache(lambda: _compiled(graph))  # a recorded backward may give all at once
    return lambda arguments: forward()(module, arguments)


def _compiled(graph: fx.Graph) -> Callable[..., Generator[list[Any], None, Any]]:
    graph.set_codegen(_BoxedCodeGen())
    code = graph.python_code("self")
    stops = {name for name, value in code.globals.items() if value is _give}

    class Stops(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if isinstance(node.func, ast.Name) and node.func.id in stops:
                return ast.Yield(node.args[0])
            return self.generic_visit(node)

    names = dict(code.globals)
    tree = ast.fix_missing_locations(Stops().visit(ast.parse(code.src)))
    exec(compile(tree, "<backward in turn>", "exec"), names)
    return names["forward"]
