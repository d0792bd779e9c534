"""Plan files: a plan of another version is refused, in the cache a miss; the record that a plan was made from."""

import dataclasses
import json
import os
import threading

import pytest
import torch

from monetrun.commands.main import main
from monetrun.core import codec
from monetrun.core.budget import parse
from monetrun.core.errors import PlanMismatch, UsageError
from monetrun.core.options import Options
from monetrun.core.plan import PLAN_SCHEMA, GraphPlan, Plan, Schedule, StepSchedules, plain_schedule
from monetrun.launcher import keys
from monetrun.launcher.kept import kept_plan, kept_record, kept_schedules, record_of
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.plan_file import check_options, read_plan, write_plan
from monetrun.launcher.ranks import find_ranks
from monetrun.machine.named_file import check_file
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 99}, "schema 99, this monetrun reads schema"),
        ({"budget_bytes": 10**20}, r"\$\.budget_bytes: 100000000000000000000 is out of range"),
        ({"budget_bytes": 1 << 60}, "budget: 1152921504606846976 bytes, where 0 to 9007199254740992 are possible"),
        ({"budget_bytes": 0}, "the budget is 0 bytes"),
        ({"planned_peak_bytes": -1}, "planned peak: -1 bytes"),
        ({"planned_peak_bytes": 6}, "planned peak is 6 bytes, over the budget of 5"),
        ({"overhead": float("nan")}, "NaN is not a number"),
        ({"overhead": -7.5}, "the overhead is -7.5"),
        ({"bound": -2}, r"its bound -2\.0"),
        ({"status": "good"}, "the status is 'good', it must be one of optimal"),
        ({"ledger": {"weights": 1 << 60}}, "ledger's weights"),
        ({"device": "\ud800"}, "device: .* is not text"),
        ({"pool": {"plain_bytes": 1, "small_bytes": -1, "large_bytes": 1}}, r"\$\.pool: small: -1 bytes"),
    ],
)
def test_a_number_that_cannot_be_right_is_named_with_its_rule(tmp_path, change, reason):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**codec.to_plain(PLAN), **change}))
    with pytest.raises(PlanMismatch, match=reason) as refused:
        read_plan(str(path))
    assert "monetrun plan SCRIPT" in refused.value.hint


@pytest.mark.parametrize(
    ("steps", "named", "reason"),
    [
        ([{"operator": -1}], [], r"\$\.graphs\[0\]: a step has a negative operator"),
        ([{"operator": 1, "implementation": 2}], [], "the schedule's implementations are not the named ones"),
        ([], [1, 2, "conv", [], None], r"\$\.graphs\[0\]\.implementations\[0\]: expected an object"),
        ([{"operator": True}], [], r"\$\.graphs\[0\]\.schedule\.forward\[0\]\.operator: expected int, got True"),
    ],
)
def test_a_step_that_no_graph_has_is_refused_where_it_is_read(tmp_path, steps, named, reason):
    plain = codec.to_plain(PLAN)
    plain["graphs"][0]["schedule"]["forward"] = steps
    plain["graphs"][0]["implementations"] = [named] if named else []
    (tmp_path / "p.json").write_text(json.dumps(plain))
    with pytest.raises(PlanMismatch, match=reason):
        read_plan(str(tmp_path / "p.json"))


@pytest.mark.parametrize("what", ["folder", "loop", "binary", "deep", "endless"])
def test_what_is_no_plan_is_refused_with_the_reason(tmp_path, what):
    path = tmp_path / "p.json"
    if what == "folder":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    elif what == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"\xff\xfe" if what == "binary" else b"[" * 100_000)
    not_readable = what in ("folder", "loop")
    with pytest.raises(UsageError if not_readable else PlanMismatch) as refused:
        read_plan(str(path))
    reasons = {
        "folder": "Is a directory",
        "loop": "Too many levels of symbolic links",
        "binary": "it is not JSON",
        "deep": "nested too deeply",
        "endless": "over 256 MiB",
    }
    assert reasons[what] in refused.value.message


def test_a_plan_comes_from_another_process(tmp_path):
    """As with the shell's ``--plan <(...)``."""
    os.mkfifo(tmp_path / "p.json")
    writer = threading.Thread(target=(tmp_path / "p.json").write_text, args=(codec.dumps(PLAN),))
    writer.start()
    assert read_plan(str(tmp_path / "p.json")) == PLAN
    writer.join()


def kept(store, plan, record, budget="0.9x", budget_bytes=None):
    store.put("plan", "k", plan)
    return kept_plan(store, "k", record, parse(budget), budget_bytes)


def test_a_cached_plan_is_used_only_if_the_replay_of_its_record_confirms_it(tmp_path, caplog):
    record = chain_record(64)
    whole = planner.baseline(record).plain.peak_bytes
    budget_bytes = int(0.9 * whole)
    plan = planner.plan_step(record, budget_bytes, "greedy", Options(seconds=1.0))
    store = Store(tmp_path)
    assert kept(store, plan, record) == plan
    assert kept(store, plan, record, "auto", budget_bytes) == plan
    (graph,) = plan.graphs
    forward, backward = graph.schedule.forward, graph.schedule.backward
    twice = dataclasses.replace(graph, schedule=Schedule(tuple(s for s in forward for _ in (0, 1)), backward))
    foreign = dataclasses.replace(graph, fingerprint="f" * 32)
    for change, reason in (
        ({"graphs": (twice,)}, "step 1: operator 0 (block0.linear) runs after operator 0"),
        ({"graphs": (foreign,)}, "its graphs or its peak are not those of the recorded step"),
        ({"planned_peak_bytes": plan.planned_peak_bytes - 1}, "its graphs or its peak are not"),
        ({"plain_peak_bytes": whole + 1}, "its plain peak is"),
        ({"budget_bytes": budget_bytes + 1}, f"its budget is {budget_bytes + 1} bytes, not {budget_bytes}"),
        ({"torch_version": "2.9.1"}, "it was made with torch 2.9.1, this is 2.15.0"),
    ):
        caplog.clear()
        assert kept(store, dataclasses.replace(plan, **change), record) is None
        (warning,) = [r.getMessage() for r in caplog.records]
        assert reason in warning
        store = Store(tmp_path)  # it warns once of each file and reason


def test_a_record_of_another_torch_is_a_miss(tmp_path):
    store = Store(tmp_path)
    store.put("probe", "k", dataclasses.replace(chain_record(64), torch_version="1.0"))
    assert kept_record(store, "k") is None
    here = dataclasses.replace(chain_record(64), torch_version=torch.__version__)
    store.put("probe", "k", here)
    assert kept_record(store, "k") == here


def test_kept_schedules_that_their_graphs_cannot_run_are_a_miss(tmp_path):
    record, store = chain_record(64), Store(tmp_path)
    (graph,) = record.graphs
    plain = plain_schedule(graph)
    store.put("plan", "k", StepSchedules.of([graph], [plain]))
    assert kept_schedules(store, "k", [graph]) == (plain,)
    assert kept_schedules(store, "k", [graph, graph]) is None
    store.put("plan", "k", StepSchedules.of([graph], [Schedule(plain.forward[1:], plain.backward)]))
    assert kept_schedules(store, "k", [graph]) is None


def test_a_plan_of_an_older_monetrun_in_the_cache_is_a_miss(tmp_path, monkeypatch):
    store = Store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "dumps", lambda value: old_text())
        store.put("plan", "k", PLAN)
    assert store.get("plan", "k", Plan) is None
    store.put("plan", "k", PLAN)
    assert store.get("plan", "k", Plan) == PLAN


def test_a_plan_files_record_is_found_for_the_same_launch(tmp_path):
    record = chain_record(64)
    plan = planner.plan_step(record, planner.baseline(record).plain.peak_bytes, "greedy", Options(seconds=1.0))
    script = tmp_path / "train.py"
    script.write_text("")
    store = Store(tmp_path / "cache")

    def found(*words, plan=plan, store=store):
        options, _ = launch_parser().parse_launch(words)
        return record_of(plan, store, keys.record_key(options, find_ranks(options)))

    assert found(str(script)) is None
    options, _ = launch_parser().parse_launch([str(script)])
    other = dataclasses.replace(record, torch_version="1.0")
    store.put("probe", keys.record_key(options, find_ranks(options)), other)
    assert found(str(script)) is None
    record = dataclasses.replace(record, torch_version=torch.__version__)
    store.put("probe", keys.record_key(options, find_ranks(options)), record)
    assert found(str(script)) == record
    assert found(str(script), "--epochs=3") is None
    assert found(str(script), plan=dataclasses.replace(plan, planned_peak_bytes=1)) is None
    assert found("--nnodes=1:2", "--rdzv-endpoint=localhost:29400", str(script)) == record  # goes to the other nodes
    assert found(str(script), store=None) is None


def plan_in_place(record):
    """A plan at 0.9x of the plain peak, which runs ReLUs in place."""
    budget_bytes = int(0.9 * planner.baseline(record).plain.peak_bytes)
    plan = planner.plan_step(record, budget_bytes, "greedy", Options(seconds=1.0))
    assert {n.name for n in plan.graphs[0].implementations} == {"in-place"}
    return plan


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ([], ""),
        (["--budget", "auto", "--implementations", "all"], ""),
        (["--budget", "0.9x"], ""),
        (["--budget", "1TiB"], ""),
        (["--budget", "0.89x"], r"--budget 0\.89x is .*, the plan p\.json was made for .* KiB"),
        (["--budget", "8KiB"], r"--budget 8KiB is 8\.0 KiB, the plan p\.json was made for"),
        (["--implementations", "in-place,fused"], ""),
        (["--implementations", "exact"], ""),
        (["--implementations", "fused"], "--implementations fused excludes what the plan .* uses: in-place"),
        (["--no-implementations"], "--implementations none excludes what"),
        (["--no-recompute"], "--no-recompute excludes what the plan p.json does"),
    ],
)
def test_what_is_given_beside_a_plan_must_allow_it(words, refused, capsys):
    record = chain_record(64)
    plan = plan_in_place(record)
    again = plan.graphs[0].schedule.runs_again()
    assert again
    options, _ = launch_parser().parse_launch(["--plan", "p.json", *words, "train.py"])
    for known in (record, None):
        if not refused:
            check_options(plan, known, options, parse(options.budget))
            warned = "whether the plan p.json keeps it is not known, its trial run is not" in capsys.readouterr().err
            assert warned == (known is None and words == ["--implementations", "exact"])
            continue
        with pytest.raises(UsageError, match=refused) as error:
            check_options(plan, known, options, parse(options.budget))
        assert "monetrun plan --" in error.value.hint


def test_inexact_implementations_of_a_plan_are_excluded_by_exact():
    record = chain_record(64)
    plan, (graph,) = plan_in_place(record), record.graphs
    rounding = [
        dataclasses.replace(op, implementations=tuple(dataclasses.replace(i, exact=False) for i in op.implementations))
        for op in graph.operators
    ]
    record = dataclasses.replace(record, graphs=(dataclasses.replace(graph, operators=tuple(rounding)),))
    options, _ = launch_parser().parse_launch(["--plan", "p.json", "--implementations", "exact", "train.py"])
    with pytest.raises(UsageError, match=r"--implementations exact excludes what the plan p\.json uses: in-place"):
        check_options(plan, record, options, parse("auto"))


def test_a_launch_with_a_plan_and_a_smaller_budget_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    write_plan(plan_in_place(chain_record(64)), "p.json")
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    assert main(["--plan", "p.json", "--budget", "8KiB", "train.py"]) == 2
    assert "--budget 8KiB is 8.0 KiB, the plan p.json was made for" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("path", "reason"),
    [("folder", "it is a folder"), ("folder/", "it is a folder"), ("none/p.json", "there is no such")],
)
def test_a_file_that_cannot_be_written_is_named_before_planning_and_leaves_no_part(
    path, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    with pytest.raises(UsageError):
        write_plan(PLAN, path)
    assert main(["plan", "--out", path, "train.py"]) == 2
    assert f"--out {path}: {reason}" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder", "train.py"]


def test_a_plan_may_go_into_a_pipe_and_replaces_a_file_whole(tmp_path):
    pipe, file = tmp_path / "pipe", tmp_path / "p.json"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(read_plan(str(pipe))))
    reader.start()
    check_file("--out", str(pipe))
    write_plan(PLAN, str(pipe))
    reader.join()
    assert read == [PLAN]
    assert pipe.is_fifo()
    file.write_text("before")
    check_file("--out", str(file))
    assert file.read_text() == "before"
    write_plan(PLAN, str(file))
    assert read_plan(str(file)) == PLAN


def test_a_plan_that_would_be_printed_twice_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    assert main(["plan", "--json", "--out", "-", "train.py"]) == 2
    assert "--out - and --json both print the plan" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


def test_a_plan_goes_to_stdout(capsys):
    write_plan(PLAN, "-")
    assert codec.loads(Plan, capsys.readouterr().out) == PLAN
