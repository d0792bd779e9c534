"""Commands whose output nobody reads any more (``| head``): exit codes, and what goes on without a reader."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("plain_surroundings")


def test_a_click_command_whose_reader_has_gone_ends_as_by_sigpipe(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone:
        environment = {**os.environ, "MONETRUN_CACHE": str(tmp_path)}
        words = [sys.executable, "-u", "-m", "monetrun", "cache", "list", "--json"]
        done = subprocess.run(words, stdout=gone, stderr=subprocess.PIPE, env=environment)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


ENDS_AT_ONCE = """
import sys
from monetrun.commands import cache, main
from monetrun.launcher import report

def run(words):
    if words == ["report"]:
        report.print_last("{}")
    elif words == ["print"]:
        print("printed when stdout is flushed")
    else:
        report.stdout_console().print("\\n" * int(words[0]))
    report.stderr_console().print("still here")
    print("here too", file=sys.stderr, flush=True)
    open("ended", "w").close()
    return 0

cache.run = run
sys.argv = ["monetrun", "cache", *sys.argv[1:]]
main.console()
"""


@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize(
    ("words", "gone", "code", "ends"),
    [
        (["1"], "stdout", 141, False),
        (["99999"], "stdout", 141, False),
        (["report"], "stdout", 0, True),
        (["1"], "stderr", 0, True),
        (["1"], "", 0, True),
    ],
)
def test_a_command_whose_reader_has_gone_ends_as_by_sigpipe_and_does_without_a_reader_of_messages(
    words, gone, code, ends, unbuffered, tmp_path
):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | ({gone: closed} if gone else {})
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        command = [sys.executable, "-c", ENDS_AT_ONCE, *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, text=True, **streams)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "ended").exists() == ends
    if gone == "stdout":
        told = ["monetrun: warning: the report on stdout has no reader any more", "still here", "here too"]
        assert done.stderr.splitlines() == (told if ends else [])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full disk")
@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize(("words", "full"), [("1", "stderr"), ("report", "stdout"), ("report", "both")])
def test_a_full_disk_for_messages_and_the_report_changes_no_exit_code(words, full, unbuffered, tmp_path):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as disk:
        streams = {"stdout": disk, "stderr": disk}
        if full != "both":
            streams = dict.fromkeys(streams, subprocess.PIPE) | {full: disk}
        command = [sys.executable, "-c", ENDS_AT_ONCE, words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, text=True, **streams)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ended").exists()
    if full == "stdout":
        told = "monetrun: warning: the report on stdout is lost: stdout cannot be written: No space left on device"
        assert done.stderr.splitlines() == [told, "still here", "here too"]


def test_what_is_printed_at_the_end_is_flushed_before_the_exit_code_is_decided(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open(writer, "wb") as closed:
        words = [sys.executable, "-c", ENDS_AT_ONCE, "print"]
        assert subprocess.run(words, env=environment, cwd=tmp_path, stdout=closed).returncode == 128 + signal.SIGPIPE
    assert (tmp_path / "ended").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full disk")
@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("words", [["1"], ["99999"], ["print"]])
def test_a_full_disk_for_a_result_is_the_reason_that_is_told(words, unbuffered, tmp_path):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as disk:
        command = [sys.executable, "-c", ENDS_AT_ONCE, *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, text=True, stdout=disk, stderr=subprocess.PIPE)
    assert done.returncode == 70
    told = "monetrun: error: stdout cannot be written: No space left on device"
    assert told in done.stderr.splitlines()
    assert "Traceback" not in done.stderr


def test_what_stdout_cannot_encode_is_escaped():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    lines = "from monetrun.commands import main; main._dispatch = lambda words: print(chr(0x2581)) or 0; main.console()"
    done = subprocess.run([sys.executable, "-c", lines], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\\u2581\n"), done.stderr
