"""A first launch builds what it needs side by side."""

import os
import subprocess
import sys
import textwrap

import pytest

from support.paths import ROOT

# ends once as many compilers run as the test expects, and fails where they run in turn
COMPILER = """\
#!/bin/sh
touch "$FOLDER/$$"
for i in $(seq 100); do
    [ "$(ls "$FOLDER" | wc -l)" -ge "$EXPECTED" ] && exit 0
    sleep 0.1
done
exit 1
"""


@pytest.mark.parametrize(
    ("device_type", "expected"), [("cpu", {"core", "cpu_allocator", "ops_cpu"}), ("cuda", {"core", "program"})]
)
def test_what_a_first_launch_needs_is_built_side_by_side(device_type, expected, tmp_path):
    cxx, running = tmp_path / "cxx", tmp_path / "running"
    cxx.write_text(COMPILER)
    cxx.chmod(0o755)
    running.mkdir()
    text = f"""
        from monetrun.launcher.libraries import build_ahead
        for thread in build_ahead({device_type!r}):
            thread.join()
    """
    environment = {
        **os.environ,
        **{"CXX": str(cxx), "FOLDER": str(running), "EXPECTED": str(len(expected))},
        **{"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name.partition("-")[0] for path in (tmp_path / "monetrun" / "native").glob("*.so")} == expected
