"""Where training steps of several optimizers end, also where the script leaves some of their steps out."""

import pytest

from monetrun.runtime.optimizer_turns import OptimizerTurns

D, G, OTHER = 1, 2, 3


@pytest.mark.parametrize(
    ("count", "steps", "ends"),
    [
        (1, [D, D, D], "111"),
        (2, [D, G, D, G], "0101"),
        (2, [D, G, G, D, G], "01101"),  # the discriminator's second step was left out
        (2, [D, G, D, D, G], "01011"),  # the generator's: it is over with the next one's first
        (3, [D, D, G, D, D, G, D, D, G], "001001001"),  # two of a critic
        (3, [D, D, G, D, G, D, D, G], "00101001"),
        (2, [D, G, D, G, G, D, G], "0101101"),  # one more of the generator
        (2, [D, G, OTHER, G, OTHER, G], "010101"),  # another training
        (2, [D, D, G, D, G, D, G], "0110101"),  # the generator's first step was left out
        (3, [D, D, D, D, G, D, D, G], "00101001"),  # of a critic's two steps there is one
    ],
)
def test_the_end_of_a_training_step_is_found(count, steps, ends):
    turns = OptimizerTurns()
    turns.are(count)
    found = [turns.ended(optimizer) for optimizer in steps]
    assert "".join(str(int(end)) for end in found) == ends
    assert turns.within == (not found[-1])


def test_a_step_that_has_begun_goes_on_where_the_count_stays():
    turns = OptimizerTurns()
    turns.are(2)
    turns.ended(D)
    turns.are(2)
    assert turns.ended(G)
    turns.ended(D)
    turns.are(1)
    assert turns.ended(G)
