"""Steps of modules that FSDP2 shards, as small as they can be."""

from __future__ import annotations

from monetrun.core.event import FREE, GATHER, REDUCE, WAIT, Action
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.sharding import ShardedModule, Sharding
from monetrun.core.step import OUTSIDE, Event, StepRecord

SIZE = 100  # bytes of a module's parameters


def outside(delta, peak, action, *requests):
    return Event(OUTSIDE, -1, delta, peak, action=action, requests=requests)


def forward_of(i, freed, requests=()):
    return [
        outside(SIZE, SIZE, Action(GATHER, i), *requests[0:1]),
        outside(0, SIZE, Action(WAIT, i), *requests[1:3]),
        Event(FORWARD, 0),
        outside(-SIZE, 0, Action(FREE, i, unless_kept=True), *requests[3:]) if freed else Event(OUTSIDE),
    ]


def sharded_record(modules=2, kept=False, requests=False, of=None):
    """A step of modules that are alike; the all-gathers of the backward are begun one module ahead.

    ``of``: the graph of each, and its costs; by default a forward of 1 s and a backward of 2 s.
    """
    graph, costs = of or plain_graph()
    numbers = [()] * modules
    if requests:  # a module's buffer is 2 i + 1 and its parameters 2 i + 2, which are freed after its forward
        numbers = [(SIZE + 1, SIZE, -(2 * i + 1), -(2 * i + 2)) for i in range(modules)]
    events = [e for i in range(modules) for e in forward_of(i, True, numbers[i])]
    next_number = 2 * modules
    gathered = {}
    events.append(again(modules - 1, GATHER, requests))
    for i in reversed(range(modules)):
        if requests:
            next_number += 2
            gathered[i] = next_number
            # buffer, parameters, buffer freed: the buffer of the module before is requested after that
            events.append(outside(0, SIZE, Action(WAIT, i, unless_kept=True), SIZE, -(next_number - 1)))
        else:
            events.append(again(i, WAIT))
        if i and not requests:
            events.append(again(i - 1, GATHER))
        events.append(Event(BACKWARD, 0))
        events.append(outside(-SIZE, 0, Action(REDUCE, i), *((-gathered[i],) if requests else ())))
        if i and requests:
            events.append(again(i - 1, GATHER, requests))
    named = tuple(ShardedModule(f"0:net.{i}", SIZE, SIZE, 2, kept=kept) for i in range(modules))
    made = StepRecord((graph,), (costs,), tuple(events), 0, {}, "cpu", "", sharding=Sharding(named, tuple(events)))
    made.check()
    return made


def plain_graph():
    tensors = (Tensor(0, 8), Tensor(1, 8, kept=True))
    operators = (
        Operator(0, "op0", "op", FORWARD, (0,), (Implementation("default", ()),)),
        Operator(1, "op1", "op", BACKWARD, (1,), (Implementation("default", (0,)),)),
    )
    return Graph("net", tensors, operators), Costs("cpu", ((1.0,), (2.0,)), ((0,),) * 2)


def again(i, kind, requests=False):
    delta = SIZE if kind == GATHER else 0
    return outside(delta, SIZE, Action(kind, i, unless_kept=True), *((SIZE + 1,) if requests else ()))
