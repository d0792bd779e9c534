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


def test_an_input_that_is_given_on_as_it_is_counts_as_its_owners_output():
    """The second graph gives a view of what the first one gave, which the script drops before the backward."""
    first = captured(nn.Tanh(), torch.randn(8, 8, requires_grad=True))

    class AndItsInput(nn.Module):
        def forward(self, x):
            return x.relu(), x.flatten()

    second = captured(AndItsInput(), torch.randn(8, 8, requires_grad=True))
    lifetimes = Lifetimes()
    x = torch.randn(8, 8)
    lifetimes.forward_begins(first, 0, [x])
    y = x.tanh()
    lifetimes.forward_ended([y])
    lifetimes.look(0, of_script=False)
    lifetimes.look(1, of_script=True)
    lifetimes.forward_begins(second, 2, [y])
    results = [y.relu(), y.flatten()]
    lifetimes.forward_ended(results)
    lifetimes.look(2, of_script=False)
    z = results[0]
    del y, results
    lifetimes.look(3, of_script=True)
    (read_as,) = [inputs for joint, _, inputs in lifetimes.dropped(3) if joint is first]
    assert read_as == [(second, second.storage[second.primals[0]])]
    for joint, stretch in ((second, 4), (first, 6)):
        lifetimes.backward_begins(joint, stretch, [torch.ones_like(z)] * len(joint.tangents))
        lifetimes.look(stretch, of_script=False)
        lifetimes.look(stretch + 1, of_script=True)
        lifetimes.released(stretch)
    assert lifetimes.absent_bytes(8)[5:] == [first.graph.tensors[first.storage[first.outputs[0]]].nbytes, 0, 0]


def test_two_calls_whose_tangent_is_the_others_input_are_told_once():
    joint = captured(nn.Tanh(), torch.randn(8, 8, requires_grad=True))
    lifetimes = Lifetimes()
    z = torch.randn(8, 8)
    outputs = []
    for stretch in (0, 2):
        lifetimes.forward_begins(joint, stretch, [z])
        outputs.append(z.tanh())
        lifetimes.forward_ended([outputs[-1]])
        lifetimes.look(stretch, of_script=False)
        lifetimes.look(stretch + 1, of_script=True)
    for stretch in (4, 6):
        lifetimes.backward_begins(joint, stretch, [z])
        if stretch == 6:
            del z
        lifetimes.look(stretch, of_script=False)
        lifetimes.look(stretch + 1, of_script=True)
    (x,) = (joint.storage[p] for p in joint.primals)
    (tangent,) = (joint.storage[t] for t in joint.tangents)
    first = next(call for call in lifetimes._calls if call.number == 0)
    assert sorted(t for _, t in lifetimes._read_as(first, x)) == sorted([x, tangent])
