"""Minimum cuts: the cheapest choice of its kind, written down as schedules that are valid and near the budget."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import cut, greedy, hierarchical, tidy
from support.examples import examples
from support.random_graphs import joint_graphs
from support.small_graphs import conv_norm_relu, make

PLAIN = Options(seconds=0.3, gap=0.0, implementations=())


def priced(graph: Graph, costs: Costs, prices: np.ndarray, again: set[int]) -> float:
    """The cost of rerunning ``again`` and holding everything else that the backward part reads, or infinity."""
    ran = [op for op in graph.operators if op.plain]
    if any(not graph.operators[o].replayable for o in again):
        return float("inf")
    direct: dict[int, list[int]] = {}
    for op in ran:
        for t in op.inputs if op.phase == BACKWARD else ():
            direct.setdefault(t, []).append(op.id)
    wanted = set(direct).union(*(graph.operators[o].inputs for o in again))
    wanted = {t for t in wanted if not (graph.tensors[t].external or graph.tensors[t].kept)}
    seconds = sum(costs.seconds[o][0] for o in again)
    for t in wanted:
        op = graph.operators[graph.writer[t]]
        readers = [o for o in ran if o.phase == FORWARD and t in o.inputs]
        left = max([op.id, *(o.id for o in readers)])
        last = max(direct.get(t, [left]))
        siblings = [direct[u][0] for u in op.outputs if u in direct and not graph.tensors[u].kept]
        first = min(min(siblings, default=last), last)
        if op.id not in again:
            seconds += graph.tensors[t].nbytes * prices[left + 1 : first + 1].sum()
            if op.optional and op.replayable and all(o.optional for o in readers):
                seconds += costs.seconds[op.id][0]
        seconds += graph.tensors[t].nbytes * prices[first + 1 : last + 1].sum()
    return seconds


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_a_cut_is_the_cheapest_choice_of_what_to_recompute(data):
    graph, costs = data.draw(joint_graphs(max_forward=7))
    prices = np.array([data.draw(st.integers(0, 8)) / 64 for _ in graph.operators])
    plain = plain_schedule(graph)
    dropped = cut._Network(graph, costs, plain).cut(prices)
    again = {graph.writer[t] for t in dropped}
    forward = [op.id for op in graph.operators[: graph.forward_count] if op.plain]
    subsets = itertools.chain.from_iterable(itertools.combinations(forward, n) for n in range(len(forward) + 1))
    assert priced(graph, costs, prices, again) == pytest.approx(
        min(priced(graph, costs, prices, set(s)) for s in subsets), rel=1e-6, abs=1e-6
    )


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_dropped_tensors_are_recomputed_once_and_no_others_are(data):
    graph, costs = data.draw(joint_graphs())
    plain = plain_schedule(graph)
    replayable = [s.operator for s in plain.forward if graph.operators[s.operator].replayable]
    chosen = data.draw(st.lists(st.sampled_from(replayable), unique=True)) if replayable else []
    dropped = {t for o in chosen for t in graph.operators[o].outputs if not graph.tensors[t].kept}
    schedule = cut.dropping(graph, plain, dropped)
    again = [s.operator for s in schedule.backward if s.operator < graph.forward_count]
    assert simulate(graph, costs, schedule).seconds >= simulate(graph, costs, plain).seconds
    assert len(again) == len(set(again))
    assert set(again) <= {graph.writer[t] for t in dropped}
    assert [s for s in schedule.backward if s.operator >= graph.forward_count] == list(plain.backward)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_cuts_of_any_schedule_are_valid_schedules_with_its_implementations(data):
    graph, costs = data.draw(joint_graphs())
    plain = simulate(graph, costs, plain_schedule(graph))
    budget_bytes = data.draw(st.integers(0, plain.peak_bytes))
    base = greedy.solve(graph, costs, budget_bytes, Options(seconds=0.01)).schedule
    for schedule in cut.schedules(graph, costs, budget_bytes, Options(), base, rounds=3):
        simulate(graph, costs, schedule)  # raises where it is not valid
        allowed = {_ways(graph, step) for part in _parts(graph, base) for step in part}
        assert {_ways(graph, step) for step in schedule.forward + schedule.backward} <= allowed


def _ways(graph: Graph, step: Step) -> tuple[int, frozenset[int]]:
    """Operator and the implementation's reads: a cut decides neither on running in place nor between equal reads."""
    return step.operator, frozenset(graph.operators[step.operator].implementations[step.implementation].inputs)


def _parts(graph: Graph, base: Schedule | None) -> tuple[tuple[Step, ...], ...]:
    base = tidy.with_first_runs(graph, tidy.out_of_place(graph, base or plain_schedule(graph)))
    return base.forward, base.backward


def test_without_recomputation_there_are_no_cuts():
    graph, costs = conv_norm_relu(4)
    assert cut.schedules(graph, costs, 0, Options(recompute=False)) == []


def test_an_operator_read_only_by_backward_moves_there_at_no_cost():
    graph, costs = make("1 9 1 1", "f: > 0", "f: 0 > 1 p", "b: > 2", "b: 1 2 > 3")
    schedules = cut.schedules(graph, costs, 11, PLAIN)
    late = [s for s in schedules if s.forward == (Step(0),) and s.backward == (Step(2), Step(1), Step(3))]
    assert late
    assert simulate(graph, costs, late[0]).seconds == simulate(graph, costs, plain_schedule(graph)).seconds


def dense(blocks: int, layers: int) -> tuple[Graph, Costs]:
    """Blocks in which every layer reads all that were written before it in its block, concatenated anew."""
    nbytes: list[str] = []
    forward: list[str] = []
    backward: list[str] = []

    def tensor(size: int) -> int:
        nbytes.append(str(size))
        return len(nbytes) - 1

    last = tensor(8)
    forward.append(f"f: > {last}")
    reads: list[tuple[int, int]] = []
    for _ in range(blocks):
        features = [last]
        for _ in range(layers):
            joined = tensor(sum(int(nbytes[t]) for t in features))
            forward.append(f"f: {' '.join(map(str, features))} > {joined}")
            new = tensor(2)
            forward.append(f"f: {joined} > {new}")
            reads.append((joined, new))
            features.append(new)
        last = tensor(8)
        forward.append(f"f: {' '.join(map(str, features))} > {last}")
    gradient: int | None = None
    for joined, new in reversed(reads):
        after = tensor(2)
        backward.append(f"b: {joined} {new} {'' if gradient is None else gradient} > {after}")
        gradient = after
    graph, costs = make(" ".join(nbytes), *forward, *backward)
    return graph, Costs("unit", tuple((1.0,) for _ in graph.operators), costs.workspace_bytes)


def test_dense_blocks_are_dropped_whole():
    graph, costs = dense(4, 10)
    plain = simulate(graph, costs, plain_schedule(graph))
    budget_bytes = plain.peak_bytes // 5
    found = [simulate(graph, costs, s) for s in cut.schedules(graph, costs, budget_bytes, PLAIN)]
    within = [t.seconds for t in found if t.peak_bytes <= budget_bytes]
    assert min(within) <= plain.seconds + 40  # every concatenation again


@settings(max_examples=examples(20), deadline=None)
@given(joint_graphs(max_forward=7, max_backward=6), st.integers(3, 9))
def test_hierarchical_is_no_worse_than_any_cut_that_fits(problem, tenths):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    cuts = [simulate(graph, costs, s) for s in cut.schedules(graph, costs, budget_bytes, PLAIN)]
    best = min((t.seconds for t in cuts if t.peak_bytes <= budget_bytes), default=float("inf"))
    schedule = hierarchical.solve(graph, costs, budget_bytes, PLAIN).schedule
    found = float("inf") if schedule is None else simulate(graph, costs, schedule).seconds
    assert found <= best + 1e-9
