"""Native libraries are built once for each source; where that fails, the reason is clear."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from monetrun.core import native
from support.paths import ROOT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A source that includes a header, and a cache of its own."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "answer.cpp").write_text('#include "number.hpp"\nextern "C" int answer() { return kN; }\n')
    (tmp_path / "sources" / "number.hpp").write_text("constexpr int kN = 41;\n")
    monkeypatch.setattr(native, "source_folder", lambda: tmp_path / "sources")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native._load.cache_clear()
    yield tmp_path
    native._load.cache_clear()


@pytest.mark.parametrize("place", ["cuda_ops", "monetrun/cuda_ops"], ids=["checkout", "installed"])
def test_the_sources_are_found_in_a_checkout_and_inside_an_installed_package(tmp_path, place):
    """Beside the package in a checkout; ``setup.py`` installs them as the package ``monetrun.cuda_ops``."""
    shutil.copytree(ROOT / "monetrun", tmp_path / "monetrun", ignore=shutil.ignore_patterns("__pycache__", "cuda_ops"))
    shutil.copytree(ROOT / "cuda_ops", tmp_path / place)
    code = "from monetrun.core import native; print(native.source_folder())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.stdout.strip() == str((tmp_path / place).resolve()), done.stderr


def has_compiler() -> bool:
    try:
        native.compiler()
    except native.NativeBuildFailed:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@needs_compiler
def test_a_source_is_built_once_and_again_when_what_it_includes_changes(folder):
    first = native.build("answer.cpp", ("-O1",))
    stamp = first.stat().st_mtime_ns
    assert native.build("answer.cpp", ("-O1",)) == first
    assert first.stat().st_mtime_ns == stamp
    assert native.build("answer.cpp", ("-O2",)) != first
    (folder / "sources" / "number.hpp").write_text("constexpr int kN = 42;\n")
    library, why = native.load("answer.cpp", ("-O1",))
    assert (library.answer(), why) == (42, "")
    assert not list(folder.glob("cache/monetrun/native/.build-*"))


@needs_compiler
def test_an_error_in_the_source_is_reported_in_the_compilers_words(folder):
    (folder / "sources" / "number.hpp").write_text("int kM = 1;\n")
    library, why = native.load("answer.cpp", ("-O1",))
    assert library is None
    assert "kN" in why
    assert not list(folder.glob("cache/monetrun/native/*.so"))


def test_without_a_compiler_the_reason_names_what_is_missing(folder, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    assert native.load("answer.cpp", ("-O1",)) == (
        None,
        "there is no C++ compiler (g++, c++ or clang++)\n  install g++, or set CXX",
    )


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_reason(folder, monkeypatch):
    blocked = folder / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(blocked))
    library, why = native.load("answer.cpp", ("-O1",))
    assert library is None
    assert "cannot be written" in why


@needs_compiler
def test_a_library_is_loaded_only_from_a_folder_that_nobody_else_writes(folder, monkeypatch):
    kept = folder / "cache" / "monetrun" / "native"
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    assert native.build("answer.cpp", ("-O1",)).parent == kept
    assert stat.S_IMODE(kept.stat().st_mode) == 0o755
    monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    library, why = native.load("answer.cpp", ("-O1",))
    assert library is None
    assert f"{kept} belongs to user" in why
    assert "set XDG_CACHE_HOME to a folder of yours" in why
    monkeypatch.undo()


@needs_compiler
@pytest.mark.parametrize("change", ["writable", "link", "fifo"])
def test_a_library_that_another_may_have_written_is_built_again(folder, change):
    built = native.build("answer.cpp", ("-O1",))
    good = built.read_bytes()
    built.unlink()
    planted = folder / "planted.so"
    planted.write_bytes(b"planted")
    if change == "writable":
        planted.rename(built)
        built.chmod(0o775)
    elif change == "link":
        built.symlink_to(planted)
    else:
        os.mkfifo(built)
    assert native.build("answer.cpp", ("-O1",)) == built
    assert not built.is_symlink()
    assert built.read_bytes()[:4] == good[:4] == b"\x7fELF"
    assert stat.S_IMODE(built.stat().st_mode) == 0o755


def test_a_new_folder_for_libraries_is_this_users_alone_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        native.cached(folder / "sources" / "answer.cpp", ".txt", (), lambda out: out.write_text("made"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(native.cache_folder().stat().st_mode) == 0o700


def test_a_relative_cache_home_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert native.cache_folder() == tmp_path / ".cache" / "monetrun" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", "/absolute")
    assert native.cache_folder() == Path("/absolute/monetrun/native")


@needs_compiler
def test_a_compiler_may_be_named_with_what_calls_it_or_with_options(folder, monkeypatch):
    plain = native.compiler()
    for words in (["env", *plain], [*plain, "-DUNUSED=1"]):
        monkeypatch.setenv("CXX", " ".join(words))
        assert native.compiler()[1:] == words[1:]
        library, why = native.load("answer.cpp", ("-O1", f"-DNUMBER={len(words[0])}"))
        assert (library is not None, why) == (True, "")
    for named in ("no-such-compiler -O2", "g++ 'open"):
        monkeypatch.setenv("CXX", named)
        with pytest.raises(native.NativeBuildFailed, match="not an executable"):
            native.compiler()
