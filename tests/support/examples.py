"""How many random examples a test draws."""

from __future__ import annotations

import os

ALL = os.environ.get("MONETRUN_TEST_EXAMPLES") == "all"  # .ci/nightly sets it


def examples(count: int) -> int:
    """A quarter of ``count``, or all of them."""
    return count if ALL else -(-count // 4)
