"""Nodes decide together: one decides for all with the same devices, with the smallest budget, and refuses for all."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from monetrun.core import codec
from monetrun.core.budget import is_auto, parse
from monetrun.core.errors import DeviceQueryFailed, InfeasibleBudget, MonetrunError
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord, replay
from monetrun.launcher import keys, memory, nodes, restart
from monetrun.launcher.decision import Decision
from monetrun.launcher.nodes import Nodes
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.ranks import Ranks
from monetrun.planning import planner
from monetrun.runtime.settings import PLAIN as PLAIN_MODE
from monetrun.runtime.settings import RUN, Settings
from support import launcher
from support.paths import SCRIPTS
from support.sharded_steps import sharded_record
from support.step_records import chain_record

RECORD = chain_record(10)
PLAN = planner.plan_step(RECORD, 1 << 20)
PLAIN = PLAN.plain_peak_bytes


class Job:
    """Decides on a plan of its own, or refuses, and keeps what it was asked to follow."""

    def __init__(self, budget, refuses=False, kind="cpu"):
        self.budget, self.refuses, self.decided_with = parse(budget), refuses, []
        self.options = SimpleNamespace(use_cache=False, quiet=True, budget=budget, plan_file="", strict=False)
        self.ranks, self.console, self.plan = Ranks(kind, 1, 1), None, None
        self.plain = None
        self.store, self.node, self.record_key = None, None, "key"
        self.followed, self.decided_for = [], []

    def budget_bytes(self):
        return int(self.budget.value) if self.budget.kind == "bytes" else None

    def met(self, nodes):
        self.ranks = dataclasses.replace(self.ranks, nodes=nodes)

    def decide(self):
        self.decided_with.append(self.budget)
        self.decided_for.append(self.ranks.nodes)
        if self.refuses:
            raise InfeasibleBudget("too little", "more", budget_bytes=1, smallest_bytes=2)
        nbytes = int(self.budget.value) if self.budget.kind == "bytes" else int(self.budget.value * PLAIN)
        budget_bytes = min(nbytes, self.budget.at_most_bytes or nbytes)
        self.plan = dataclasses.replace(PLAN, budget_bytes=budget_bytes, planned_peak_bytes=budget_bytes)
        return Decision(RUN, self.budget, self.plan.budget_bytes, self.plan, RECORD, None, plan_given=False)

    def follow(self, decision, shown):
        self.followed.append((decision, shown))
        return {"PLAN": decision.plan.digest if decision.plan else ""}


@pytest.fixture(autouse=True)
def options_are_replaced_in_place(monkeypatch):
    def replace(value, **given):
        if dataclasses.is_dataclass(value):
            return dataclasses.replace(value, **given)
        return SimpleNamespace(**{**vars(value), **given})

    monkeypatch.setattr(nodes, "replace", replace)


def meet(*members, fixed=False, ended=()):
    """Let nodes meet over a new store, each in a thread; gives what ``joined`` returned or raised.

    The workers of the first nodes have ``ended`` with these codes.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20), wait_for_workers=False)
    results = [None] * len(members)

    def run(rank):
        try:
            results[rank] = members[rank].joined(store, rank, len(members), fixed, dict(enumerate(ended)).get(rank, 0))
        except MonetrunError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(members)) if members[rank]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_the_first_node_decides_for_all_with_the_smallest_budget():
    jobs = [Job("0.95x"), Job(str(int(0.85 * PLAIN))), Job("0.98x")]
    given = meet(*map(Nodes, jobs))
    assert [len(job.decided_with) for job in jobs] == [1, 0, 0]
    assert {job.followed[0][0].plan.budget_bytes for job in jobs} == {int(0.85 * PLAIN)}
    assert len({variables["PLAN"] for variables in given}) == 1


def test_a_refusal_ends_all_nodes_with_the_same_message_and_exit_code():
    given = meet(Nodes(Job("1.0x", refuses=True)), Nodes(Job("1.0x")), Nodes(Job("1.0x")))
    assert [(error.exit_code, str(error)) for error in given] == [(80, "too little\n  more")] * 3


def test_nodes_that_meet_again_keep_their_plan_unless_a_new_one_has_a_smaller_budget():
    old, new, small = Job("0.95x"), Job("0.98x"), Job("0.85x")
    stays = Nodes(old)
    (first,) = meet(stays)
    assert meet(Nodes(new), stays) == [first, first]
    assert (len(new.decided_with), len(old.decided_with)) == (0, 1)
    assert [shown for _, shown in old.followed] == [True, False]
    (again, same) = meet(Nodes(small), stays)
    assert again == same != first
    assert old.followed[-1][0].plan.budget_bytes == int(0.85 * PLAIN)


def test_the_trial_is_of_as_many_nodes_as_met_and_stays_so():
    """Of ``--nnodes MIN:MAX`` any number may meet."""
    jobs = [Job("0.95x") for _ in range(3)]
    stays, leaves = Nodes(jobs[0]), Nodes(jobs[1])
    meet(stays, leaves)
    assert (jobs[0].decided_for, [job.ranks.nodes for job in jobs[:2]]) == ([2], [2, 2])
    new = Nodes(jobs[2])
    meet(new, stays, leaves)
    assert ([job.node for job in jobs], jobs[2].ranks.nodes) == ([1, 2, 0], 2)  # its cache's keys are of what was tried
    smaller = Job("0.85x")
    meet(Nodes(smaller), stays)
    assert jobs[0].decided_for == [2, 2]


def test_a_node_with_less_memory_that_joins_later_does_not_end_the_training(capsys):
    first, small = Job("0.95x"), Job("0.5x")
    stays = Nodes(first)
    (before,) = meet(stays)
    first.refuses = True
    assert meet(stays, Nodes(small)) == [before, before]
    assert "warning: too little; training has begun, and goes on" in capsys.readouterr().err
    assert first.budget.text == "0.95x"


def test_a_node_whose_workers_start_again_needs_no_other_where_nodes_do_not_meet_anew():
    members = [Nodes(Job("0.95x")), Nodes(Job("0.95x"))]
    first = meet(*members, fixed=True)
    assert meet(None, members[1], fixed=True) == [None, first[1]]


def test_nodes_with_other_devices_have_a_decision_of_their_own(monkeypatch):
    monkeypatch.setattr(nodes, "_signature", lambda ranks: ranks.kind)
    jobs = [Job("0.95x", kind="a"), Job("0.85x", kind="b"), Job("0.98x", kind="b")]
    meet(*map(Nodes, jobs))
    assert [len(job.decided_with) for job in jobs] == [1, 1, 0]
    assert {job.followed[0][0].plan.budget_bytes for job in jobs} == {int(0.85 * PLAIN)}


def test_nodes_with_other_devices_follow_one_decision_where_fsdp2_splits_the_model(monkeypatch):
    monkeypatch.setattr(nodes, "_signature", lambda ranks: ranks.kind)
    decide, jobs = Job.decide, [Job("0.95x", kind="a"), Job("0.85x", kind="b")]
    monkeypatch.setattr(
        Job, "decide", lambda job: dataclasses.replace(decide(job), record=sharded_record(), as_is=job.ranks.kind)
    )
    meet(*map(Nodes, jobs))
    assert [job.followed[0][0].as_is for job in jobs] == ["a", "a"]


def test_where_a_node_is_lost_the_others_meet_anew_a_few_times(monkeypatch):
    monkeypatch.setattr(nodes, "_SILENCE_SECONDS", 0.2)
    alone = Nodes(Job("0.95x"))
    assert [meet(alone, None)[0] for _ in range(2)] == [None, None]
    assert "node 1 has not said in" in str(meet(alone, None)[0])


def test_nodes_of_a_static_rendezvous_that_start_late_are_waited_for(monkeypatch):
    monkeypatch.setattr(nodes, "_SILENCE_SECONDS", 1.5)
    members = [Nodes(Job("0.95x")) for _ in range(3)]
    joined = members[2].joined
    monkeypatch.setattr(members[2], "joined", lambda *given: time.sleep(4) or joined(*given))
    assert len({variables["PLAN"] for variables in meet(*members, fixed=True)}) == 1


def test_nodes_that_were_lost_long_ago_do_not_count(monkeypatch):
    monkeypatch.setattr(nodes, "_SILENCE_SECONDS", 0.2)
    one = Nodes(Job("0.95x"))
    for _ in range(2):
        assert [meet(one, None)[0] for _ in range(2)] == [None, None]
        assert meet(one)[0] is not None


def cannot_tell(job, error):
    """Have ``job`` fail to state its budget."""

    def fail():
        raise error

    job.budget_bytes = fail
    return job


NO_QUERY = DeviceQueryFailed("the free memory could not be read", "give bytes")
NOTHING_LEFT = memory.NothingLeft("the budget auto: 100.0 MiB are free", "give bytes")


def test_a_node_that_cannot_state_its_budget_refuses_for_all_with_its_reason():
    jobs = [Job("0.95x"), cannot_tell(Job("auto"), NO_QUERY), Job("0.95x")]
    given = meet(*map(Nodes, jobs))
    wanted = (70, "node 1: the free memory could not be read\n  give bytes")
    assert [(error.exit_code, str(error)) for error in given] == [wanted] * 3
    assert jobs[0].decided_with == []


def test_a_node_on_which_nothing_is_left_for_auto_has_all_run_as_under_torchrun(capsys):
    jobs = [Job("auto"), cannot_tell(Job("auto"), NOTHING_LEFT)]
    meet(*map(Nodes, jobs))
    assert [job.followed[0][0].mode for job in jobs] == [PLAIN_MODE] * 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "node 1: the budget auto: 100.0 MiB are free; models run as they are, without a limit" in line
    none = [Nodes(cannot_tell(Job("auto"), NOTHING_LEFT)) for _ in range(2)]
    assert meet(*none) == meet(*none)  # they meet again, and none of them has a budget
    jobs = [Job("0.95x"), cannot_tell(Job("auto"), NOTHING_LEFT)]
    assert [error.exit_code for error in meet(*map(Nodes, jobs))] == [80, 80]
    jobs = [Job("auto"), cannot_tell(Job("80%"), NOTHING_LEFT)]
    assert [error.exit_code for error in meet(*map(Nodes, jobs))] == [80, 80]


def test_a_node_that_joins_later_and_cannot_state_its_budget_follows_the_others():
    stays = Nodes(Job("0.95x"))
    (first,) = meet(stays)
    assert meet(stays, Nodes(cannot_tell(Job("auto"), NO_QUERY))) == [first, first]


def test_where_a_plan_was_made_a_node_with_less_for_auto_does_not_have_it_dropped(capsys):
    first, small = Job("auto"), Job(str(int(0.5 * PLAIN)))
    first.budget_bytes = lambda: int(0.95 * PLAIN)
    stays = Nodes(first)
    (before,) = meet(stays)
    first.refuses = True
    small.budget = parse("auto")
    small.budget_bytes = lambda: int(0.5 * PLAIN)
    assert meet(stays, Nodes(small)) == [before, before]
    assert not is_auto(first.decided_with[-1])  # for which the plain run may take the place of a plan


def test_a_device_that_cannot_be_read_does_not_matter_to_a_budget_in_bytes(monkeypatch):
    def fail(*_):
        raise NO_QUERY

    for module in (nodes, keys):
        monkeypatch.setattr(module, "query", fail)
    assert nodes._signature(Ranks("cuda", 2, 1)) == nodes._signature(Ranks("cuda", 2, 1))
    options = launch_parser().parse_launch(["--budget", "2GiB", "train.py"])[0]
    assert keys.record_key(options, Ranks("cuda", 2, 1)) == keys.record_key(options, Ranks("cuda", 2, 1))


def test_a_node_that_is_lost_once_all_have_decided_has_the_others_meet_anew_and_keep_the_plan(monkeypatch):
    monkeypatch.setattr(nodes, "_SILENCE_SECONDS", 0.3)
    jobs = [Job("0.95x"), Job("0.95x")]
    members = [Nodes(job) for job in jobs]
    stopped = MonetrunError("stopped")
    monkeypatch.setattr(members[1], "_start_together", Mock(side_effect=stopped))  # it has read the verdict
    assert meet(*members) == [None, stopped]
    assert jobs[0].followed == []
    (variables,) = meet(members[0])
    assert variables is not None
    assert (len(jobs[0].decided_with), [shown for _, shown in jobs[0].followed]) == (1, [True])


class LaunchedJob(Job):
    """Gives its workers the variables of a real job, which tell them of a plan in ``folder``."""

    def __init__(self, folder):
        super().__init__("1.0x")
        words = ["--budget=1.0x", "--algorithm=greedy", "--solver-seconds=1", "--quiet", "train.py"]
        self.options = launch_parser().parse_launch(words)[0]
        self.folder = folder
        folder.mkdir()
        self.base_key, self.record_key = "launch", "what its trial has read"

    def follow(self, decision, shown):
        super().follow(decision, shown)
        self.mode, self.record = decision.mode, decision.record
        return decision.environment(Settings(report_folder=str(self.folder)), self.folder, "cpu")

    def worker_reports(self, steps, **found):
        short = found.pop("short", {"held": {"weights": 1}})
        report = {"rank": 0, "exact": True, "steps": steps, "intervals": [], "short": short, **found}
        (self.folder / "rank0.json").write_text(json.dumps(report))


@pytest.fixture
def wide(monkeypatch):
    """A chain with more to gain, of which each job decides on a plan at almost its plain peak."""
    record = chain_record(1000, widths=(40,) * 30)
    base = planner.baseline(record)
    plan = planner.plan_step(record, base.plain.peak_bytes, "greedy", known=base)

    def decide(self):
        self.plan, self.record = plan, record
        return Decision(RUN, self.budget, plan.budget_bytes, plan, record, None, plan_given=False)

    monkeypatch.setattr(LaunchedJob, "decide", decide)
    return SimpleNamespace(plan=plan, record=record, budget_bytes=plan.budget_bytes)


@pytest.mark.parametrize("short_one", [0, 1])
def test_after_memory_ran_out_on_one_node_all_get_a_tighter_plan_and_at_last_none(
    short_one, wide, tmp_path, monkeypatch, capsys
):
    jobs = [LaunchedJob(tmp_path / str(k)) for k in range(2)]
    members = list(map(Nodes, jobs))
    meet(*members)
    lacking = wide.budget_bytes // 50
    codes = [84 if k == short_one else 1 for k in range(2)]
    peaks = []
    for _ in range(2):
        jobs[short_one].worker_reports(1, short={"needed_bytes": wide.budget_bytes + lacking, "held": {"weights": 1}})
        jobs[1 - short_one].worker_reports(1)
        meet(*members, ended=codes)
        plans, records = (
            [codec.loads(kind, (job.folder / name).read_text()) for job in jobs]
            for kind, name in ((Plan, "plan.json"), (StepRecord, "record.json"))
        )
        assert plans[0] == plans[1] == jobs[0].followed[-1][0].plan
        assert [record.ledger for record in records] == [records[0].ledger] * 2
        assert [job.record for job in jobs] == [wide.record] * 2  # what is kept for the next launch is as recorded
        peaks.append(replay(jobs[0].record, [g.schedule for g in plans[0].graphs]).peak_bytes)
        assert not (jobs[short_one].folder / "rank0.json").exists()
    assert peaks[1] + wide.budget_bytes // 10 <= peaks[0] <= wide.budget_bytes - lacking
    told = [line for line in capsys.readouterr().err.splitlines() if "starting again" in line]
    assert ["memory ran out in training step 2" in line for line in told] == [True, True]
    instead = Decision(PLAIN_MODE, parse("0.95x"), 0, None, None, None, plan_given=False)
    monkeypatch.setattr(restart, "as_it_is", lambda job, why: instead)
    jobs[short_one].worker_reports(1, short={"needed_bytes": 0, "held": {"weights": 1}})
    meet(*members, ended=codes)
    assert [(job.mode, job.followed[-1][0].nodes) for job in jobs] == [(PLAIN_MODE, 2)] * 2


def test_a_plan_under_which_memory_runs_out_later_stays(wide, tmp_path):
    job = LaunchedJob(tmp_path / "0")
    node = Nodes(job)
    meet(node)
    job.worker_reports(4, short={"needed_bytes": 2 * wide.budget_bytes, "held": {"weights": 1}})
    meet(node, ended=[84])
    meet(node, ended=[1])
    assert [decision.plan for decision, _ in job.followed] == [wide.plan] * 3


def test_a_tighter_plan_that_has_lasted_is_kept_by_each_node(wide, tmp_path):
    jobs = [LaunchedJob(tmp_path / str(k)) for k in range(2)]
    members = list(map(Nodes, jobs))
    meet(*members)
    jobs[0].worker_reports(0, short={"needed_bytes": 0, "held": {"weights": 1}})
    meet(*members, ended=[84])
    for job, node in zip(jobs, members, strict=True):
        job.store = Mock()
        job.worker_reports(0)
        node.keep(1)
        assert job.store.mock_calls == []
        job.worker_reports(9)
        node.keep(0)
        (put,) = [call.args for call in job.store.put.mock_calls if call.args[0] == "plan"]
        schedules = [g.schedule for g in job.followed[-1][0].plan.graphs]
        assert [g.schedule for g in put[2].graphs] == schedules


# ---- launches


def agents(folder, prefixes, address, words, options, script):
    """Start an agent for each of ``prefixes`` (its own cache, options and words before); gives their results.

    On a busy machine a process may abort as it ends, with gloo's threads, under torchrun too: then once more.
    """
    endpoint = ("--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=job", f"--nnodes={len(prefixes)}")

    def run(k):
        environment = {**os.environ, "MONETRUN_CACHE": str(folder / f"cache{k}"), "OMP_NUM_THREADS": "1"}
        command = [*words, *endpoint, *options[k], *script]
        if not prefixes[k]:
            return launcher.run(*command, expect=None, environment=environment, number=k)
        command = [*prefixes[k], sys.executable, "-m", *command]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    for _ in range(3):
        with ThreadPoolExecutor(len(prefixes)) as threads:
            done = list(threads.map(run, range(len(prefixes))))
        if not any("SIGABRT" in one.stderr for one in done):
            break
    return [SimpleNamespace(code=one.returncode, out=one.stdout, err=one.stderr) for one in done]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def assert_same(folder, names):
    for rank in (0, 1):
        a, b = (torch.load(folder / f"{name}.{rank}") for name in names)
        assert a["losses"] == b["losses"]
        assert [k for k in a["state"] if not torch.equal(a["state"][k], b["state"][k])] == []


def on_one_host(folder, module, out, options, *words, given=()):
    """Two agents, one with each of the ``options``, train two ranks of a script that is ``given`` words."""
    script = [str(SCRIPTS / "tiny.py"), str(folder / out), "--ddp", "--steps=4", *given]
    return agents(folder, [[], []], f"127.0.0.1:{free_port()}", [module, *words], options, script)


PLANNED = ("--implementations=exact", "--solver-seconds=1", "--json")
BUDGETS = [["--budget=0.9x"], ["--budget=0.75x"]]


@pytest.mark.slow
def test_two_agents_on_one_host_train_one_plan_as_torchrun_does(tmp_path, plain_surroundings):
    plain = on_one_host(tmp_path, "torch.distributed.run", "plain", [[], []])
    assert [agent.code for agent in plain] == [0, 0]
    planned = on_one_host(tmp_path, "monetrun", "planned", BUDGETS, *PLANNED)
    assert [agent.code for agent in planned] == [0, 0], planned
    assert_same(tmp_path, ("plain", "planned"))
    found = [json.loads(agent.out.splitlines()[-1]) for agent in planned]
    assert found[0]["budget_bytes"] == found[1]["budget_bytes"] == int(0.75 * found[0]["plain_peak_bytes"])
    assert sum("trial run up to" in agent.err for agent in planned) == 1


@pytest.mark.nightly
def test_two_agents_of_which_one_has_a_cache_train_alike_and_refuse_alike(tmp_path, plain_surroundings):
    cold = on_one_host(tmp_path, "monetrun", "cold", BUDGETS, *PLANNED)
    assert [agent.code for agent in cold] == [0, 0], cold
    shutil.rmtree(tmp_path / "cache0")
    half_warm = on_one_host(tmp_path, "monetrun", "half_warm", BUDGETS, *PLANNED)
    assert [agent.code for agent in half_warm] == [0, 0], half_warm
    assert_same(tmp_path, ("cold", "half_warm"))
    refused = on_one_host(tmp_path, "monetrun", "refused", [["--budget=0.9x"], ["--budget=0.01x"]], *PLANNED)
    assert [agent.code for agent in refused] == [80, 80], refused
    assert all("smallest feasible" in agent.err for agent in refused)


@pytest.mark.nightly
def test_memory_that_runs_out_in_the_first_step_has_two_agents_start_again_with_a_tighter_plan(
    tmp_path, plain_surroundings
):
    plain = on_one_host(tmp_path, "torch.distributed.run", "plain", [[], []])
    assert [agent.code for agent in plain] == [0, 0]
    words = (*PLANNED, "--budget=0.75x", "--max-restarts=2", "--monitor-interval=0.2")
    planned = on_one_host(tmp_path, "monetrun", "planned", [[], []], *words, given=["--untried", str(2300 << 10)])
    assert [agent.code for agent in planned] == [0, 0], planned
    assert_same(tmp_path, ("plain", "planned"))
    assert 1 <= sum(agent.err.count("starting again (") for agent in planned) <= 2


@contextlib.contextmanager
def namespaces():
    """Two network namespaces with a cable between them; gives the words that run a command in each."""
    names = [f"monetrun{os.getpid()}{k}" for k in "ab"]
    commands = [["ip", "netns", "add", name] for name in names]
    commands += [["ip", "link", "add", names[0][-15:], "type", "veth", "peer", "name", names[1][-15:]]]
    for k, name in enumerate(names, 1):
        commands += [
            ["ip", "link", "set", name[-15:], "netns", name],
            ["ip", "-n", name, "addr", "add", f"10.213.77.{k}/24", "dev", name[-15:]],
            ["ip", "-n", name, "link", "set", name[-15:], "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
        ]
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces: {' '.join(command)}: {done.stderr.strip()}")
        yield [["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={name[-15:]}"] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def on_two_machines(folder, machines, name, module, *words, given=()):
    """Two agents, one on each of the ``machines``, train four ranks; gives their results."""
    script = [str(SCRIPTS / "tiny.py"), str(folder / name), "--ddp", "--steps=4", "--bucket-mb=0.01", *given]
    own = "--local-addr=10.213.77.{}", "--nproc-per-node=2", "--rdzv-conf=is_host={},join_timeout=300"
    options = [[word.format(value) for word, value in zip(own, (k, "", 2 - k), strict=True)] for k in (1, 2)]
    done = agents(folder, machines, "10.213.77.1:29411", [module, *words], options, script)
    assert [agent.code for agent in done] == [0, 0], done
    return done


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces are made by ip, of the package iproute2")
def test_two_machines_train_as_under_torchrun_also_where_one_comes_late_and_is_lost(tmp_path, plain_surroundings):
    words = "monetrun", *PLANNED, "--budget=0.8x"
    with namespaces() as machines:
        on_two_machines(tmp_path, machines, "plain", "torch.distributed.run")
        planned = on_two_machines(tmp_path, machines, "planned", *words)
        shutil.rmtree(tmp_path / "cache0")  # the machine that comes late has a cache, the other has none
        # a new agent, once the first is killed; what says so goes first, where all is tried once more
        again = ["sh", "-c", f'rm -f {tmp_path}/lost.lost; sleep 20; "$@"; c=$?; [ $c -eq 137 ] || exit $c; "$@"', "sh"]
        machines = [machines[0], [*machines[1], *again]]
        lost = on_two_machines(tmp_path, machines, "lost", *words, "--max-restarts=2", given=["--lost=3"])
        assert (tmp_path / "lost.lost").exists()
    assert sum("trial run up to" in agent.err for agent in lost) <= 1
    for found in (json.loads(agent.out.splitlines()[-1]) for agent in (*planned, *lost)):
        assert found["measured_peak_bytes"] <= found["budget_bytes"] == int(0.8 * found["plain_peak_bytes"])
    for rank in range(4):
        plain, *others = (torch.load(tmp_path / f"{name}.{rank}") for name in ("plain", "planned", "lost"))
        for other in others:
            assert other["losses"] == plain["losses"]
            assert [k for k in plain["state"] if not torch.equal(plain["state"][k], other["state"][k])] == []
