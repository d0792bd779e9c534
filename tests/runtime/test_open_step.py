"""Evaluation within a step that is left open: within the budget where it is a part of each step."""

from types import SimpleNamespace

import pytest

from monetrun.runtime.open_step import OpenStep


class Running:
    """A plan that runs: what holds its steps to the budget, and what measures them."""

    holds = True

    def __init__(self, steps):
        self.enforcement = self
        self.steps = SimpleNamespace(steps=steps, interrupt=lambda: self.said.append("interrupt"))
        self.said = []

    def pause(self):
        self.said.append("pause")

    def goes_on(self):
        return False


@pytest.mark.parametrize("backward", [False, True], ids=["after a forward", "after a backward"])
@pytest.mark.parametrize("in_each_step", [False, True])
def test_evaluation_is_within_the_budget_where_the_recorded_step_has_it(backward, in_each_step):
    step, running = OpenStep(), Running(steps=2)
    step.goes_on(None, backward=backward)  # the step is recorded
    if in_each_step:
        step.evaluates(None)
    step.ended()
    step.evaluates(None)  # after it
    step.goes_on(running, backward=backward)
    step.evaluates(running)
    assert running.said == ([] if in_each_step else ["interrupt", "pause"])


def test_evaluation_between_steps_changes_nothing():
    step, running = OpenStep(), Running(steps=2)
    step.goes_on(running)
    step.ended()
    step.evaluates(running)
    assert running.said == []
