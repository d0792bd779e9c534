"""Lifetimes of inputs and outputs: what a plan may read again."""

import pytest
import torch
from torch import nn

from monetrun.capture.lifetimes import Lifetimes
from support.captured import captured


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("first_inputs_only", [False, True])
def test_an_input_whose_saving_no_event_would_tell_is_not_read_again(first_inputs_only, shared):
    joint = captured(nn.Tanh(), torch.randn(8, 8, requires_grad=True))
    lifetimes = Lifetimes(first_inputs_only)
    outputs, stretch = [], 0
    both = torch.randn(8, 8)
    for number in range(2):  # both calls' inputs are the script's, which drops them after the forward
        given = [both if shared else torch.randn(8, 8)]
        if number:
            del both
        lifetimes.forward_begins(joint, stretch, given)
        outputs.append(given[0].tanh())
        lifetimes.forward_ended([outputs[-1]])
        lifetimes.look(stretch, of_script=False)
        del given
        lifetimes.look(stretch + 1, of_script=True)
        stretch += 2
    for output in reversed(outputs):
        lifetimes.backward_begins(joint, stretch, [torch.ones_like(output)])
        lifetimes.look(stretch, of_script=False)
        stretch += 1
    (x,) = (joint.storage[p] for p in joint.primals)
    assert lifetimes.not_to_read_again(joint) == ({x} if first_inputs_only and not shared else set())
