"""Which gradients a call of ``zero_grad`` in the recorded step frees."""

import torch

from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.step import OUTSIDE
from monetrun.planning.intervals import Stretch
from monetrun.runtime.zeroed import ZeroedGradients

STRETCHES = [Stretch(kind, 0, "", 0, 0, 0) for kind in (OUTSIDE, FORWARD, OUTSIDE, BACKWARD, OUTSIDE)]


def test_gradients_that_are_parts_of_one_storage_count_once():
    """As FSDP2's: those of all parameters of a module are views of what its reduce-scatter has given."""
    parameters = [torch.zeros(2) for _ in range(3)]
    zeroed = ZeroedGradients()
    zeroed.zeroing(parameters, True, 2)
    storages = [{7: 100}, {7: 100}, {8: 30}]
    assert zeroed.freed(STRETCHES, {id(p): s for p, s in zip(parameters, storages, strict=True)}) == {2: 130}


def test_a_storage_is_freed_by_the_call_that_zeroes_the_first_of_its_parts():
    one, other = torch.zeros(2), torch.zeros(2)
    zeroed = ZeroedGradients()
    zeroed.zeroing([one], True, 2)
    zeroed.zeroing([other], False, 2)
    assert zeroed.freed(STRETCHES, {id(one): {7: 100}, id(other): {7: 100, 9: 20}}) == {2: 100, 3: 20}
