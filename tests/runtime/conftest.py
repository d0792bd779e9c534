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


@pytest.fixture(scope="session", autouse=True)
def _budgets_are_refused_soon():
    """A refusal waits for the solver; what it finds for longer must not matter."""
    from monetrun.planning import kept_parameters

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_parameters, "_REFUSAL_SECONDS", 1.0)
        yield
