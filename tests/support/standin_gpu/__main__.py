"""``python tests/support/standin_gpu COMMAND...``: run it on stand-in GPUs, as STANDIN_GPU_* variables say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.standin_gpu import Unavailable, environment

if len(sys.argv) < 2:
    sys.exit(__doc__)
try:
    # commands that one user starts share one machine, as they would a real one
    variables = environment(state=Path(f"/tmp/standin-gpu-{os.getuid()}.state"))
except Unavailable as failure:
    sys.exit(f"the stand-in GPU cannot be built: {failure}")
given = {name: value for name, value in os.environ.items() if name.startswith("STANDIN_GPU")}
if "STANDIN_GPU_GIB" in given:  # as many devices as it has numbers, unless their number is given too
    del variables["STANDIN_GPUS"]
os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **variables, **given})
