"""The pool of a planned step, held on a stand-in GPU before the step."""

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT, python_path
from support.standin_gpu import environment, unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() != "", reason=unavailable_reason() or "the stand-in GPU is there")

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
    variables = {**os.environ, **environment(gib=4), "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((stream, reserved),) = json.loads(done.stdout)
    assert (stream, reserved) == (0, 164 * MIB)
