"""What the history of CUDA's caching allocator tells of the requests of a step, on a stand-in GPU."""

from support.on_stand_in import needs_stand_in, printed_by

pytestmark = needs_stand_in

SCRIPT = """
import json
import torch
from monetrun.capture.allocator_history import AllocatorHistory

torch.empty(1, device="cuda")
history = AllocatorHistory(torch.device("cuda"))
history.start()
kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    del kept
print(json.dumps(history.piece()))
"""


def test_a_request_that_fails_is_none():
    assert printed_by(SCRIPT) == [3 << 20, -1]
