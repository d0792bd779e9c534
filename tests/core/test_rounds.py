"""Which events of a step are one round."""

import pytest

from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.rounds import rounds_of
from monetrun.core.step import OUTSIDE

F0, F1, B0, B1, OUT = (FORWARD, 0), (FORWARD, 1), (BACKWARD, 0), (BACKWARD, 1), (OUTSIDE, -1)


@pytest.mark.parametrize(
    ("calls", "rounds"),
    [
        ([F0, OUT, B0, OUT], [(0, 3)]),
        ([OUT, F0, B0, OUT, F0, B0], [(0, 3), (4, 6)]),
        ([F0, F1, B1, B0, F0, F1, B1, B0], [(0, 4), (4, 8)]),
        # nothing waits for a forward of which no backward comes
        ([F0, F1, B0, F0, F1, B0], [(0, 3), (3, 6)]),
        ([F0, B0, F1], [(0, 2), (2, 3)]),
    ],
)
def test_a_round_ends_where_nothing_is_saved_for_a_backward(calls, rounds):
    assert list(rounds_of(calls)) == rounds
