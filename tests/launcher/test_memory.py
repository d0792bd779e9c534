"""How much of a GPU a launch may use: of the script's own device, less what it takes beside the allocator."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from monetrun.core.budget import CPU_RESERVE_BYTES, CUDA_RESERVE_BYTES, parse
from monetrun.core.errors import DeviceQueryFailed
from monetrun.core.plain import PlainPeaks
from monetrun.launcher import memory
from monetrun.launcher.job import open_job
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.ranks import Ranks
from monetrun.machine.device import MemoryInfo
from monetrun.runtime import budget_here
from monetrun.runtime.settings import Settings
from support.step_records import chain_record

MIB, GIB = 1 << 20, 1 << 30
FREE = (10 * GIB, 6 * GIB)


def query(monkeypatch):
    infos = tuple(MemoryInfo(f"cuda:{i}", "", 16 * GIB, free, "nvml") for i, free in enumerate(FREE))
    monkeypatch.setattr(memory, "query", lambda kind, ranks: infos[:ranks])


def test_auto_is_what_each_rank_has_of_the_cpu_where_the_script_trains_there(monkeypatch):
    free = {"cuda": 8 * GIB, "cpu": 3 * GIB}
    monkeypatch.setattr(memory, "query", lambda kind, ranks: (MemoryInfo(kind, "", 16 * GIB, free[kind], ""),) * ranks)
    options = launch_parser().parse_launch(["--budget", "auto", "--no-cache", "train.py"])[0]
    with open_job(options) as job:
        job.ranks = Ranks("cuda", 2, 1)
        assert job.budget_bytes() == 8 * GIB - CUDA_RESERVE_BYTES
        job.record = chain_record(10)
        assert job.budget_bytes() == 3 * GIB - CPU_RESERVE_BYTES
        job.record = replace(job.record, device="a GPU")
        assert job.budget_bytes() == 8 * GIB - CUDA_RESERVE_BYTES


def test_a_worker_that_plans_for_itself_has_its_part_of_the_cpus_memory(monkeypatch):
    monkeypatch.setattr(budget_here, "query", lambda kind, ranks: (MemoryInfo(kind, "", 1, 8 * GIB // ranks, ""),))
    meter = SimpleNamespace(
        current_bytes=lambda: 0, peaks=lambda: SimpleNamespace(reserved_bytes=GIB, reserved_now_bytes=0)
    )
    for ranks, share in (("4", 2 * GIB), (None, 8 * GIB)):
        if ranks:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        else:
            monkeypatch.delenv("LOCAL_WORLD_SIZE")
        found = budget_here.budget_here(Settings(budget="100%"), torch.device("cpu"), meter)
        assert parse(found).value == share


@pytest.mark.parametrize(
    ("launched", "at_first", "now", "share"),
    [
        (True, "", None, 8 * GIB),  # eight ranks on the machine's one device
        (True, "0,1", "0,1", 8 * GIB),
        (True, "0,1", "1", 64 * GIB),  # one for each, by --virtual-local-rank or by the script
        (True, "", "5", 64 * GIB),
        (False, os.environ.get("CUDA_VISIBLE_DEVICES", ""), None, 8 * GIB),  # as the process was started by torchrun
        (False, "", "5", 64 * GIB),
    ],
)
def test_a_worker_that_sees_a_device_of_its_own_has_all_of_it(monkeypatch, launched, at_first, now, share):
    monkeypatch.setattr(budget_here, "query", lambda kind, ranks: (MemoryInfo(kind, "", 1, 64 * GIB // ranks, ""),))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    if now is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", now)
    meter = SimpleNamespace(
        current_bytes=lambda: 0, peaks=lambda: SimpleNamespace(reserved_bytes=GIB, reserved_now_bytes=0)
    )
    settings = Settings(budget="100%", report_folder="folder" * launched, visible_devices=at_first)
    found = parse(budget_here.budget_here(settings, torch.device("cuda", 0), meter)).value
    assert found + CUDA_RESERVE_BYTES == share


def plain(device, outside=300 * MIB):
    return PlainPeaks(GIB, GIB, 0, 3, device, outside)


def test_auto_is_the_free_memory_of_the_device_that_the_script_uses(monkeypatch):
    query(monkeypatch)
    one = Ranks("cuda", 1, 1)
    for device, free in enumerate(FREE):
        found = memory.budget_bytes(parse("auto"), one, 0, plain(device))
        assert 0 <= free - 300 * MIB - 192 * MIB - found < 32 * MIB


def test_the_rank_with_the_least_free_memory_decides_and_communication_has_room(monkeypatch):
    query(monkeypatch)
    found = memory.budget_bytes(parse("auto"), Ranks("cuda", 2, 1), 0, plain(0))
    assert 0 <= FREE[1] - 300 * MIB - 768 * MIB - found < 32 * MIB


def test_without_a_measured_plain_run_a_reserve_is_left(monkeypatch):
    query(monkeypatch)
    for found in (
        memory.budget_bytes(parse("auto"), Ranks("cuda", 1, 1), 0),
        memory.budget_bytes(parse("auto"), Ranks("cuda", 1, 1), 0, plain(0, outside=0)),
    ):
        assert found == FREE[0] - CUDA_RESERVE_BYTES


def test_a_budget_that_is_more_than_the_device_has_or_the_plain_run_takes_is_warned_of(monkeypatch):
    query(monkeypatch)
    one = Ranks("cuda", 1, 1)
    assert memory.more_than_there_is(parse("17GiB"), one).startswith("the budget 17GiB is more than the 16.0 GiB")
    assert memory.more_than_there_is(parse("2x"), one) == (
        "the budget 2x is more than the plain run takes: it bounds nothing in a step like the recorded one"
    )
    for budget in ("16GiB", "1.0x", "0.5x", "auto"):
        assert not memory.more_than_there_is(parse(budget), one)

    def failing(kind, ranks):
        raise DeviceQueryFailed("no driver", "install one")

    monkeypatch.setattr(memory, "query", failing)
    assert not memory.more_than_there_is(parse("17GiB"), one)
