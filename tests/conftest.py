"""Fixtures that several files use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def plain_surroundings(monkeypatch, tmp_path):
    """Workers find monetrun in a checkout; folders that are left behind show in tmp_path; no PET_ from outside."""
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCHELASTIC_", "MONETRUN_", "OMP_NUM_THREADS", "LOGLEVEL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
