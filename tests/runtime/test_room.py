"""What counts as held before a step: also the last step's outputs, where a step frees them and they are not there."""

import pytest

from monetrun.runtime.room import _missing


@pytest.mark.parametrize(
    ("planned", "gone", "there", "missing"),
    [
        (400, [], [400], 0),  # as in the recorded step
        (400, [400], [], 400),  # an epoch's first step
        (400, [250], [], 400),  # after a smaller batch
        (400, [400, 90], [], 400),  # 90 bytes are never held
        (400, [90], [400], 0),
        (400, [300], [100], 300),
        (8, [400], [], 0),  # a loss is held, and no output
        (0, [400], [], 0),
        (0, [], [70], 0),  # more than planned is held: that counts by itself
        (400, [], [], 0),  # another model's step came between
    ],
)
def test_outputs_that_are_not_there_are_told_from_those_that_are_never_held(planned, gone, there, missing):
    assert max(0, _missing(planned, gone, there)) == missing
