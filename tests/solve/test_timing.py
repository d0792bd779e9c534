"""The clock of the searches can be replaced, and only there is time read."""

from __future__ import annotations

import ast
import itertools
import time

import pytest

from monetrun.core.options import Options
from monetrun.core.simulate import simulate
from monetrun.solve import hierarchical, ilp, timing
from support.paths import ROOT
from support.small_graphs import chain


def test_an_override_ends_with_its_block():
    before = timing.current()
    with timing.override(clock=lambda: 7.0, patience=2.0) as inside:
        assert timing.current() is inside
        assert (timing.now(), inside.patience) == (7.0, 2.0)
        assert inside.greedy_patience == before.greedy_patience
    assert timing.current() is before


def test_by_default_a_phase_may_take_four_times_its_work():
    assert timing.Timing() == timing.Timing(time.monotonic, 4.0, 1.0, 6.0)


def test_a_racing_clock_ends_a_search_at_its_first_schedules():
    graph, costs = chain(20)
    ticks = itertools.count(0.0, 1000.0)
    with timing.override(clock=lambda: next(ticks)):
        solution = hierarchical.solve(graph, costs, 21, Options(seconds=10.0))
        tight = ilp.solve(graph, costs, 4, Options(seconds=10.0))
    assert simulate(graph, costs, solution.schedule).peak_bytes <= 21
    assert solution.seconds >= 1000.0
    assert tight.seconds >= 1000.0


def test_no_other_solver_module_imports_time():
    for path in (ROOT / "monetrun" / "solve").rglob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)]
        imported = {name.name for node in imports for name in node.names}
        assert path.name == "timing.py" or "time" not in imported, path


def test_a_search_for_the_lowest_peak_takes_its_share_of_the_time_to_plan():
    with timing.override(frugal_seconds=6.0):
        with timing.within(20.0):
            assert timing.current().frugal_seconds == 6.0
        with timing.within(2.0):
            assert timing.current().frugal_seconds == pytest.approx(0.6)
        with timing.within(600.0):
            assert timing.current().frugal_seconds == 6.0
