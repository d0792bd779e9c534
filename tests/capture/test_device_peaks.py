"""The script's peaks and ours of the same allocator: neither sees what the other resets."""

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


def test_each_sees_the_most_since_its_own_reset():
    assert printed_by(SCRIPT) == [
        [40, 40, 40],
        [40, 40, 20],
        [0, 40, 20],
        [10, 10, 10],
        10,
        10,
        [10, 110, 10],
        [15, 110, 15],
    ]
