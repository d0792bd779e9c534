"""Segments are expandable where the driver can map memory, which is asked once for a driver."""

import json
import os
import subprocess
import sys

import pytest

from monetrun.launcher import allocator
from monetrun.machine.driver import DriverFailed
from monetrun.runtime.settings import Settings
from support.on_stand_in import needs_stand_in
from support.paths import ROOT, python_path
from support.standin_gpu import environment

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "MONETRUN_OWN_ALLOCATOR": "1"}


@pytest.fixture
def asked(monkeypatch):
    """The answers of the driver, which are given one after the other."""
    answers = []

    def answer(environ):
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocator, "why_nothing_is_mapped", answer)
    allocator._refusal.cache_clear()
    yield answers
    allocator._refusal.cache_clear()


def test_a_driver_that_maps_no_memory_is_asked_once_and_one_line_says_so(asked, tmp_path, capsys):
    settings = Settings(cache_folder=str(tmp_path))
    asked.append("cuMemCreate: CUDA_ERROR_NOT_SUPPORTED (801)")
    for _ in range(2):
        assert allocator.allocator_variables("cuda", settings) == {}
    said = "monetrun: segments are not expandable: the CUDA driver maps no memory"
    assert capsys.readouterr().err.startswith(f"{said} (cuMemCreate: CUDA_ERROR_NOT_SUPPORTED (801))")
    allocator._refusal.cache_clear()  # another launch
    assert allocator.allocator_variables("cuda", settings) == {}
    assert capsys.readouterr().err.count(said) == 1


def test_a_driver_that_maps_memory_is_asked_once(asked, tmp_path, capsys):
    settings = Settings(cache_folder=str(tmp_path))
    asked.append("")
    for _ in range(2):
        assert allocator.allocator_variables("cuda", settings) == EXPANDABLE
        allocator._refusal.cache_clear()
    assert capsys.readouterr().err == ""


def test_what_the_driver_cannot_say_is_asked_again_and_changes_nothing(asked, tmp_path):
    settings = Settings(cache_folder=str(tmp_path))
    asked += [DriverFailed("memory has run out"), "no"]
    assert allocator.allocator_variables("cuda", settings) == EXPANDABLE
    allocator._refusal.cache_clear()
    assert allocator.allocator_variables("cuda", settings) == {}


def test_nothing_is_asked_where_the_user_has_configured_the_allocator_or_on_a_cpu(asked, monkeypatch):
    assert allocator.allocator_variables("cpu", Settings()) == {}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    assert allocator.allocator_variables("cuda", Settings()) == {}


def told(**machine):
    """What the driver of such a stand-in says, in a process that has it."""
    script = """
import json, os
from monetrun.machine.driver import DriverFailed, why_nothing_is_mapped
try:
    print(json.dumps(why_nothing_is_mapped(os.environ)))
except DriverFailed as failure:
    print(json.dumps(["unknown", str(failure)]))
"""
    variables = {**os.environ, **environment(**machine), "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_stand_in
@pytest.mark.parametrize("call", ["", "cuMemCreate", "cuMemSetAccess"])
def test_the_driver_is_tried_and_not_believed(call):
    assert told(refused=call).partition(":")[0] == call


@needs_stand_in
def test_on_a_full_device_it_is_not_known_whether_memory_is_mapped():
    assert told(gib=1, others_mib=723.5) == ["unknown", "cuMemCreate: memory has run out"]
