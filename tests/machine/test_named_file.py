"""Files that a user names: whole or as before; what is no file is written in place."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from monetrun.core.errors import UsageError
from monetrun.machine.named_file import STDOUT, check_file, write_file, writing


def test_a_file_is_the_new_one_or_as_before(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    for begun in (b"", b"half of"):
        file.write_text("before")

        def fail(begun: bytes = begun) -> None:
            with writing(file) as stream:
                stream.write(begun)
                stream.flush()
                assert file.read_text() == "before"
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
        assert file.read_text() == "before"
    write_file("--html", str(file), "all of it")
    assert file.read_text() == "all of it"


def test_a_pipe_and_a_link_stay_what_they_are(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    for path in (pipe, link):
        check_file("--out", path)
        write_file("--out", str(path), "content")
    reader.join()
    assert read == ["content"]
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert file.read_text() == "content"


def test_a_dash_is_stdout(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_file("--out", STDOUT)
    print("first")
    write_file("--out", STDOUT, "then\n")
    print("last")
    assert capsys.readouterr().out == "first\nthen\nlast\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", ".", "/", "none/x"])
def test_what_cannot_be_a_file_is_named(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^--out ") as refused:
        write_file("--out", path, "content")
    assert refused.value.message.endswith(("there is no such folder", "it is a folder"))
