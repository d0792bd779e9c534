"""Hundreds of small random models: the recorded step and the first planned one are eager's bits, within the budget."""

import pytest

from monetrun.capture import cpu_allocator
from monetrun.solve import timing
from support import random_models

pytestmark = pytest.mark.usefixtures("all_garbage_is_searched_afterwards")

# others are run by hand: python -m support.random_models --short FIRST END
SEEDS = range(20000, 20500)


@pytest.fixture(autouse=True)
def _searches_are_short():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    with timing.override(patience=2.0, greedy_patience=0.3, frugal_seconds=0.05):
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_a_small_random_models_first_steps_are_eagers(seed):
    try:
        print(seed, random_models.check(seed, small=True, is_short=True))
    except Exception:
        how = random_models.short(random_models.script(seed, small=True))
        print(random_models.source(seed, small=True), how, sep="\n")
        raise
