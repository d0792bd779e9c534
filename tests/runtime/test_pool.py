"""The pool of a planned step, held on a stand-in GPU before the step."""

from support.on_stand_in import needs_stand_in, printed_by

pytestmark = needs_stand_in

MIB = 1 << 20
SCRIPT = """
import json
import torch
from monetrun.core.plan import Pool
from monetrun.runtime import pool

MIB = 1 << 20
torch.empty(1, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    pool.hold(torch.device("cuda"), Pool(0, 4 * MIB, 160 * MIB), libraries=True, budget_bytes=1 << 30)
found = {}
for segment in torch.cuda.memory_snapshot():
    found[segment["stream"]] = found.get(segment["stream"], 0) + segment["total_size"]
print(json.dumps(sorted(found.items())))
"""


def test_a_model_that_is_called_on_another_stream_has_its_pool_on_the_default_one():
    """There its graphs' memory is planned; cuBLAS would keep workspaces for the other stream, too."""
    ((stream, reserved),) = printed_by(SCRIPT)
    assert (stream, reserved) == (0, 164 * MIB)


SPLIT = """
import json, os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"  # of the two variables torch reads this one
import torch
from monetrun.core.plan import Pool
from monetrun.runtime import pool

MIB = 1 << 20
torch.empty(1, device="cuda")
pool.hold(torch.device("cuda"), Pool(0, 4 * MIB, 160 * MIB), libraries=False, budget_bytes=1 << 30)
before = torch.cuda.memory_reserved()
x = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
print(json.dumps([before // MIB, torch.cuda.memory_reserved() // MIB]))
"""


def test_no_large_block_is_held_that_the_allocator_would_not_split(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert printed_by(SPLIT) == [4, 4 + 10]
