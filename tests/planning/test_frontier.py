"""The table of overhead against budget: its ends, its order, its budgets, and its files."""

import argparse
import io
import itertools
import json
import sys

import pytest
from rich.console import Console

from monetrun.commands import frontier as table
from monetrun.commands.frontier import parse_budgets
from monetrun.core import codec
from monetrun.core.budget import parse
from monetrun.core.errors import BudgetSyntaxError, InfeasibleBudget, UsageError
from monetrun.core.options import Options
from monetrun.core.step import replay
from monetrun.planning import planner
from monetrun.planning.frontier import Frontier, Point, frontier, next_budget, spread
from support.step_records import chain_record

RECORD = chain_record(64)
BASE = planner.baseline(RECORD)
PLAIN, SMALLEST = BASE.plain.peak_bytes, BASE.frugal.peak_bytes


def options(**given):
    return argparse.Namespace(**{"points": 8, "budgets": "", "json": "", "plot": "", **given})


def found(budgets, seconds=2.0):
    return frontier(RECORD, budgets, "hierarchical", Options(seconds=seconds), BASE)


def test_the_table_goes_from_the_plain_peak_to_the_smallest_budget_and_is_monotone():
    points = found(spread(PLAIN, SMALLEST, 6)).points
    assert [points[0].budget_bytes, points[-1].budget_bytes] == [PLAIN, SMALLEST]
    assert points[0].overhead == 0.0
    for a, b in itertools.pairwise(points):
        assert a.budget_bytes > b.budget_bytes
        assert a.overhead <= b.overhead
        assert a.bound <= b.bound
    for p in points:
        assert p.planned_peak_bytes <= p.budget_bytes
        assert p.gap == p.overhead - p.bound >= 0
    assert points[-1].overhead > 0


def test_a_plan_of_a_smaller_budget_serves_a_larger_one_and_a_bound_the_other_way(monkeypatch):
    overheads = {PLAIN: 0.5, PLAIN - 1: 0.2, PLAIN - 2: 0.3}
    bounds = {PLAIN: 0.15, PLAIN - 1: 0.05, PLAIN - 2: 0.1}
    real = planner.plan_step

    def worse(record, budget_bytes, *rest):
        plan = real(record, PLAIN, *rest)
        return planner.replace(
            plan,
            overhead=overheads[budget_bytes],
            bound=bounds[budget_bytes],
            planned_peak_bytes=budget_bytes,
            status="feasible",
        )

    monkeypatch.setattr(planner, "plan_step", worse)
    points = found(list(overheads)).points
    assert [p.overhead for p in points] == [0.2, 0.2, 0.3]
    assert [p.bound for p in points] == [0.15, 0.15, 0.15]
    assert [p.planned_peak_bytes for p in points] == [PLAIN - 1, PLAIN - 1, PLAIN - 2]


def test_a_budget_under_the_smallest_is_a_row_without_a_plan_and_none_over_it_an_error():
    points = found([PLAIN, SMALLEST // 2]).points
    assert [p.status for p in points] == ["optimal", "infeasible"]
    assert points[1].overhead is None
    with pytest.raises(InfeasibleBudget) as refused:
        found([SMALLEST - 1])
    assert refused.value.smallest_bytes == SMALLEST


def test_each_point_is_planned_as_the_step_is_replayed():
    budget = (PLAIN + SMALLEST) // 2
    (point,) = found([budget]).points
    plan = planner.plan_step(RECORD, budget, "hierarchical", Options(seconds=2.0), BASE)
    assert point.overhead == pytest.approx(plan.overhead)
    timeline = replay(RECORD, [g.schedule for g in plan.graphs])
    assert point.overhead == pytest.approx(timeline.seconds / BASE.plain.seconds - 1)


def test_budgets_are_read_one_by_one():
    assert [b.text for b in parse_budgets("0.8x,6GiB, 500MB")] == ["0.8x", "6GiB", "500MB"]
    with pytest.raises(BudgetSyntaxError, match=r"'0\.8y'"):
        parse_budgets("0.9x,0.8y")
    with pytest.raises(UsageError, match="'80%' is a share of what is free"):
        parse_budgets("0.9x,80%")
    with pytest.raises(BudgetSyntaxError, match="''"):
        parse_budgets("0.9x,")
    assert spread(100, 50, 3) == (100, 75, 50)
    assert spread(100, 99, 5) == (100, 99)


def test_the_screen_shows_every_point_and_json_has_them_all():
    points = (Point(1000, 1000, 0.0, 0.0, 0.0, "optimal"), Point(500, 490, 0.25, 0.2, 0.05, "feasible"),
              Point(100, None, None, 0.2, None, "infeasible"))  # fmt: skip
    made = Frontier(1000, 400, "greedy", "cpu", points)
    out = io.StringIO()
    table.show(made, "train.py", Console(file=out, width=120, highlight=False))
    rows = [line.split() for line in out.getvalue().splitlines()[3:]]
    assert rows[0] == ["1000", "bytes", "1.00x", "1000", "bytes", "+0.0%", "0.0%", "0.0%"]
    assert rows[1] == ["500", "bytes", "0.50x", "490", "bytes", "+25.0%", "20.0%", "5.0%"]
    assert rows[2] == ["100", "bytes", "0.10x", "-", "-", "20.0%", "-", "under", "the", "smallest"]
    assert codec.loads(Frontier, codec.dumps(made)) == made
    assert json.loads(codec.dumps(made))["points"][1]["overhead"] == 0.25


def test_the_next_command_has_the_budget_at_the_knee_that_can_be_typed():
    mib = 1 << 20
    points = tuple(
        Point(size * mib, size * mib, overhead, 0.0, overhead, "feasible")
        for size, overhead in ((100, 0.0), (80, 0.02), (60, 0.05), (50, 0.9))
    )
    made = Frontier(100 * mib, 50 * mib, "greedy", "cpu", points)
    assert next_budget(made) == "60MiB"
    assert parse(next_budget(made)).value == 60 * mib


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_plot_is_a_file_of_the_format_that_its_name_says(tmp_path, suffix, begins):
    pytest.importorskip("matplotlib")
    path = str(tmp_path / f"f{suffix}")
    table.check_options(options(plot=path))
    table.draw(found([PLAIN, SMALLEST]), "train.py $x_1$", path)
    assert (tmp_path / f"f{suffix}").read_bytes().startswith(begins)


def test_what_would_fail_after_planning_is_refused_before_it(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"f\.gif"):
        table.check_options(options(plot=str(tmp_path / "f.gif")))
    for option in ("plot", "json"):
        with pytest.raises(UsageError, match=f"--{option} .*no such folder"):
            table.check_options(options(**{option: str(tmp_path / "none" / "f.png")}))
    with pytest.raises(UsageError, match="--points 1"):
        table.check_options(options(points=1))
    with pytest.raises(BudgetSyntaxError, match="'much'"):
        table.check_options(options(budgets="much"))
    table.check_options(options(json="-", budgets="0.5x"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="needs matplotlib") as refused:
        table.check_options(options(plot=str(tmp_path / "f.png")))
    assert "pip install" in refused.value.hint
