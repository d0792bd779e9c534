"""Entries of the cache in one file: what was written is read elsewhere, and nothing else is."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from monetrun.core.errors import UsageError
from monetrun.machine import archive
from monetrun.machine.store import Store


@dataclass(frozen=True)
class Measured:
    seconds: float


@pytest.fixture
def cache(tmp_path: Path) -> Store:
    made = Store(tmp_path / "here")
    made.put("plan", "a", Measured(1.0))
    made.put("probe", "b", Measured(2.0))
    made.update("costs", "c", {"x": Measured(3.0)}, Measured)
    return made


def test_another_store_has_what_was_exported(cache: Store, tmp_path: Path) -> None:
    there = Store(tmp_path / "there")
    there.put("plan", "a", Measured(7.0))
    assert archive.export(cache, tmp_path / "all.tar.gz") == 3
    assert archive.import_(there, tmp_path / "all.tar.gz") == (2, 1)
    assert there.get("plan", "a", Measured) == Measured(7.0)
    assert there.get("probe", "b", Measured) == Measured(2.0)
    assert there.get_mapping("costs", "c", Measured) == {"x": Measured(3.0)}
    assert archive.import_(there, tmp_path / "all.tar.gz", replace=True) == (3, 0)
    assert there.get("plan", "a", Measured) == Measured(1.0)


def test_the_name_of_the_file_says_how_it_is_compressed(cache: Store, tmp_path: Path) -> None:
    for name, magic in (("all.tar.gz", b"\x1f\x8b"), ("all", b"\x1f\x8b"), ("all.tar.xz", b"\xfd7zXZ\x00")):
        archive.export(cache, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
        assert archive.import_(Store(tmp_path / f"of {name}"), tmp_path / name) == (3, 0)


@pytest.mark.parametrize("name", ["all.tar.gz", "all.tar.xz"])
def test_an_archive_with_a_changed_bit_is_refused_or_what_it_was(name: str, cache: Store, tmp_path: Path) -> None:
    values = {str(k): Measured(random.Random(k).random()) for k in range(5000)}  # the stream begins well
    cache.update("costs", "d", values, Measured)
    file, drawn, there = tmp_path / name, random.Random(0), Store(tmp_path / "there")
    archive.export(cache, file)
    content, refused = file.read_bytes(), 0
    for place in (drawn.randrange(len(content)) for _ in range(60)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << drawn.randrange(8)]) + content[place + 1 :])
        try:
            archive.import_(there, file)
        except UsageError:
            refused += 1
            assert there.entries() == ()
        else:
            assert there.get_mapping("costs", "d", Measured) == values
            there.clear()
    assert refused >= 30


def test_only_usable_entries_of_the_wanted_kinds_are_exported(cache: Store, tmp_path: Path) -> None:
    cache.path("plan", "a").write_text("damaged")
    assert archive.export(cache, tmp_path / "all.tar.gz") == 2
    assert archive.export(cache, tmp_path / "all.tar.gz", ["probe"]) == 1
    with tarfile.open(tmp_path / "all.tar.gz") as written:
        assert written.getnames() == ["probe/b.json"]


def test_an_unusable_entry_is_replaced(cache: Store, tmp_path: Path) -> None:
    archive.export(cache, tmp_path / "all.tar.gz")
    cache.path("plan", "a").write_text("damaged")
    assert archive.import_(cache, tmp_path / "all.tar.gz") == (1, 2)
    assert cache.get("plan", "a", Measured) == Measured(1.0)


def with_members(file: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(file, "w:gz") as made:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            made.addfile(member, io.BytesIO(content))
    return file


@pytest.mark.parametrize(
    "name", ["../plan/a.json", "plan/../../a.json", "/etc/a.json", "plan/a", "plan", "what/a.json"]
)
def test_a_member_with_another_name_is_refused(name: str, cache: Store, tmp_path: Path) -> None:
    content = cache.path("plan", "a").read_bytes()
    file = with_members(tmp_path / "bad.tar.gz", {"plan/a.json": content, name: content})
    with pytest.raises(UsageError):
        archive.import_(Store(tmp_path / "there"), file)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_links_and_pipes_are_refused(kind: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        archive.import_(Store(tmp_path / "there"), with_members(tmp_path / "bad.tar.gz", {"plan/a.json": b""}, kind))


@pytest.mark.parametrize("changed", [b"", b"{}\n{}\n", b"x" * 100])
def test_a_damaged_entry_is_named_and_nothing_is_added(changed: bytes, cache: Store, tmp_path: Path) -> None:
    good = cache.path("probe", "b").read_bytes()
    file = with_members(tmp_path / "bad.tar.gz", {"probe/b.json": good, "plan/a.json": changed})
    with pytest.raises(UsageError, match=r"plan/a\.json"):
        archive.import_(Store(tmp_path / "there"), file)
    assert not (tmp_path / "there").exists()


def test_files_that_are_no_archives_are_refused(cache: Store, tmp_path: Path) -> None:
    archive.export(cache, tmp_path / "all.tar.gz")
    whole = (tmp_path / "all.tar.gz").read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], gzip.compress(b"hello" * 1000)):
        (tmp_path / "bad.tar.gz").write_bytes(content)
        with pytest.raises(UsageError, match="cannot be read"):
            archive.import_(Store(tmp_path / "there"), tmp_path / "bad.tar.gz")
    with pytest.raises(UsageError, match="cannot be read"):
        archive.import_(Store(tmp_path / "there"), tmp_path / "missing.tar.gz")


def test_a_file_that_cannot_be_written_leaves_nothing(cache: Store, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "none" / "all.tar.gz", tmp_path / "folder", "", ".", "/"):
        with pytest.raises(UsageError, match=r"cache export .*: (there is no such folder|it is a folder)"):
            archive.export(cache, place)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "here"]
