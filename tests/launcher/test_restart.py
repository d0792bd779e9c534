"""Workers that start again: with a tighter plan, without a plan, and what torch counts as a failure."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from monetrun.core.budget import parse
from monetrun.core.keeping import keeping
from monetrun.core.options import Options
from monetrun.launcher import agent, restart
from monetrun.launcher.decision import Decision
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.workers import Workers
from monetrun.planning import planner
from monetrun.runtime.settings import AS_IS_MARK, PLAIN, PROBED, RUN, Settings
from support.sharded_steps import sharded_record
from support.small_graphs import chain

pytestmark = pytest.mark.usefixtures("plain_surroundings")

# Each life notes the plan it has, leaves a report, and ends as the next of the words says: CODE, or CODE! for one that
# leaves a mark before.
SCRIPT = f"""
import json, os, sys
lives, reports = sys.argv[1], os.environ["MONETRUN_REPORT_FOLDER"]
before = open(lives).read().split() if os.path.exists(lives) else []
how = sys.argv[2:][len(before)]
with open(lives, "a") as file:
    file.write((os.environ["MONETRUN_PLAN_FILE"] or "none") + chr(10))
with open(os.path.join(reports, "rank0.json"), "w") as file:
    json.dump({{"rank": 0, "exact": True, "steps": 1, "short": {{"held": {{"weights": 1}}}}}}, file)
if how.endswith("!"):
    open(os.path.join(reports, "{AS_IS_MARK}"), "w").close()
sys.exit(int(how.rstrip("!")))
"""


@pytest.fixture
def lives(tmp_path):
    """Launches a script whose lives end as the words say; gives the exit code and the plan that each life had."""
    script, seen, reports = tmp_path / "train.py", tmp_path / "lives", tmp_path / "reports"
    script.write_text(SCRIPT)
    reports.mkdir()
    environment = Settings(plan_file="first", record_file="record", report_folder=str(reports)).to_environment()

    def launch(max_restarts, *ends, joined=None, launched=agent.launch):
        words = [f"--max-restarts={max_restarts}", "--monitor-interval=0.05", "--quiet", str(script), str(seen), *ends]
        code = launched(launch_parser().parse_launch(words)[0], environment, joined)
        return code, seen.read_text().split()

    launch.environment = environment
    return launch


@pytest.fixture
def tightened(monkeypatch):
    """Tighter plans are found twice."""

    def tighter_plan(environment, exit_code, restarts, options):
        return "" if restarts >= 2 else f"tighter {restarts}"

    monkeypatch.setattr(restart, "tighter_plan", tighter_plan)


def a_job(environment):
    """One that plans nothing when it follows a decision."""
    folder = environment["MONETRUN_REPORT_FOLDER"]
    plain = Settings(mode=PLAIN, report_folder=folder).to_environment()
    return SimpleNamespace(options=None, mode=RUN, follow=lambda decision: plain, plain=None)


def test_a_plan_is_tightened_before_torch_starts_the_workers_again(lives, tightened, capsys):
    restarts = restart.Restarts(a_job(lives.environment), lives.environment)
    assert lives(3, "84", "84", "0", joined=restarts.joined)[0] == 0
    assert capsys.readouterr().err == "monetrun: tighter 0\nmonetrun: tighter 1\n"


@pytest.mark.nightly
def test_what_no_tighter_plan_is_left_for_runs_as_it_is_at_the_next_restart(lives, tightened, monkeypatch):
    decision = Decision(PLAIN, parse("auto"), 0, None, None, None, plan_given=False)
    monkeypatch.setattr(restart, "as_it_is", lambda job, why: decision)
    restarts = restart.Restarts(a_job(lives.environment), lives.environment)
    code, plans = lives(5, "84", "84", "84", "3", "0", joined=restarts.joined)
    assert (code, plans) == (0, ["first", "first", "first", "none", "none"])


@pytest.mark.parametrize(("mode", "short", "early"), [(RUN, {}, False), (PLAIN, {}, True), (RUN, {"a": 1}, True)])
def test_memory_that_runs_out_where_nothing_is_trained_under_a_plan_starts_nothing_again(tmp_path, mode, short, early):
    report = {"rank": 0, "exact": True, "short": {"held": short} if short else {}}
    (tmp_path / "rank0.json").write_text(json.dumps(report))
    environment = Settings(mode=mode, report_folder=str(tmp_path)).to_environment()
    assert restart.ran_short_early(environment, 84) is early


@pytest.mark.nightly
def test_another_failure_tightens_no_plan(lives, tightened, capsys):
    restarts = restart.Restarts(a_job(lives.environment), lives.environment)
    assert lives(1, "3", "3", joined=restarts.joined)[0] == 3
    assert "tighter" not in capsys.readouterr().err


@pytest.mark.nightly
def test_workers_that_start_anew_for_a_mark_have_all_restarts_left(lives):
    code, plans = lives(1, f"{PROBED}!", "3", "0")
    assert (code, len(plans)) == (0, 3)


@pytest.mark.parametrize("max_restarts", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_mark_counts_once_and_a_script_may_then_end_with_that_code(lives, max_restarts):
    code, plans = lives(max_restarts, *[f"{PROBED}!"] * (2 + max_restarts))
    assert (code, len(plans)) == (PROBED, 2 + max_restarts)


@pytest.mark.nightly
def test_a_launch_that_succeeds_at_last_leaves_no_error_for_the_scheduler(lives, tmp_path, monkeypatch):
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    told.write_text(json.dumps({"message": "memory ran out"}))
    assert lives(0, "0", launched=agent.launch_again)[0] == 0
    assert not told.exists()
    assert lives(0, "", f"{PROBED}!", "0")[0] == 0
    assert not told.exists()


def test_the_launchers_own_allocator_is_known_as_that_each_time_the_nodes_meet(tmp_path, monkeypatch):
    decision = Decision(RUN, parse("auto"), 1, None, None, None, plan_given=False)
    handler = Mock()
    type(handler).next_rendezvous = Mock(return_value=SimpleNamespace(store=None, rank=0, world_size=1))
    monkeypatch.setattr(registry, "get_rendezvous_handler", lambda parameters: handler)
    found = []

    def joined(*_):
        return decision.environment(Settings(), tmp_path, "cuda")

    before = dict(os.environ)
    try:
        with agent._agreeing(launch_parser().parse_launch(["train.py"])[0], joined, Workers()):
            meeting = registry.get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "id", 1, 2))
            for _ in range(2):
                meeting.next_rendezvous()
                found.append([os.environ.get(n) for n in ("MONETRUN_OWN_ALLOCATOR", "PYTORCH_ALLOC_CONF")])
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert found == [["1", "expandable_segments:True"]] * 2


def test_files_that_the_system_removed_of_a_temporary_folder_are_written_again(tmp_path):
    """After days of training, when a rank dies."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    plan, record = folder / "plan.json", folder / "record.json"
    plan.write_text("a plan")
    record.write_text("a record")
    environment = Settings(plan_file=str(plan), record_file=str(record)).to_environment()
    restarts = restart.Restarts(Mock(), environment)
    plan.unlink()
    record.unlink()
    folder.rmdir()
    assert restarts.joined(None, 0, 1, False, 1) == environment
    assert (plan.read_text(), record.read_text()) == ("a plan", "a record")


def test_a_tighter_plan_keeps_the_parameters_that_the_plan_keeps():
    """The script frees them after the forward, the plan does not."""
    record = sharded_record(modules=3, of=chain(12, 100))
    kept = keeping(record, (1, 2))
    budget_bytes = planner.baseline(kept).plain.peak_bytes
    plan = planner.plan_step(kept, budget_bytes, "greedy", Options(seconds=0.1))
    options = SimpleNamespace(algorithm="greedy", solver_options=lambda: Options(seconds=0.1))
    made = restart.tightened(plan, record, restart.Shortage(0, 0), 0, options)
    assert made.plan.keeps_parameters == plan.keeps_parameters == {"0:net.0": False, "0:net.1": True, "0:net.2": True}
    assert made.record.sharding.kept == (1, 2)
    assert made.plan.planned_peak_bytes <= budget_bytes
