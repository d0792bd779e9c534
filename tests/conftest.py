"""The order of the files, and fixtures that several of them use."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import time

import pytest

from support.paths import ROOT, python_path

# two processes with two threads each share two cores: a thread that spins while it waits takes the other's core
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# no timing decides: neither how long an example takes, nor how long it takes to draw one
if importlib.util.find_spec("hypothesis") is not None:  # recipes/gpu_check.py runs tests that need none
    from hypothesis import HealthCheck, settings

    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

os.environ["PYTHONPATH"] = python_path(*filter(None, [os.environ.get("PYTHONPATH")]))

# Files with long tests, nightly ones aside, in about the order of their time: a file runs in one process, and none of
# these should be left over when the others are done.
LONGEST = (
    "test_many_random_models",
    "test_moving_memory",
    "test_real_scripts",
    "test_gpu_launches",
    "test_end_to_end",
    "test_fsdp",
    "test_training",
    "test_session",
    "test_implementations",
    "test_random_models",
    "test_parts",
    "test_ddp_kinds",
    "test_nodes",
    "test_commands",
    "test_torch_launcher",
    "test_unplannable_use",
    "test_guards",
    "test_launch",
    "test_check",
    "test_recipes_train_alike",
    "test_lengths_by_rank",
    "test_changed_files",
    "test_whole_networks",
    "test_solver_laws",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Two element types show that CUDA's kernels compute, when they run on the CPU, what the native ones do."""
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if given.get("kernel") == "cuda on the CPU" and str(given.get("dtype")) in ("torch.float64", "torch.float16"):
        item.add_marker(pytest.mark.nightly)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session", autouse=True)
def _only_what_a_test_allocates_counts():
    """``monetrun.apply`` counts what its process has allocated before, which is here what other tests still hold."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    from monetrun.capture import cpu_allocator

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu_allocator, "count_living", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient_searches():
    """Searches read this process's CPU time and wait longer, so that their results depend less on a busy machine.

    Most tests that train a model look for its most frugal schedule twice, so that search gets less work.
    """
    from monetrun.solve import timing

    with timing.override(clock=time.process_time, patience=8.0, greedy_patience=2.0, frugal_seconds=0.5):
        yield


@pytest.fixture(scope="session", autouse=True)
def _garbage_is_not_searched_in_torch():
    """What torch's import has made stays, and takes most of the time of each collection."""
    import torch._dynamo  # noqa: F401 - makes most of it

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nor_once_a_test_has_had_it_searched():
    """A search for a model that has none of the parameters looks through all objects, from then on."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def all_garbage_is_searched_afterwards():
    """For tests that freeze what is there themselves: what other tests measure may be held by it."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _guards_are_not_timed():
    """Dynamo times the guards of what it compiles once, with cold caches, for its log: a tenth of a small capture."""
    from torch._dynamo import guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *arguments: 0.0)
        yield


@pytest.fixture
def plain_surroundings(monkeypatch, tmp_path):
    """Workers find monetrun in a checkout; folders that are left behind show in tmp_path; no PET_ from outside."""
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCHELASTIC_", "MONETRUN_", "OMP_NUM_THREADS", "LOGLEVEL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def on_the_device():
    """Tensors are made on the device of the tests of kernels, unless they are drawn from a generator of the CPU."""
    import torch

    from support.kernel_cases import DEVICE

    with contextlib.nullcontext() if DEVICE == "cpu" else torch.device(DEVICE):
        yield


@pytest.fixture(scope="module", params=["native", "reference"])
def kernel(request):
    """Name of an operator to what is tested: the operator with its native kernel, or its reference."""
    from support.kernel_cases import operators

    with operators(request.param) as found:
        yield found
