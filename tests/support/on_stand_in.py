"""Scripts of tests on a stand-in GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from support.paths import ROOT, python_path
from support.standin_gpu import environment, unavailable_reason

# A thread of autograd's that starts while Python ends would abort the process.
_END = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"

_WHY = unavailable_reason()
needs_stand_in = pytest.mark.skipif(_WHY != "", reason=_WHY or "the stand-in GPU is there")


def printed_by(script: str) -> Any:
    """What the script prints as JSON in a process of its own, on a device of 4 GiB."""
    variables = {**os.environ, **environment(gib=4), "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", script + _END], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
