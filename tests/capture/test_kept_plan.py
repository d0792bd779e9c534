"""A plan of a captured graph means the same after the order in which implementations are registered has changed."""

import torch

from monetrun.capture import joint as capture
from monetrun.core.plan import GraphPlan, Schedule, Step, plain_schedule
from support import zoo
from support.captured import captured


def names(graph, schedule):
    steps = (*schedule.forward, *schedule.backward)
    return [graph.operators[s.operator].implementations[s.implementation].name for s in steps]


def test_a_plan_runs_the_same_implementations_when_they_are_registered_in_another_order(monkeypatch):
    model, x = zoo.SmallResNet(channels=8, blocks=1), torch.randn(2, 3, 16, 16)
    graph = captured(model, x).graph
    registered = capture.registry.alternatives
    monkeypatch.setattr(
        capture.registry, "alternatives", lambda module: {n: a[::-1] for n, a in registered(module).items()}
    )
    other = captured(model, x).graph
    assert other.fingerprint != graph.fingerprint
    assert other.structural_fingerprint == graph.structural_fingerprint
    plain = plain_schedule(graph)

    def last_of_each(steps):
        return tuple(Step(s.operator, len(graph.operators[s.operator].implementations) - 1) for s in steps)

    schedule = Schedule(last_of_each(plain.forward), last_of_each(plain.backward))
    resolved = GraphPlan.of(graph, schedule).schedule_for(other)
    assert resolved != schedule
    assert names(other, resolved) == names(graph, schedule)
