"""The limit on what torch allocates, on a stand-in GPU."""

from support.on_stand_in import needs_stand_in, printed_by

pytestmark = needs_stand_in

HELPERS = """
import contextlib, json
import torch
from monetrun.runtime import allocation_limit

def allowed():
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    torch.cuda.empty_cache()
    return True

device, seen = torch.device("cuda"), []
"""

SCRIPT = """
with contextlib.ExitStack() as undo:
    allocation_limit.keep_the_scripts(undo)
    seen.append(allowed())
    torch.cuda.set_per_process_memory_fraction(0.1)  # 410 MiB of 4 GiB
    for nbytes in (None, 3 << 30, None):
        allocation_limit.set_limit(device, nbytes)
        seen.append(allowed())
    torch.cuda.set_per_process_memory_fraction(0.9, "cuda:0")
    for nbytes in (None, 100 << 20):
        allocation_limit.set_limit(device, nbytes)
        seen.append(allowed())
    torch.cuda.set_per_process_memory_fraction(0.8, 0)
    seen.append(allowed())  # the script cannot lift the budget
print(json.dumps(seen))
"""


def test_a_limit_that_the_script_sets_holds_beside_the_budgets():
    assert printed_by(HELPERS + SCRIPT) == [True, False, False, False, True, False, False]


CONFIGURED = """
for nbytes in (3 << 30, None):
    allocation_limit.set_limit(device, nbytes)
    seen.append(allowed())
print(json.dumps(seen))
"""


def test_a_limit_in_the_allocators_settings_holds_beside_the_budgets(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.1")
    assert printed_by(HELPERS + CONFIGURED) == [False, False]
