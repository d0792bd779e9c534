"""Memory limits of the cgroups that this process is in, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from monetrun.core.errors import DeviceQueryFailed

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
BYTES_HINT = "A budget in bytes (--budget 12GiB) or of the plain peak (--budget 0.6x) needs no query."

_NO_LIMIT_BYTES = 1 << 62  # cgroup v1 writes "no limit" as LONG_MAX rounded down to a page


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """The tightest limit above this process.

    Attributes:
        version: 1 or 2.
        file: the file that sets it.
        limit_bytes: what is written there.
        headroom_bytes: what is left of it. Inactive page cache counts as left, since the kernel drops it first.
    """

    version: int
    file: Path
    limit_bytes: int
    headroom_bytes: int


def cgroup_limit(*, proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> CgroupLimit | None:
    """The limit with the least headroom among this process's cgroup and those above it, or None.

    Raises:
        DeviceQueryFailed: a limit is set, and the file with the usage cannot be read.
    """
    limits: list[CgroupLimit] = []
    for version, hierarchy, path in _memberships(proc, cgroup_root):
        folder = _folder(hierarchy, path)
        while True:
            limits += _limits_of(folder, version)
            if folder == hierarchy:
                break
            folder = folder.parent
    return min(limits, key=lambda limit: limit.headroom_bytes, default=None)


def _memberships(proc: Path, cgroup_root: Path) -> Iterator[tuple[int, Path, str]]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return  # a kernel without cgroups
    for line in lines:  # "4:memory:/a/b" in version 1, "0::/a/b" in version 2
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield 1, cgroup_root / "memory", path
        elif not controllers:
            unified = cgroup_root / "unified"  # beside v1 hierarchies
            yield 2, unified if unified.is_dir() else cgroup_root, path


def _folder(hierarchy: Path, path: str) -> Path:
    # In a container the mount often begins at the container's own cgroup, while the path begins at the host's root:
    # drop leading components until the rest exists.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for start in range(len(parts)):
        folder = hierarchy.joinpath(*parts[start:])
        if folder.is_dir():
            return folder
    return hierarchy


def _limits_of(folder: Path, version: int) -> Iterator[CgroupLimit]:
    names: tuple[str, ...]
    if version == 2:
        # memory.high does not kill, but it throttles a process so far that training cannot go on.
        names, usage, cache = ("memory.max", "memory.high"), "memory.current", "inactive_file"
    else:
        names, usage, cache = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
    for name in names:
        file = folder / name
        try:
            text = file.read_text().strip()
        except OSError:
            continue  # a root has none
        if text == "max":
            continue
        try:
            limit_bytes = int(text)
            if limit_bytes >= _NO_LIMIT_BYTES:
                continue
            used_bytes = int((folder / usage).read_text())
            stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
            reclaimable_bytes = min(used_bytes, int(stat.get(cache, 0)))
        except (OSError, ValueError) as failure:
            raise DeviceQueryFailed(
                f"{file} is {text!r}, and what is left of it is unknown: {failure}", BYTES_HINT
            ) from failure
        yield CgroupLimit(version, file, limit_bytes, max(0, limit_bytes - used_bytes + reclaimable_bytes))
