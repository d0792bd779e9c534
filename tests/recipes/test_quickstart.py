"""The README's first command, and what the README says that it prints."""

import json
import re
import subprocess
import sys

import pytest

from support.launches import set_apart, skip_without
from support.paths import RECIPES, ROOT, SCRIPTS

QUICKSTART, SMALL = str(RECIPES / "quickstart.py"), str(SCRIPTS / "tiny.py")


def printed_by(tmp_path, monkeypatch, *command):
    set_apart(monkeypatch, tmp_path)
    done = subprocess.run([sys.executable, "-m", "monetrun", *command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


def form(line):
    """Without numbers, the script's name and what differs from plan to plan."""
    line = re.sub(r" \((\d+) runs\)", "", re.sub(r"\w+\.py$", "SCRIPT", line))
    line = re.split(r"(?<=implementations:)|(?<=parameters) ", line)[0]
    return re.sub(r"[-+]?\d[\d.]*( [KMG]iB)?", "#", line).strip()


def samples(page):
    """The lines that a page shows as printed."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    begin = next(i for i, line in enumerate(lines) if line.strip() == "monetrun  quickstart.py")
    last = next(i for i, line in enumerate(lines) if line.strip().startswith("overhead "))
    return lines[begin : last + 1]


def assert_printed_like(page, done):
    printed = [form(line) for line in done.stderr.splitlines()]
    for line in samples(page):
        assert form(line) in printed
        del printed[: printed.index(form(line)) + 1]


def test_the_pages_show_what_a_launch_prints(tmp_path, monkeypatch):
    done = printed_by(
        tmp_path,
        monkeypatch,
        "--budget",
        "0.8x",
        "--solver-seconds",
        "0.5",
        SMALL,
        str(tmp_path / "out"),
        "--steps",
        "6",
    )
    assert_printed_like("README.md", done)
    assert_printed_like("docs/quickstart.md", done)


@pytest.mark.nightly
def test_the_quickstart_trains_in_half_of_the_memory(tmp_path, monkeypatch):
    skip_without(["sklearn", "torchvision"])
    done = printed_by(tmp_path, monkeypatch, "--budget", "0.5x", "--json", QUICKSTART, "--epochs", "1")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == 8
    assert found["measured_peak_bytes"] <= found["budget_bytes"] <= 0.5 * found["plain_peak_bytes"] + 1
    assert "test accuracy" in done.stdout
    assert_printed_like("README.md", done)
    assert_printed_like("docs/quickstart.md", done)
