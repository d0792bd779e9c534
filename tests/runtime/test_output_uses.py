"""Which outputs the loss is made of, in the recorded step and in others."""

from monetrun.runtime.output_uses import OutputUses

BOTH, ONE = ((4, 1), (1,)), ((4, 1), None)


def test_the_first_steps_of_a_process_that_has_a_plan_are_as_the_recorded_one():
    uses = OutputUses()
    assert uses.are_as_recorded(0, BOTH, recording=False, early=True)
    assert uses.are_as_recorded(0, ONE, recording=False, early=True)  # a second call of it in that step
    assert uses.are_as_recorded(0, BOTH, recording=False, early=False)
    assert not uses.are_as_recorded(0, (None, (1,)), recording=False, early=False)
    assert not uses.are_as_recorded(0, (None, (1,)), recording=False, early=False)  # nor is it the next time
    assert not uses.are_as_recorded(1, BOTH, recording=False, early=False)


def test_where_a_step_was_recorded_here_that_one_counts():
    uses = OutputUses()
    assert uses.are_as_recorded(0, BOTH, recording=True, early=False)
    assert not uses.are_as_recorded(0, ONE, recording=False, early=True)
    assert uses.are_as_recorded(0, BOTH, recording=False, early=True)


def test_graphs_that_the_record_does_not_have_are_estimates_anyway():
    assert OutputUses().are_as_recorded(-1, ONE, recording=False, early=False)
