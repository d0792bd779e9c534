"""The stand-in GPU of tests/support: torch's own allocator on it, and what other processes see of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT, python_path
from support.standin_gpu import environment, parse_counters, unavailable_reason

MIB, GIB = 1 << 20, 1 << 30
CONTEXT, OTHERS = 300 * MIB, 600 * MIB

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason())


def run(script: str, variables: dict[str, str], **more: str) -> list:
    """The JSON lines that the script prints."""
    path = python_path(ROOT, ROOT / "tests")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "PYTORCH_"))}
    environ |= {"PYTHONPATH": path, **variables, **more}
    preamble = (
        "import json, torch\nfrom support.standin_gpu import counters, reset_counters\n"
        "def show(*values): print(json.dumps(values), flush=True)\n"
        "def take(mib, device): return torch.empty(mib << 20, dtype=torch.uint8, device=device)\n"
    )
    command = [sys.executable, "-c", preamble + script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("expandable", ["False", "True"])
def test_two_unlike_devices_are_counted_apart_and_the_driver_agrees_with_nvml(expandable):
    script = """
from monetrun.machine import device
a, b = take(100, "cuda:0"), take(300, "cuda:1")
show([torch.cuda.mem_get_info(i)[::-1] for i in range(2)], counters().held_bytes)
show([(info.total_bytes, info.free_bytes) for info in device.query("cuda", 2)])
del b
torch.cuda.empty_cache()
show(counters().held_bytes, counters().peak_bytes)
"""
    variables = environment(gib=[16, 8])
    (by_driver, held), (by_nvml,), (after, peak) = run(
        script, variables, PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{expandable}"
    )
    taken = [100 * MIB, 300 * MIB]
    expected = [
        [total, total - OTHERS - CONTEXT - nbytes] for total, nbytes in zip([16 * GIB, 8 * GIB], taken, strict=True)
    ]
    assert by_driver == by_nvml == expected
    assert held == peak == taken
    assert after == [100 * MIB, 0]


def test_what_is_full_and_what_is_over_the_cap_is_refused():
    script = """
def refused(mib):
    try:
        take(mib, "cuda")
    except torch.OutOfMemoryError:
        return True
    torch.cuda.empty_cache()
    return False
show(refused(1100), refused(1200))
show(counters().failed_allocations > 0, torch.cuda.memory_stats()["num_ooms"])
torch.cuda.set_per_process_memory_fraction(0.5)
show(refused(1000), refused(1100))
"""
    at_device, counted, at_cap = run(script, environment(gib=2))  # 2048 - 600 - 300 MiB are free
    assert at_device == [False, True]
    assert counted == [True, 1]
    assert at_cap == [False, True]


def test_a_process_sees_what_another_holds_until_it_ends(tmp_path):
    variables = environment(gib=4, counters=tmp_path)
    script = """
import subprocess, sys
a = take(500, "cuda")
text = "from monetrun.machine import device; print(device.query('cuda')[0].free_bytes)"
show(int(subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, check=True).stdout))
"""
    during = run(script, variables)
    after = run("from monetrun.machine import device\nshow(device.query('cuda')[0].free_bytes)", variables)
    assert during == [[4 * GIB - OTHERS - CONTEXT - 500 * MIB]]
    assert after == [[4 * GIB - OTHERS]]
    (written,) = Path(tmp_path).glob("*.json")  # only one of the three used the device
    assert parse_counters(written.read_text()).peak_bytes == (500 * MIB,)


@pytest.mark.nightly
def test_the_drivers_order_and_cuda_visible_devices_select_boards():
    script = "from monetrun.machine import device\nshow([info.total_bytes for info in device.query('cuda', 1)])"
    script += "\nshow([torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())])"
    variables = environment(gib=[2, 4], names=["Small", "Large"], order=[1, 0])
    assert run(script, variables) == [[[4 * GIB]], [[4 * GIB, 2 * GIB]]]
    assert run(script, variables, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [[[2 * GIB]], [[2 * GIB, 4 * GIB]]]
    assert run(script, variables, CUDA_VISIBLE_DEVICES="1") == [[[2 * GIB]], [[2 * GIB]]]


def test_a_convolution_net_trains_with_default_settings():
    script = """
from torch import nn
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
def step():
    x, y = torch.randn(4, 3, 32, 32).cuda(), torch.randint(0, 10, (4,)).cuda()
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
step()
step()
torch.cuda.synchronize()
reset_counters()
step()
c = counters()
show(c.kernel_launches > 10, c.library_calls > c.cudnn_executions, c.cudnn_executions, c.mallocs, c.memcpys)
# cuBLAS's workspace on compute capability 9.0 is 32 MiB
show(torch.cuda.memory_reserved() >= 32 << 20)
# a GradScaler finds no infinity where memory held something else before
adam, scaler = torch.optim.Adam(net.parameters()), torch.amp.GradScaler("cuda")
before = torch.arange(1, 1025).cuda()
del before
scaler.scale(net(torch.randn(4, 3, 32, 32).cuda()).sum()).backward()
scaler.step(adam)
show(len(adam.state), torch.full((), 2.5, device="cuda").item(), torch.full((), 7, device="cuda").item())
"""
    counts, workspace, single_values = run(script, environment())
    assert single_values == [6, 2.5, 7]
    launched, library, convolutions, mallocs, copies = counts
    assert launched
    assert library
    assert convolutions == 2  # forward, and the weight's gradient: the input needs none
    assert mallocs == 0  # a settled step asks the device for nothing
    assert copies >= 2
    assert workspace == [True]


def test_events_follow_the_devices_clock_and_waits_are_counted():
    script = """
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
a = torch.ones(8, device="cuda")
torch.cuda.synchronize()
reset_counters()
begin.record()
for _ in range(10):
    a.add_(1)
end.record()
early = end.query()
end.synchronize()
show(early, end.query(), begin.elapsed_time(end), counters().synchronizations, counters().kernel_launches)
"""
    ((early, late, milliseconds, waits, launches),) = run(script, environment(kernel_us=100_000))
    assert not early
    assert late
    assert launches == 10
    assert waits == 1
    assert milliseconds >= 1000 - 1e-3


def test_a_device_that_fails_stays_failed():
    script = """
def attempt():
    try:
        for _ in range(10):
            torch.ones(8, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError as failure:
        return str(failure).splitlines()[0]
show(attempt(), attempt())
"""
    message = "CUDA error: an illegal memory access was encountered"
    assert run(script, environment(fault_at_launch=5)) == [[message, message]]


@pytest.mark.nightly
def test_two_ranks_on_two_devices_train_a_step(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
import os, time, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 4).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(8, 64, device="cuda")).sum().backward()
optimizer.step()
dist.destroy_process_group()
time.sleep(0.5)  # torch aborts where autograd's thread still frees a backward while Python ends
""")
    folder = tmp_path / "counters"
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ = {**os.environ, **environment(gib=[4, 2], counters=folder)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    peaks = sorted(parse_counters(path.read_text()).peak_bytes for path in folder.glob("*.json"))
    assert [[nbytes > 0 for nbytes in peak] for peak in peaks] == [[False, True], [True, False]]
