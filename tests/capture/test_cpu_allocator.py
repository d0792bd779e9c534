"""The CPU allocator that counts and limits; the C++ is built here, against the installed torch."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from monetrun.capture import cpu_allocator as cpu  # noqa: E402
from monetrun.core import native  # noqa: E402
from support.paths import ROOT  # noqa: E402

MIB = 1 << 20


@pytest.fixture(autouse=True)
def installed():
    if reason := cpu.unavailable_reason():
        pytest.skip(reason)
    assert cpu.install()
    yield
    cpu.set_limit(None)


def run_fresh(code: str) -> str:
    """What ``code`` prints in a process of its own."""
    root = str(ROOT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_counts_tensors_to_the_byte():
    before = cpu.allocated_bytes()
    a = torch.empty(1001, dtype=torch.float32)
    b = torch.empty(7, dtype=torch.uint8)
    assert cpu.allocated_bytes() - before == 4004 + 7
    del a
    assert cpu.allocated_bytes() - before == 7
    view = b[2:]
    del b
    assert cpu.allocated_bytes() - before == 7  # a view holds its storage
    del view
    assert cpu.allocated_bytes() == before


def test_peak_is_the_most_since_its_reset():
    before = cpu.allocated_bytes()
    cpu.reset_peak()
    assert cpu.peak_bytes() == before
    a = torch.empty(3 * MIB, dtype=torch.uint8)
    del a
    b = torch.empty(MIB, dtype=torch.uint8)
    assert cpu.peak_bytes() - before == 3 * MIB
    cpu.reset_peak()
    assert cpu.peak_bytes() - before == MIB
    del b


def test_an_allocation_of_nothing_counts_nothing_and_is_never_refused():
    before = cpu.allocated_bytes()
    cpu.set_limit(0)
    empty = torch.empty(0)
    assert empty.numel() == 0
    assert cpu.allocated_bytes() == before


def test_install_twice_counts_once():
    assert cpu.install()
    cpu._installed.cache_clear()  # query the library again
    assert cpu.install()
    before = cpu.allocated_bytes()
    a = torch.empty(MIB, dtype=torch.uint8)
    assert cpu.allocated_bytes() - before == MIB
    del a
    assert cpu.allocated_bytes() == before


def test_what_passes_while_it_is_watched_is_counted_without_what_stays():
    kept, freed = [], [torch.empty(1000, dtype=torch.uint8)]
    assert cpu.passing_bytes() is None
    cpu.watch()
    for nbytes in (5000, 3000):
        passing = torch.empty(nbytes, dtype=torch.uint8)
        kept.append(torch.empty(7000, dtype=torch.uint8))
        del passing
    freed.clear()
    passing = torch.empty(5500, dtype=torch.uint8)
    del passing
    assert cpu.passing_bytes() == 5000  # of the last 5500 bytes 1000 were freed before
    assert cpu.passing_bytes() is None


def profiled(step) -> tuple[list[int], int, int]:
    """The profiler's memory events of one ``step()``, in order, and the peak and the change that were counted."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        before = cpu.allocated_bytes()
        cpu.reset_peak()
        step()
        peak, after = cpu.peak_bytes() - before, cpu.allocated_bytes() - before
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return [e.nbytes() for e in events], peak, after


def test_agrees_with_the_profiler_to_the_byte():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16 * 16 * 16, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

    def step():
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()
    events, peak, after = profiled(step)
    allocated = highest = 0
    for nbytes in events:
        allocated += nbytes
        highest = max(highest, allocated)
    assert len(events) > 50
    assert peak == highest > 8 * 16 * 32 * 32 * 4
    assert after == allocated


def test_past_the_limit_raises_out_of_memory_and_torch_goes_on():
    base = cpu.allocated_bytes()
    cpu.set_limit(base + 10 * MIB)
    assert cpu.limit_bytes() == base + 10 * MIB
    held = torch.empty(4 * MIB, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(7 * MIB, dtype=torch.uint8)
    message = str(caught.value)
    assert f"wanted 7.00 MiB ({7 * MIB} bytes)" in message
    assert f"free 6.00 MiB ({6 * MIB} bytes)" in message
    assert f"({base + 10 * MIB} bytes)" in message
    assert cpu.last_refused_bytes() == 7 * MIB
    assert cpu.allocated_bytes() == base + 4 * MIB  # the refused one left nothing behind
    rest = torch.full((6 * MIB,), 3, dtype=torch.uint8)  # all that is free, exactly
    assert cpu.allocated_bytes() == cpu.limit_bytes()
    assert rest.numpy().sum() == 18 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, dtype=torch.uint8)
    del held, rest
    cpu.set_limit(None)
    assert cpu.limit_bytes() is None
    assert torch.ones(20 * MIB, dtype=torch.uint8).numel() == 20 * MIB


def test_out_of_memory_in_the_backward_pass_reaches_the_caller_and_frees_its_tensors():
    weight = torch.ones(256, 1024, requires_grad=True)
    before = cpu.allocated_bytes()
    loss = (weight * 2).tanh().sum()
    cpu.set_limit(cpu.allocated_bytes() + MIB)  # the gradient of one multiplication fits, that of the next does not
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    cpu.set_limit(None)
    del loss
    assert weight.grad is None
    assert cpu.allocated_bytes() == before


def test_a_limit_below_what_is_allocated_refuses_until_enough_is_freed():
    base = cpu.allocated_bytes()
    held = torch.empty(4 * MIB, dtype=torch.uint8)
    cpu.set_limit(base + 2 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"free 0\.00 MiB"):
        torch.empty(1)
    del held
    again = torch.empty(2 * MIB, dtype=torch.uint8)
    assert cpu.allocated_bytes() == base + 2 * MIB
    del again


def test_the_wrapped_allocators_own_error_passes_and_counts_nothing():
    before = cpu.allocated_bytes()
    cpu.reset_peak()
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert cpu.allocated_bytes() == before
    assert cpu.peak_bytes() == before
    cpu.set_limit(before + MIB)  # with a limit, the same is refused before it is tried
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("nbytes", [-1, -(1 << 40)])
def test_a_negative_limit_is_refused_with_its_value(nbytes):
    with pytest.raises(ValueError, match=str(nbytes)):
        cpu.set_limit(nbytes)


def test_resizing_numpy_and_lazy_copies_are_counted():
    before = cpu.allocated_bytes()
    a = torch.arange(100, dtype=torch.int64)
    array = a.numpy()
    del a
    assert cpu.allocated_bytes() - before == 800  # numpy holds the tensor
    assert array.sum() == 4950
    del array
    assert cpu.allocated_bytes() == before
    b = torch.arange(100, dtype=torch.int64)
    b.resize_(1000)
    assert cpu.allocated_bytes() - before == 8000
    assert b[:100].sum() == 4950
    c = b.clone()
    assert cpu.allocated_bytes() - before == 16000
    d = torch._lazy_clone(c)  # a copy that is made when it is written: Allocator::clone
    assert cpu.allocated_bytes() - before == 16000
    d[0] = 7
    assert cpu.allocated_bytes() - before == 24000
    assert (int(c[0]), int(d[0]), int(d[99])) == (0, 7, 99)
    del b, c, d
    assert cpu.allocated_bytes() == before


RAW = """
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <atomic>
#include <thread>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))
API void* raw_allocate(size_t n) { return c10::GetCPUAllocator()->raw_allocate(n); }
API void raw_deallocate(void* block) { c10::GetCPUAllocator()->raw_deallocate(block); }
API int simple(size_t n) {
  const c10::DataPtr data = c10::GetCPUAllocator()->allocate(n);
  return c10::GetCPUAllocator()->is_simple_data_ptr(data);
}
// Threads allocate and free blocks of one size; gives how often they were refused.
API int64_t hammer(int threads, int rounds, size_t n) {
  std::atomic<int64_t> refused{0};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&] {
      for (int i = 0; i < rounds; ++i) {
        try {
          const c10::DataPtr data = c10::GetCPUAllocator()->allocate(n);
        } catch (const c10::OutOfMemoryError&) {
          ++refused;
        }
      }
    });
  }
  for (std::thread& thread : all) {
    thread.join();
  }
  return refused;
}
"""


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """The allocator as C++ sees it."""
    if reason := cpu.unavailable_reason():
        pytest.skip(reason)
    folder = Path(torch.__file__).parent
    source = tmp_path_factory.mktemp("raw") / "raw.cpp"
    source.write_text(RAW)
    library = source.with_suffix(".so")
    command = [
        *native.compiler(),
        *cpu._flags(),
        "-fPIC",
        "-shared",
        "-pthread",
        f"-I{folder / 'include'}",
        str(source),
    ]
    subprocess.run([*command, f"-L{folder / 'lib'}", "-lc10", "-o", str(library)], check=True)
    raw = ctypes.CDLL(str(library))
    raw.raw_allocate.restype, raw.raw_allocate.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    raw.raw_deallocate.restype, raw.raw_deallocate.argtypes = None, (ctypes.c_void_p,)
    raw.simple.argtypes = (ctypes.c_size_t,)
    raw.hammer.restype, raw.hammer.argtypes = ctypes.c_int64, (ctypes.c_int, ctypes.c_int, ctypes.c_size_t)
    return raw


def test_concurrent_threads_are_counted_exactly_and_the_limit_is_none_of_theirs(raw):
    base = cpu.allocated_bytes()
    cpu.set_limit(base + 640)
    for _ in range(20):
        assert raw.hammer(4, 5000, 640) == 0
    assert cpu.allocated_bytes() == base
    held = torch.empty(640, dtype=torch.uint8)  # what they have freed is no room
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, dtype=torch.uint8)
    del held
    cpu.set_limit(None)
    raw.hammer(4, 5000, 640)
    assert cpu.allocated_bytes() == base


def test_raw_allocation_is_counted_and_freed(raw):
    before = cpu.allocated_bytes()
    block = raw.raw_allocate(12345)
    ctypes.memset(block, 1, 12345)
    assert cpu.allocated_bytes() - before == 12345
    raw.raw_deallocate(block)
    assert cpu.allocated_bytes() == before
    assert raw.simple(64) == 1


def test_earlier_allocations_are_freed_uncounted_and_forks_start_without_a_limit():
    out = run_fresh(
        """
        import os, torch
        early = torch.ones(1 << 20)
        from monetrun.capture import cpu_allocator as cpu
        assert cpu.prebuild() is None
        late = torch.ones(1 << 20)  # prebuild installs nothing
        assert cpu.install()
        print(cpu.allocated_bytes(), cpu.last_refused_bytes())
        del early, late
        print(cpu.allocated_bytes(), cpu.peak_bytes())
        held = torch.ones(1000)
        cpu.set_limit(8000)
        child = os.fork()
        if child == 0:
            assert cpu.limit_bytes() is None
            torch.empty(1 << 20)  # no kernel: OpenMP does not survive a fork
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cpu.limit_bytes(), cpu.allocated_bytes())
        # freed while the interpreter goes down, after every module
        """
    )
    assert out.splitlines() == ["0 None", "0 0", "7 8000 4000"]


def test_without_a_compiler_it_gives_the_reason_and_torch_works():
    out = run_fresh(
        """
        import os, tempfile
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
        os.environ["CXX"] = "/nonexistent/compiler"
        import torch
        from monetrun.core.errors import MonetrunError
        from monetrun.capture import cpu_allocator as cpu
        print(cpu.install(), "/nonexistent/compiler" in cpu.unavailable_reason(), cpu.prebuild() is not None)
        try:
            cpu.peak_bytes()
        except MonetrunError as error:
            print("/nonexistent/compiler" in error.message)
        print(int(torch.ones(10).sum()))
        """
    )
    assert out.splitlines() == ["False True True", "True", "10"]


def test_what_another_thread_frees_in_a_moment_is_waited_for():
    held = torch.empty(MIB, dtype=torch.uint8)
    cpu.set_limit(cpu.allocated_bytes() + MIB // 2)

    def free():
        time.sleep(0.005)
        held.untyped_storage().resize_(0)

    thread = threading.Thread(target=free)
    thread.start()
    try:
        torch.empty(MIB, dtype=torch.uint8)
    finally:
        thread.join()
        cpu.set_limit(None)


def test_what_other_threads_allocate_under_a_limit_counts_from_the_next_one_on():
    """A thread loads the next batch while a step trains under its limit."""
    loaded = []

    def load():
        loaded.append(torch.empty(MIB, dtype=torch.uint8))

    cpu.set_limit(cpu.allocated_bytes() + MIB // 2)
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    step = torch.empty(MIB // 2, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, dtype=torch.uint8)
    loaded.clear()
    with pytest.raises(torch.OutOfMemoryError):  # it makes no room for the step
        torch.empty(1, dtype=torch.uint8)
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    del step
    cpu.set_limit(cpu.allocated_bytes())
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, dtype=torch.uint8)
    loaded.clear()
    assert len(torch.empty(MIB, dtype=torch.uint8)) == MIB
    cpu.set_limit(None)


def test_what_was_allocated_before_counts_once_it_is_asked_for_and_its_release_is_seen():
    said = run_fresh(
        """
        import numpy, torch
        from monetrun.capture import cpu_allocator as cpu
        model = torch.nn.Linear(100, 50)
        view, copied = torch.ones(1000)[10:20], torch.UntypedStorage(64)
        of_numpy = torch.from_numpy(numpy.ones(1000))
        bytes_of = torch.empty(0).set_(copied)
        cpu.install()
        after = torch.ones(10)
        assert cpu.allocated_bytes() == 40
        cpu.count_living()
        print(cpu.allocated_bytes() - 40, cpu.peak_bytes() - 40)
        cpu.count_living.__wrapped__()
        del view, model.bias
        print(cpu.allocated_bytes() - 40)
        model.weight.data = torch.empty(10)
        del bytes_of, copied, of_numpy
        print(cpu.allocated_bytes() - 40)
        """
    )
    held = 20000 + 200 + 4000 + 64
    assert said.split() == [str(n) for n in (held, held, 20000 + 64, 40)]


def test_a_notebooks_model_counts_that_was_there_before_monetrun_was_applied():
    said = run_fresh(
        """
        import torch
        model = torch.nn.Linear(64, 64)
        import monetrun
        from monetrun.capture import cpu_allocator as cpu
        monetrun.apply(model, "1MiB")
        print(cpu.allocated_bytes())
        """
    )
    assert said == str(64 * 65 * 4)
