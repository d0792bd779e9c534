"""Plans that another version wrote are refused with what to do, or looked past in the cache."""

import dataclasses
import json

import pytest

from monetrun.core import codec
from monetrun.core.errors import PlanMismatch
from monetrun.core.plan import PLAN_SCHEMA, GraphPlan, Plan, Schedule
from monetrun.launcher.plan_file import read_plan
from monetrun.machine.store import Store

GRAPHS = (GraphPlan("f", "s", Schedule((), ()), ()),)
PLAN = Plan(GRAPHS, 5, 9, 4, 0.1, 0.0, "feasible", "ilp", "cpu", "2")


def old_text():
    """A plan as schema 1 had it: without the names of its implementations."""
    plain = codec.to_plain(dataclasses.replace(PLAN, schema=1))
    for graph in plain["graphs"]:
        del graph["implementations"]
    return json.dumps(plain)


def test_a_plan_file_is_read(tmp_path):
    (tmp_path / "p.json").write_text(codec.dumps(PLAN) + "\n")
    assert read_plan(str(tmp_path / "p.json")) == PLAN


def test_a_plan_file_of_an_older_monetrun_is_refused_with_the_command_that_writes_a_new_one(tmp_path):
    (tmp_path / "p.json").write_text(old_text())
    with pytest.raises(PlanMismatch, match=rf"p\.json .*schema 1, this monetrun reads schema {PLAN_SCHEMA}") as refused:
        read_plan(str(tmp_path / "p.json"))
    assert "monetrun plan SCRIPT" in refused.value.hint


def test_a_plan_of_an_older_monetrun_in_the_cache_is_a_miss(tmp_path, monkeypatch):
    store = Store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "dumps", lambda value: old_text())
        store.put("plan", "k", PLAN)
    assert store.get("plan", "k", Plan) is None
    store.put("plan", "k", PLAN)
    assert store.get("plan", "k", Plan) == PLAN
