"""For tests that train in this process."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _operators_are_timed_once():
    """Half of a short training's time is measuring operators; what a plan chooses by their seconds must not matter."""
    from monetrun.capture import cost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "ROUNDS", 1)
        yield
