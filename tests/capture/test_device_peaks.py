"""The script's peaks and ours of the same allocator: neither sees what the other resets."""

import pytest

from monetrun.capture import program
from support.on_stand_in import needs_stand_in, printed_by

pytestmark = needs_stand_in

SCRIPT = """
import json
import torch
from monetrun.capture import device_peaks
from monetrun.capture.meter import CudaMeter

MIB = 1 << 20

def take(mib):
    torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

meter = CudaMeter(torch.device("cuda"))
meter.reset_peak()  # before the device is used
said = []

def say():
    of_script = torch.cuda.max_memory_allocated() // MIB, torch.cuda.max_memory_reserved() // MIB
    said.append([*of_script, meter.peak_bytes() // MIB])

take(40)
say()
meter.reset_peak()
take(20)
say()
torch.cuda.reset_peak_memory_stats()
say()
take(30)
meter.reset_peak()
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
take(10)
say()
said.append(torch.accelerator.max_memory_allocated() // MIB if hasattr(torch.accelerator, "memory_stats") else 10)
said.append(torch.cuda.memory_stats()["allocated_bytes.large_pool.peak"] // MIB)
with device_peaks.uncounted(0):
    take(100)
say()
torch.cuda.reset_peak_memory_stats()
take(15)
say()
print(json.dumps(said))
"""


LOADED = "from monetrun.capture import program\nassert not program.unavailable_reason()\n"


@pytest.mark.parametrize("before", ["", LOADED], ids=["in Python", "natively"])
def test_each_sees_the_most_since_its_own_reset(before):
    if before and (reason := program.unavailable_reason()):
        pytest.skip(reason)
    assert printed_by(before + SCRIPT) == [
        [40, 40, 40],
        [40, 40, 20],
        [0, 40, 20],
        [10, 10, 10],
        10,
        10,
        [10, 110, 10],
        [15, 110, 15],
    ]


ALL = """
import json
import torch
from monetrun.capture import program
from monetrun.capture.meter import CudaMeter

meter, found = CudaMeter(torch.device("cuda")), []
for load in (False, True):
    assert not load or not program.unavailable_reason()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for k in range(3):
        held = [torch.empty(n, device="cuda") for n in (100 << k, 3 << 20 - k, 9 << 20)]
        del held
        torch.cuda.empty_cache()
        meter.reset_peak()
    found.append({k: v for k, v in torch.cuda.memory_stats().items() if k.endswith(".peak")})
print(json.dumps(found))
"""


def test_every_peak_of_the_script_is_kept_natively_too():
    if reason := program.unavailable_reason():
        pytest.skip(reason)
    in_python, natively = printed_by(ALL)
    assert natively == in_python
    assert natively["segment.all.peak"] > 2


PRIVATE = """
import torch
from monetrun.capture import device_peaks
from monetrun.capture.meter import CudaMeter

CudaMeter(torch.device("cuda"))
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    held = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.reset_peak_memory_stats()
with device_peaks.uncounted(0):
    torch.empty(9 << 20, dtype=torch.uint8, device="cuda")
print(torch.cuda.max_memory_allocated() >> 20)
"""


def test_the_scripts_private_pools_have_no_peaks_of_their_own():
    assert printed_by(PRIVATE) == 5


WORKSPACES = """
import torch
from monetrun.capture import allocator_history

device, found = torch.device("cuda", 0), []
x = torch.ones(64, 64, device=device)
for private in (False, True):
    if private:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            held = torch.empty(5 << 20, dtype=torch.uint8, device=device)
    x @ x
    found.append(allocator_history.clear_library_workspaces(device) > 0)
print(str(found).lower())
"""


def test_workspaces_of_cublas_that_the_scripts_graphs_may_use_are_not_freed():
    assert printed_by(WORKSPACES) == [True, False]
