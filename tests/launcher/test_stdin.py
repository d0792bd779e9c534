"""What a trial run reads of standard input is there for the workers, too."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time

import pytest

from monetrun.launcher import stdin


@pytest.fixture
def standard_input():
    """Replaces this process's standard input by a given file."""
    before = os.dup(0)
    yield lambda file: os.dup2(file, 0)
    os.dup2(before, 0)
    os.close(before)


def read_all() -> bytes:
    with os.fdopen(os.dup(0), "rb") as file:
        return file.read()


DATA = bytes(range(256)) * 1000


def test_a_trial_reads_what_the_workers_read(standard_input, tmp_path):
    file = tmp_path / "input"
    file.write_bytes(DATA)
    with file.open("rb") as opened:
        os.lseek(opened.fileno(), 7, os.SEEK_SET)
        standard_input(opened.fileno())
        for _ in range(2):
            with stdin.lent() as lent:
                assert os.read(lent, 5) == DATA[7:12]
        assert read_all() == DATA[7:]

    out, into = os.pipe()
    standard_input(out)

    def write() -> None:
        with os.fdopen(into, "wb") as sink:
            sink.write(DATA[:100_000])
            sink.flush()
            time.sleep(0.2)
            sink.write(DATA[100_000:])

    writer = threading.Thread(target=write)
    writer.start()
    with stdin.lent() as lent:
        assert os.read(lent, 5) == DATA[:5]
    with stdin.lent() as lent, os.fdopen(os.dup(lent), "rb") as again:
        assert again.read() == DATA  # to its end
    with stdin.lent():
        pass
    assert read_all() == DATA
    writer.join()


def test_a_file_that_may_not_be_opened_any_more_is_read_all_the_same(standard_input, tmp_path, monkeypatch):
    """Another user's, as under ``sudo -u``."""
    file = tmp_path / "input"
    file.write_bytes(DATA)

    def refuse(path, flags):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with file.open("rb") as opened:
        standard_input(opened.fileno())
        monkeypatch.setattr(os, "open", refuse)
        with stdin.lent() as lent:
            assert os.read(lent, 5) == DATA[:5]
        monkeypatch.undo()
        assert read_all() == DATA


def test_an_input_that_nobody_writes_to_keeps_nothing_waiting(standard_input):
    out, into = os.pipe()
    standard_input(out)
    began = time.monotonic()
    with stdin.lent():
        pass
    assert time.monotonic() - began < 5
    os.write(into, b"later")
    os.close(into)
    assert read_all() == b"later"
    with open(os.devnull, "rb") as nothing:
        standard_input(nothing.fileno())
        with stdin.lent() as lent:
            assert os.read(lent, 1) == b""
    os.close(0)
    with stdin.lent() as lent:
        assert os.read(lent, 1) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="what was not read is taken, too")
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_a_trial_does_not_read_is_not_taken(kind, standard_input):
    ours, theirs = (one.detach() for one in socket.socketpair()) if kind == "socket" else reversed(os.pipe())
    standard_input(theirs)
    os.write(ours, b"first\nsecond\n")
    with stdin.lent():
        time.sleep(0.3)
    assert os.read(theirs, 6) == b"first\n"  # the shell's, whose standard input this is
    with stdin.lent() as lent:
        assert os.read(lent, 3) == b"sec"
        os.write(ours, b"third")
    os.close(ours)
    assert read_all() == b"second\nthird"
    os.close(theirs)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo-terminal")
def test_a_terminal_is_asked_once_by_the_workers_only(standard_input):
    ours, theirs = os.openpty()
    standard_input(theirs)
    os.write(ours, b"yes\n")
    with stdin.lent() as lent:
        assert os.read(lent, 10) == b""
    assert os.read(0, 10) == b"yes\n"
