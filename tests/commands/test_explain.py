"""What `monetrun explain` prints."""

from __future__ import annotations

import io

from rich.console import Console

from monetrun.commands.explain import show
from monetrun.core.options import Options
from monetrun.core.step import replay
from monetrun.planning import planner
from monetrun.planning.explain import ACTIVATIONS, explain
from support.step_records import chain_record

RECORD = chain_record(64)


def test_the_peaks_operator_and_the_totals_are_printed():
    base = planner.baseline(RECORD)
    budget = int(base.frugal.peak_bytes + 0.3 * (base.plain.peak_bytes - base.frugal.peak_bytes))
    plan = planner.plan_step(RECORD, budget, "greedy", Options(seconds=1.0), base)
    out = io.StringIO()
    show(explain(plan, RECORD), "p.json", Console(file=out, width=160, highlight=False))
    text = out.getvalue()
    assert replay(RECORD, [g.schedule for g in plan.graphs]).peak_name in text
    assert f"{plan.overhead:+.1%} (bound {plan.bound:.1%}" in text
    assert ACTIVATIONS in text
    assert "block0" in text
    assert "\x1b" not in text
