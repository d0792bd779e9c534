"""A rank that monetrun ends tells the others why: their screens show that, and not that a connection was closed."""

import json
import sys

import pytest
import torch

from monetrun.core.errors import InfeasibleBudget
from monetrun.runtime import exchange
from monetrun.runtime.traceback_file import ERROR_FILE, install_excepthook

CLOSED = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")


@pytest.fixture
def fails(monkeypatch, tmp_path, capsys):
    """Ends a rank by an error; gives what it prints and what it leaves for its launcher."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(exchange, "_store", lambda: store)

    def fail(rank, error):
        file = tmp_path / f"error{rank}.json"
        monkeypatch.setenv(ERROR_FILE, str(file))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        install_excepthook()
        sys.excepthook(type(error), error, None)
        return capsys.readouterr().err, json.loads(file.read_text())["message"]

    return fail


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InfeasibleBudget("inputs of 4096x128 need 9 MiB", "fits: --budget 9MiB"), 80, "inputs of 4096x128 need 9 MiB"),
        (torch.OutOfMemoryError("CPU out of memory: wanted 1 MiB"), 84, "CPU out of memory: wanted 1 MiB"),
    ],
)
def test_a_rank_whose_collective_fails_shows_the_refusal_that_ended_another(fails, error, code, words):
    printed, message = fails(0, CLOSED)  # nobody has told anything
    assert "Connection closed by peer" in printed
    assert "errorCode" not in message
    printed, message = fails(1, error)
    assert words in printed
    assert message["errorCode"] == code
    for rank in (0, 2):
        printed, message = fails(rank, CLOSED)
        assert printed.startswith("monetrun: error: rank 1: ")
        assert words in printed
        assert "Connection closed" not in printed
        assert message["errorCode"] == code
    printed, message = fails(3, ValueError("its own"))
    assert "its own" in printed
    assert "errorCode" not in message


def test_a_refusal_is_printed_without_a_traceback(fails):
    printed, message = fails(0, InfeasibleBudget("too small", "fits: --budget 9MiB"))
    assert printed == "monetrun: error: too small\n  fits: --budget 9MiB\n"
    assert message["extraInfo"]["py_callstack"] == printed.rstrip("\n")
