"""The problems' format: reading, writing, and its rules, checked by code that is independent of the replay."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lib import instances
from monetrun.core.errors import ScheduleError, UsageError
from monetrun.core.graph import FORWARD
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import greedy
from support.instance_rules import measure
from support.paths import RECIPES
from support.random_graphs import joint_graphs, schedules


def problem() -> dict[str, object]:
    """Three layers: 10 bytes each, a random one in the middle, a late forward copy as captured graphs have it."""

    def op(name: str, reads: list[int], writes: list[int], backward: bool, seconds: float, random: bool = False):
        return dict(
            name=name, target="t", reads=reads, writes=writes, backward=backward, random=random, seconds=seconds
        )

    return {
        "name": "three",
        "tensor_bytes": [10, 10, 10, 1, 10, 10, 4, 1],
        "kept": [6],
        "gradient_bytes": 4,
        "plain_peak_bytes": 51,
        "seconds": 7.5,
        "best_known": {"1": {"budget_bytes": 51, "overhead": 0.0}, "0.8": {"budget_bytes": 41, "overhead": None}},
        "ops": [
            op("a", [], [0], False, 1.0),
            op("b", [0], [1, 3], False, 1.0, random=True),
            op("c", [1], [2], False, 1.0),
            op("dc", [2, 1], [4], True, 1.0),
            op("db", [4, 0], [5], True, 1.0),
            op("da", [5, 0], [6], True, 2.0),
            op("copy", [3], [7], False, 0.5),
        ],
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "three.json"
    path.write_text(json.dumps(problem()))
    return path


def test_reading_keeps_the_plain_peak_and_the_place_of_late_forward_operators(file):
    instance = instances.read(file)
    graph = instance.graph
    assert simulate(graph, instance.costs, plain_schedule(graph)).peak_bytes == measure(problem(), list(range(7)))[0]
    assert [op.phase == FORWARD for op in graph.operators] == [True] * 3 + [False] * 4
    assert [op.replayable for op in graph.operators] == [True, False, True, False, False, False, False]
    assert instance.budgets == {"1": 51, "0.8": 41}
    assert instance.best_known == {"1": 0.0, "0.8": None}


def test_writing_and_reading_again_gives_the_same_problem(file, tmp_path):
    instance = instances.read(file)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(instances.to_json(instance)))
    assert instances.read(again).graph == instance.graph
    assert instances.to_json(instances.read(again)) == instances.to_json(instance)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.pop("kept"), "no field 'kept'"),
        (lambda d: d["ops"][0].update(writes=[99]), "operator a has tensor 99, but there are 8"),
        (lambda d: d["ops"][0].update(reads=[2]), "reads tensor 2 before it is written"),
    ],
)
def test_a_file_of_another_kind_is_refused(file, change, why):
    data = problem()
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=why):
        instances.read(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.json cannot be read"):
        instances.read(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ([0, 1, 2, 3, 4, 5], "missing"),
        ([0, 2, 1, 3, 4, 5, 6], "not in order"),
        ([0, 1, 2, 3, 1, 4, 5, 6], "operator 1 must not run again"),
        ([0, 1, 2, 3, 4, 5, 5, 6], "operator 5 must not run again"),
        ([0, 0, 1, 2, 3, 4, 5, 6], "before the backward part"),
    ],
)
def test_the_checker_refuses_a_schedule_that_breaks_a_rule(schedule, why):
    with pytest.raises(ValueError, match=why):
        measure(problem(), schedule)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_checker_and_simulate_agree(data):
    graph, costs = data.draw(joint_graphs(in_place=False, alternatives=False, optional=False, workspace=False))
    schedule = data.draw(schedules(graph))
    try:
        timeline = simulate(graph, costs, schedule)
    except ScheduleError:
        return
    instance = instances.Instance(graph, costs, 0, 0, {}, {})
    peak_bytes, seconds = measure(instances.to_json(instance), instances.to_numbers(graph, schedule))
    assert (timeline.peak_bytes, timeline.seconds) == (peak_bytes, pytest.approx(seconds))
    plain = dataclasses.replace(schedule, backward=schedule.backward)
    assert instances.from_numbers(graph, instances.to_numbers(graph, plain)) == plain


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_found_schedules_obey_the_rules_and_the_budget(data):
    graph, costs = data.draw(joint_graphs(in_place=False, alternatives=False, optional=False, workspace=False))
    budget = data.draw(st.integers(0, simulate(graph, costs, plain_schedule(graph)).peak_bytes))
    solution = greedy.solve(graph, costs, budget, Options(seconds=0.02))
    if solution.schedule is not None:
        instance = instances.Instance(graph, costs, 0, 0, {}, {})
        assert measure(instances.to_json(instance), instances.to_numbers(graph, solution.schedule))[0] <= budget


def test_the_recipe_writes_a_schedule_for_every_budget(file, tmp_path):
    recipe = RECIPES / "plan_instances.py"
    spec = importlib.util.spec_from_file_location("plan_instances", recipe)
    plan_instances = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan_instances)
    arguments = [str(file), "--algorithm", "greedy", "--seconds", "0.05", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(plan_instances.main, arguments)
    assert result.exit_code == 0, result.output
    for column, budget in (("1", 51), ("0.8", 41)):
        written = json.loads((tmp_path / "out" / f"three.{column}.json").read_text())
        assert measure(problem(), written["schedule"])[0] <= budget
        assert written["overhead"] >= written["bound"] >= 0


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_captured_graph_is_the_same_problem_after_writing_and_reading(data):
    graph, costs = data.draw(joint_graphs(workspace=False))
    overwritten = {i.in_place_of for op in graph.operators for i in op.implementations} - {None}
    assume(not any(graph.tensors[t].external for t in overwritten))  # capture offers none
    instance = instances.problem(graph, costs)
    read = instances._instance(json.loads(json.dumps(instances.to_json(instance))))
    assert read.budgets == instance.budgets
    assert read.best_known == instance.best_known == dict.fromkeys(["0.8", "0.65", "0.5", "0.4", "0.33"])
    assert read.plain_peak_bytes == simulate(graph, costs, plain_schedule(graph)).peak_bytes
    schedule = data.draw(schedules(graph))
    try:
        expected = simulate(graph, costs, schedule)
    except ScheduleError:
        return
    assert simulate(read.graph, read.costs, schedule) == expected
