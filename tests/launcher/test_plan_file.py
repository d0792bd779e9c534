"""Plan files: a plan of another version is refused, in the cache a miss; the record that a plan was made from."""

import dataclasses
import json

import pytest

from monetrun.core import codec
from monetrun.core.errors import PlanMismatch
from monetrun.core.options import Options
from monetrun.core.plan import PLAN_SCHEMA, GraphPlan, Plan, Schedule
from monetrun.launcher import keys
from monetrun.launcher.job import _record_of
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.plan_file import read_plan
from monetrun.launcher.ranks import find_ranks
from monetrun.machine.store import Store
from monetrun.planning import planner
from support.step_records import chain_record

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


def test_a_plan_files_record_is_found_for_the_same_launch_on_one_node(tmp_path):
    record = chain_record(64)
    plan = planner.plan_step(record, planner.baseline(record).plain.peak_bytes, "greedy", Options(seconds=1.0))
    script = tmp_path / "train.py"
    script.write_text("")
    store = Store(tmp_path / "cache")

    def found(*words, plan=plan, store=store):
        options, _ = launch_parser().parse_launch(words)
        return _record_of(plan, store, options, find_ranks(options))

    assert found(str(script)) is None
    options, _ = launch_parser().parse_launch([str(script)])
    store.put("probe", keys.record_key(options, find_ranks(options)), record)
    assert found(str(script)) == record
    assert found(str(script), "--epochs=3") is None
    assert found(str(script), plan=dataclasses.replace(plan, planned_peak_bytes=1)) is None
    assert found("--nnodes=1:2", "--rdzv-endpoint=localhost:29400", str(script)) is None
    assert found(str(script), store=None) is None
