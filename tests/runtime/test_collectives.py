"""What gloo's collectives allocate is in the record, also of a trial run, in which none of them runs."""

import atexit
import contextlib
import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from monetrun.capture import cpu_allocator
from monetrun.core.event import FREE, GATHER, OUTSIDE, REDUCE, Action, Event
from monetrun.core.sharding import ShardedModule
from monetrun.runtime import collectives, probe
from monetrun.runtime.checked_session import CheckedSession
from monetrun.runtime.plain_run import PlainRun
from monetrun.runtime.resharding import with_lingering_copies
from monetrun.runtime.session import Session
from monetrun.runtime.settings import MEASURE, PROBE, Settings

MIB = 2**20
CPU = torch.device("cpu")


@pytest.fixture
def in_a_trial():
    """A trial run's process group of four ranks, whose script asks for the backend that is given."""
    with contextlib.ExitStack() as undo:
        probe.stand_in_for_the_other_ranks(4, undo)
        yield dist.init_process_group
        dist.destroy_process_group()
    assert collectives._asked is None


@pytest.mark.parametrize(("of", "mode"), [(PlainRun, MEASURE), (CheckedSession, PROBE), (Session, PROBE)])
def test_a_trial_waits_for_no_other_rank(monkeypatch, tmp_path, of, mode):
    monkeypatch.setattr(atexit, "register", lambda end: end)
    trial = of(Settings(mode=mode, budget="1x", world_size=2, record_file=str(tmp_path / "record.json")))
    trial.watch_process()
    gc.collect()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))
        assert (dist.get_backend(), dist.get_world_size()) == ("fake", 2)
        dist.destroy_process_group()
    finally:
        trial._undo.close()


def test_a_device_mesh_that_makes_the_process_group_waits_for_no_other_rank(in_a_trial):
    mesh = dist.init_device_mesh("cpu", (4,))
    assert (dist.get_backend(), mesh.size()) == ("fake", 4)


@pytest.mark.parametrize(
    "words", [{"backend": "gloo"}, {"ranks": [0, 2], "backend": "nccl", "device_id": CPU, "group_desc": "own"}]
)
def test_a_subgroup_with_a_backend_of_its_own_waits_for_no_other_rank(in_a_trial, words):
    in_a_trial("gloo")
    group = dist.new_group(**words)
    assert (dist.get_backend(group), dist.get_world_size(group)) == ("fake", len(words.get("ranks", range(4))))
    dist.all_reduce(torch.ones(2), group=group)
    assert dist.get_backend(dist.new_group([0, 1], None, "gloo", None, False, "positional")) == "fake"


def peak_of(run):
    cpu_allocator.install()
    before = cpu_allocator.allocated_bytes()
    cpu_allocator.reset_peak()
    run()
    return cpu_allocator.peak_bytes() - before


@pytest.mark.parametrize(
    ("backend", "copied"), [(None, True), ("gloo", True), ("cpu:gloo,cuda:nccl", True), ("mpi", False)]
)
def test_a_trials_collectives_allocate_the_copies_that_gloo_makes(in_a_trial, backend, copied):
    whole, part = torch.zeros(MIB), torch.zeros(MIB // 4)
    in_a_trial(backend)
    for run in (
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: dist.all_gather_into_tensor(output_tensor=whole, input_tensor=part),
        lambda: dist.reduce_scatter_tensor(part, whole),
        lambda: dist.reduce_scatter_tensor(output=part, input=whole),
    ):
        assert peak_of(run) == pytest.approx(4 * MIB if copied else 0, abs=4096)


def test_a_copy_that_is_reduced_may_be_held_until_the_next_call(in_a_trial):
    modules = (ShardedModule("0", 7 * MIB, 5 * MIB, 4),)
    outside = [
        Event(OUTSIDE, -1, -7, 0, action=Action(REDUCE, 0)),
        Event(OUTSIDE, -1, 3, 5 * MIB),  # the reduce-scatter
        Event(OUTSIDE, -1, 10, 20, action=Action(GATHER, 0)),
        Event(OUTSIDE, -1, -10, 0, action=Action(FREE, 0)),
    ]
    events = [*outside, Event("backward", 0), Event(OUTSIDE, -1, 1, 2)]
    in_a_trial("gloo")
    found = with_lingering_copies(events, modules, CPU)
    assert [e.peak_bytes for e in found] == [0, 5 * MIB, 5 * MIB + 20, 5 * MIB, 0, 2]
    assert [e.delta_bytes for e in found] == [e.delta_bytes for e in events]
    collectives.asked_for("mpi")
    assert with_lingering_copies(events, modules, CPU) == events
