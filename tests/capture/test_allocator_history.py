"""What the history of CUDA's caching allocator tells of the requests of a step, on a stand-in GPU."""

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT, python_path
from support.standin_gpu import environment, unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() != "", reason=unavailable_reason() or "the stand-in GPU is there")

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
    variables = {**os.environ, **environment(gib=4), "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3 << 20, -1]
