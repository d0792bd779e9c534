"""Free memory per rank of a CPU, with cgroup trees in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from monetrun.core.errors import DeviceQueryFailed
from monetrun.machine import device
from monetrun.machine.cgroup import cgroup_limit
from monetrun.machine.device import cpu_memory, query

GIB = 1 << 30


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=64 * GIB, available=40 * GIB)
    monkeypatch.setattr("monetrun.machine.device.psutil.virtual_memory", lambda: memory)


@dataclass(frozen=True)
class Tree:
    """A proc folder and a cgroup mount."""

    proc: Path
    cgroup_root: Path

    def member(self, *lines: str) -> None:
        (self.proc / "self").mkdir(parents=True, exist_ok=True)
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def v2(self, path: str, *, current: int, inactive: int = 0, **limits: int | str) -> None:
        folder = self.cgroup_root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file 7\n")
        for name, value in limits.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")

    def v1(self, path: str, *, limit: int, usage: int, inactive: int = 0) -> None:
        folder = self.cgroup_root / "memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {inactive}\n")

    def memory(self, ranks: int = 1) -> device.MemoryInfo:
        return cpu_memory(ranks, proc=self.proc, cgroup_root=self.cgroup_root)


@pytest.fixture
def tree(tmp_path: Path, host: None) -> Tree:
    (tmp_path / "cgroup").mkdir()
    return Tree(tmp_path / "proc", tmp_path / "cgroup")


def test_without_cgroups_psutil_decides(tree: Tree) -> None:
    info = tree.memory()
    assert (info.device, info.free_bytes, info.total_bytes, info.source) == ("cpu", 40 * GIB, 64 * GIB, "psutil")


def test_ranks_share_the_memory_evenly(tree: Tree) -> None:
    infos = query("cpu", 4, proc=tree.proc, cgroup_root=tree.cgroup_root)
    assert [info.free_bytes for info in infos] == [10 * GIB] * 4
    assert [info.total_bytes for info in infos] == [16 * GIB] * 4
    assert infos[0].note == "divided by 4 local ranks"


def test_a_v2_limit_leaves_its_headroom_and_counts_inactive_cache_as_free(tree: Tree) -> None:
    tree.member("0::/job")
    tree.v2("job", current=6 * GIB, inactive=2 * GIB, max=16 * GIB, high="max")
    info = tree.memory(2)
    assert (info.free_bytes, info.total_bytes, info.source) == (6 * GIB, 8 * GIB, "cgroup v2")
    assert info.note == f"{tree.cgroup_root}/job/memory.max is {16 * GIB}; divided by 2 local ranks"


def test_memory_high_limits_too(tree: Tree) -> None:
    tree.member("0::/job")
    tree.v2("job", current=GIB, max=16 * GIB, high=4 * GIB)
    assert tree.memory().free_bytes == 3 * GIB


def test_an_ancestors_limit_can_be_the_tighter_one(tree: Tree) -> None:
    tree.member("0::/slice/job/step")
    tree.v2("slice/job/step", current=GIB, max="max")
    tree.v2("slice/job", current=2 * GIB, max=32 * GIB)
    tree.v2("slice", current=10 * GIB, max=12 * GIB)  # other jobs are in it as well
    limit = cgroup_limit(proc=tree.proc, cgroup_root=tree.cgroup_root)
    assert limit is not None
    assert (limit.file, limit.headroom_bytes) == (tree.cgroup_root / "slice" / "memory.max", 2 * GIB)


def test_max_everywhere_is_no_limit(tree: Tree) -> None:
    tree.member("0::/job")
    tree.v2("job", current=GIB, max="max", high="max")
    assert cgroup_limit(proc=tree.proc, cgroup_root=tree.cgroup_root) is None
    assert tree.memory().free_bytes == 40 * GIB


def test_a_limit_above_what_is_available_does_not_bind(tree: Tree) -> None:
    tree.member("0::/job")
    tree.v2("job", current=GIB, max=60 * GIB)
    info = tree.memory()
    assert (info.free_bytes, info.total_bytes, info.source, info.note) == (40 * GIB, 60 * GIB, "psutil", "")


def test_a_cgroup_already_over_its_limit_leaves_nothing(tree: Tree) -> None:
    tree.member("0::/job")
    tree.v2("job", current=5 * GIB, high=4 * GIB)
    assert tree.memory().free_bytes == 0


def test_a_v1_limit_counts_the_whole_subtrees_inactive_cache(tree: Tree) -> None:
    tree.member("9:cpu,cpuacct:/job", "4:memory:/job", "1:name=systemd:/", "0::/")
    tree.v1("job", limit=8 * GIB, usage=5 * GIB, inactive=GIB)
    info = tree.memory()
    assert (info.free_bytes, info.source) == (4 * GIB, "cgroup v1")


@pytest.mark.parametrize("page", [4096, 65536])
def test_v1_writes_no_limit_as_a_huge_number(tree: Tree, page: int) -> None:
    tree.member("4:memory:/job")
    tree.v1("job", limit=(2**63 - 1) // page * page, usage=5 * GIB)
    assert cgroup_limit(proc=tree.proc, cgroup_root=tree.cgroup_root) is None


def test_limits_of_v1_and_v2_side_by_side_both_count(tree: Tree) -> None:
    tree.member("4:memory:/job", "0::/job")
    tree.v1("job", limit=8 * GIB, usage=GIB)
    tree.v2("unified/job", current=GIB, max=6 * GIB)
    assert tree.memory().free_bytes == 5 * GIB


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../docker/0123abcd", "/docker/0123abcd/inner", "/.."])
def test_a_mount_may_begin_at_the_containers_own_cgroup(tree: Tree, path: str) -> None:
    tree.member(f"0::{path}")
    tree.v2("..", current=GIB, max=GIB)  # beside the mount, no cgroup at all
    tree.v2("", current=GIB, max=4 * GIB)
    tree.v2("inner", current=GIB, max=3 * GIB)
    assert tree.memory().free_bytes == (2 * GIB if path.endswith("inner") else 3 * GIB)


def test_a_limit_whose_usage_cannot_be_read_is_an_error(tree: Tree) -> None:
    tree.member("0::/job")
    tree.v2("job", current=GIB, max=4 * GIB)
    (tree.cgroup_root / "job" / "memory.current").unlink()
    with pytest.raises(DeviceQueryFailed, match=rf"job/memory.max is '{4 * GIB}', and what is left of it is unknown"):
        tree.memory()


def test_this_machines_own_cgroup_and_memory_are_readable() -> None:
    info = cpu_memory()
    assert 0 < info.free_bytes <= info.total_bytes <= psutil.virtual_memory().total
