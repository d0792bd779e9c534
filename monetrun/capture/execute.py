"""Build the forward and backward modules that run a schedule.

Each is a plain fx graph in the schedule's order. fx's generated code frees every value after its last reader (boxed
calling convention: saved tensors too), so that the modules allocate and free exactly as ``simulate`` replays them,
without an interpreter and without any bookkeeping at run time.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from monetrun.capture.clock import Clock
from monetrun.capture.generated import generate_anew, graph_module
from monetrun.capture.gradient_terms import keep_mark
from monetrun.capture.joint import JointGraph
from monetrun.capture.lowering import lower, own_outputs
from monetrun.capture.marks import ONE_CALL_WITH_NEXT, STEP
from monetrun.capture.open_strides import TRACED_STRIDES
from monetrun.core.errors import ScheduleError
from monetrun.core.graph import FORWARD, Costs, extra_share
from monetrun.core.plan import Schedule, Step
from monetrun.core.regions import second_runs
from monetrun.ops import replay
from monetrun.ops.registry import Call

aten = torch.ops.aten
monet = torch.ops.monet

_ON_CTX = "saved_tensor_with_no_vc_check"  # AOTAutograd's mark in a placeholder's meta
_EXTRA = "monetrun_extra_share"  # in a call's: see ``_Builder._extra_share``


@dataclass
class _Pass:
    """One of the two graphs while it is being built.

    Attributes:
        graph: the new fx graph.
        values: joint node -> the node of ``graph`` that now holds its value.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)


def build(joint: JointGraph, schedule: Schedule, costs: Costs | None = None) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two modules of ``schedule``, in AOTAutograd's calling convention.

    The forward takes the primals and returns the outputs, then the saved values; the backward takes the saved values,
    then the tangents, and returns the gradients.

    Args:
        joint: the captured graph.
        schedule: one that ``simulate`` accepts for ``joint.graph``.
        costs: of the graph, for ``timed``: with them it also counts implementations that take longer than the default.

    Raises:
        ScheduleError: a step reads what nothing before it has written.
    """
    return _Builder(joint, schedule, costs).build()


class _Builder:
    def __init__(self, joint: JointGraph, schedule: Schedule, costs: Costs | None) -> None:
        self.joint = joint
        self.schedule = schedule
        self.costs = costs
        self.views = _views_by_storage(joint)
        self.holds = schedule.holds_by_step()
        self.holding_device = _holding_device(joint)
        self.operator_of = {node: i for i, node in enumerate(joint.nodes)}
        self.forward = _Pass()
        self.backward = _Pass()
        self.saved: list[fx.Node] = []
        # second runs that the plain step has, too: of the script's checkpoints
        self.in_plain = Counter(i for operators in second_runs(joint.graph).values() for i in operators)
        self.placeholders: dict[fx.Node, fx.Node] = {}

    def build(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint, into = self.joint, self.forward
        for node in joint.primals:
            into.values[node] = _copy(into.graph, node)
        for number, step in enumerate(self.schedule.forward):
            with self._holding(into, number):
                self._run(into, step, self._load_forward, again=False)
        outputs = [self._output(into, n, self._load_forward) for n in joint.outputs]

        # the backward is built before the forward's outputs: what it reads is what the forward saves
        for number, step in enumerate(self.schedule.backward, len(self.schedule.forward)):
            again = joint.graph.operators[step.operator].phase == FORWARD
            with self._holding(self.backward, number):
                self._run(self.backward, step, self._load_backward, again=again)
        gradients = [self._output(self.backward, n, self._load_backward) for n in joint.gradients]
        self.backward.graph.output(tuple(gradients))

        # AOTAutograd takes the last ones for what a script's autograd.Function keeps on its ctx: inputs, unchecked
        self.saved.sort(key=lambda n: bool(n.meta.get(_ON_CTX, False)) and n.op == "placeholder")
        saved = [self._output(into, n, self._load_forward) for n in self.saved]
        into.graph.output((*outputs, *saved))
        for state in into.graph.find_nodes(op="call_function", target=monet.generator_state.default):
            if not state.users:  # no random operator runs again with it
                into.graph.erase_node(state)
        return self._module(into.graph, len(outputs)), self._module(self._with_inputs())

    def _module(self, graph: fx.Graph, outputs: int = 0) -> fx.GraphModule:
        lower(graph)
        own_outputs(graph, outputs)
        graph.lint()
        return graph_module(self.joint.module, graph)

    def _with_inputs(self) -> fx.Graph:
        """The backward's graph with its placeholders first: the saved values in order, then the tangents."""
        body = self.backward.graph
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.saved:
            copies[self.placeholders[node]] = _placeholder(graph, node)
        for node in self.joint.tangents:
            new = _placeholder(graph, node)
            if node in self.placeholders:
                copies[self.placeholders[node]] = new
        result: Any = None
        for node in body.nodes:
            if node.op == "output":
                result = fx.map_arg(node.args[0], copies.__getitem__)
            elif node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(result)
        return graph

    def _load_forward(self, node: fx.Node) -> fx.Node:
        return self._load(self.forward, node, missing=None)

    def _load_backward(self, node: fx.Node) -> fx.Node:
        return self._load(self.backward, node, missing=self._saved)

    def _saved(self, node: fx.Node) -> fx.Node:
        """A placeholder of the backward for a value that the forward saves, or for a tangent."""
        if node not in self.placeholders:
            self.placeholders[node] = _placeholder(self.backward.graph, node)
            if node not in self.joint.tangents:
                self.saved.append(node)
        return self.placeholders[node]

    def _load(self, into: _Pass, node: fx.Node, missing: Callable[[fx.Node], fx.Node] | None) -> fx.Node:
        """The node of ``into`` that holds the value of the joint graph's ``node``, adding views of it as needed."""
        if node in into.values:
            return into.values[node]
        if node.op == "get_attr":
            into.values[node] = _copy(into.graph, node)
        elif node not in self.operator_of and node.op == "call_function" and self._sources_present(into, node):
            arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda a: self._load(into, a, missing))
            into.values[node] = _call(into.graph, node, node.target, arguments, keywords)
        elif missing is None:
            raise ScheduleError(f"{node.name} is read before it is written")
        else:
            into.values[node] = missing(node)
        return into.values[node]

    def _sources_present(self, into: _Pass, node: fx.Node) -> bool:
        """Whether the base of the view ``node`` is in this pass; a view of a saved value is saved itself.

        Views of inputs are taken again rather than saved: that costs nothing, and the input is the saved value.
        """
        for source in node.all_input_nodes:
            if source in into.values or source.op in ("get_attr", "placeholder"):
                continue
            if source in self.operator_of or not self._sources_present(into, source):
                return False
        return True

    def _run(self, into: _Pass, step: Step, load: Callable[[fx.Node], fx.Node], *, again: bool) -> None:
        node = self.joint.nodes[step.operator]
        call = self.joint.calls[step.operator, step.implementation] if step.implementation else Call.of(node)
        if again:
            call = replay.second_run(node, call)
        arguments, keywords = fx.map_arg((call.args, call.kwargs), load)
        new = into.graph.call_function(call.target, arguments, keywords)
        new.meta = _metadata(node)
        in_plain = again and self.in_plain[step.operator] > 0
        self.in_plain[step.operator] -= in_plain
        new.meta[_EXTRA] = self._extra_share(step, again and not in_plain)
        new.meta[STEP] = step
        keep_mark(new, node, call.args)
        written = self.joint.graph.operators[step.operator].outputs
        # a kept tensor that is written again is a copy without readers: they use the first one
        stale = {t for t in written if not (again and self.joint.graph.tensors[t].kept)}
        for tensor in stale:
            for view in self.views.get(tensor, ()):
                into.values.pop(view, None)
        if self.joint.storage.get(node, None) in {None, *stale}:
            into.values[node] = new
        # unpack tuples at once, so that elements without readers are freed with the tuple
        for user in node.users:
            if user.target is not operator.getitem or self.joint.storage.get(user, None) not in stale:
                continue
            index: Any = user.args[1]
            if call.only is not None:
                into.values.update({user: new} if index == call.only else {})
            elif replay.gives(node, call, index):
                into.values[user] = _call(into.graph, user, operator.getitem, (new, user.args[1]), {})
        if node not in self.joint.storage:
            into.values.pop(node)

    @contextlib.contextmanager
    def _holding(self, into: _Pass, number: int) -> Iterator[None]:
        """Around the call of a step: allocate what the schedule holds beside it, and free it after that."""
        of_bytes: dict[str, Any] = {"dtype": torch.uint8, "device": self.holding_device}
        sizes = self.holds.get(number, ()) if self.holding_device is not None else ()
        held = [into.graph.call_function(aten.empty.memory_format, ([nbytes],), of_bytes) for nbytes in sizes]
        yield
        for node in held:
            into.graph.call_function(aten.alias.default, (node,))  # its last reader

    def _extra_share(self, step: Step, again: bool) -> float:
        """See ``graph.extra_share``."""
        seconds = () if self.costs is None else self.costs.seconds[step.operator]
        return extra_share(self.joint.graph.operators[step.operator], seconds, step.implementation, again=again)

    def _output(self, into: _Pass, node: Any, load: Callable[[fx.Node], fx.Node]) -> Any:
        return load(node) if isinstance(node, fx.Node) else node


def _holding_device(joint: JointGraph) -> torch.device | None:
    """The CUDA device of the graph's inputs, on which holds decide what lies where; None elsewhere."""
    values = (node.meta.get("val") for node in joint.primals if isinstance(node, fx.Node))
    return next((value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda), None)


def _views_by_storage(joint: JointGraph) -> dict[int, list[fx.Node]]:
    """The nodes that give a tensor or views of it, several at once (``split``) too."""
    operators = set(joint.nodes)
    views: dict[int, dict[fx.Node, None]] = {}
    for node, tensor in joint.storage.items():
        of = views.setdefault(tensor, {})
        of[node] = None
        several = node.args[0] if node.target is operator.getitem else None
        if isinstance(several, fx.Node) and several not in operators:
            of[several] = None
    return {tensor: list(of) for tensor, of in views.items()}


def _metadata(node: fx.Node) -> dict[str, Any]:
    keep = ("val", "tensor_meta", "nn_module_stack", "stack_trace", "desc", "partitioner_tag")
    return {k: v for k, v in node.meta.items() if k in (*keep, TRACED_STRIDES, ONE_CALL_WITH_NEXT)}


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new = graph.node_copy(node, lambda n: n)
    new.meta = dict(node.meta)
    return new


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new = graph.placeholder(node.name)
    new.meta = dict(node.meta)
    return new


def _call(graph: fx.Graph, node: fx.Node, target: Any, arguments: Any, keywords: Any) -> fx.Node:
    new = graph.call_function(target, arguments, keywords)
    new.meta = _metadata(node)
    return new


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A callable that takes its inputs in a list and empties it, so that each input is freed after its last reader."""
    generate_anew(module, _BoxedCodeGen())
    forward = module.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


# ---- measuring recomputation


class Stopwatch:
    """Adds up the seconds between its starts and stops.

    Args:
        clock: marks moments; they are read later, where that would wait for the device.

    Attributes:
        stops: how many there were.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._seconds = 0.0
        self.stops = 0

    def start(self) -> None:
        """Start to count."""
        self._started = self._clock.mark()

    def stop(self) -> None:
        """Stop, and add the time since ``start``."""
        self._spans.append((self._started, self._clock.mark()))
        self.stops += 1

    def spans(self) -> list[float]:
        """The seconds of each, in order, before ``seconds`` has added them up."""
        return [self._clock.seconds(start, end) for start, end in self._spans]

    @property
    def seconds(self) -> float:
        """The sum; waits until the device has come to the last stop.

        Raises:
            RuntimeError: the device has failed meanwhile.
        """
        for start, end in self._spans:
            self._seconds += self._clock.seconds(start, end)
        self._spans.clear()
        return self._seconds


def timed(module: fx.GraphModule, stopwatch_of: Callable[[float], Stopwatch]) -> fx.GraphModule | None:
    """A copy of a module of ``build`` in which a stopwatch runs while it does what the plain step does not do.

    Args:
        module: the forward or the backward.
        stopwatch_of: gives the stopwatch for calls of which this share is extra: all of what runs again, and of an
            implementation what it takes longer than the default.

    Returns:
        None where nothing is extra.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    running = 0.0
    for node in module.graph.nodes:
        share = node.meta.get(_EXTRA, running if node.op == "call_function" else 0.0)
        if node.op != "placeholder" and share != running:
            if running:
                graph.call_function(stopwatch_of(running).stop)
            if share:
                graph.call_function(stopwatch_of(share).start)
            running = share
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph_module(module, graph) if any(n.meta.get(_EXTRA) for n in module.graph.nodes) else None


def timed_by_step(
    module: fx.GraphModule, stopwatch_of: Callable[[Step], Stopwatch], begins: Callable[[], None]
) -> fx.GraphModule:
    """A copy of a module of ``build`` in which a stopwatch runs during each step of the schedule.

    Args:
        module: the forward or the backward.
        stopwatch_of: gives the stopwatch of a step; one that the schedule has several times gets the same one.
        begins: called when the module is.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    begun = False
    for node in module.graph.nodes:
        step: Step | None = node.meta.get(STEP)
        if node.op != "placeholder" and not begun:
            graph.call_function(begins)
            begun = True
        if step is not None:
            graph.call_function(stopwatch_of(step).start)
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if step is not None:
            graph.call_function(stopwatch_of(step).stop)
    return graph_module(module, graph)
