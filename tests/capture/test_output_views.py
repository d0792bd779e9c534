"""Outputs that are views of other outputs: their gradients are added in eager's order, whatever the script does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.core.errors import CaptureFailed
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings


class Similarity(nn.Module):
    """Gives a table, the table the other way round, and something that was made of it later."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = self.second(F.gelu(self.first(x)))
        return y, y.transpose(1, 2), y.sum(-1)


class OneTable(Similarity):
    """The first output is what was computed, and no view itself."""

    def forward(self, x):
        y = torch.tanh(self.second(F.gelu(self.first(x))))
        return y, y[:, 1:3], y.square().mean()


class ViewMadeLast(Similarity):
    """A view itself is used, before the other view is made."""

    def forward(self, x):
        y = self.second(F.gelu(self.first(x)))
        other = torch.sin(x)
        other.add_(y)
        return y, y.transpose(1, 2), other.sum(-1)


class ViewsAlone(Similarity):
    """Nothing else is made of the outputs."""

    def forward(self, x):
        y = self.second(F.gelu(self.first(x)))
        return y[:, 1:3], y.transpose(1, 2), y


class ReducedLater(OneTable):
    """What is made of it gives several tensors."""

    def forward(self, x):
        y = torch.tanh(self.second(F.gelu(self.first(x))))
        return y, y.transpose(1, 2), torch.var_mean(y, -1)[0]


class ChangedInTheModel(Similarity):
    """The model changes a view, and by that all of them."""

    def forward(self, x):
        y = self.second(F.gelu(self.first(x)))
        view = y.transpose(1, 2)
        view.mul_(1.5)
        return y, view, y.sum(-1)


class ChangedBefore(Similarity):
    """The model changes its output in place, and makes more of it then."""

    def forward(self, x):
        y = F.relu(self.second(F.gelu(self.first(x))), inplace=True)
        return y, y.transpose(1, 2), y.square().sum(-1)


def loss_of(y, view, other):
    return (y * y.sin()).mean() + (view**3).mean() + other.sin().mean()


def all_of_them(outputs, seen, parameters):
    loss_of(*outputs).backward()


def two_of_them(outputs, seen, parameters):
    _, view, other = outputs
    ((view**3).mean() + other.sin().mean()).backward()


def changes_the_view(outputs, seen, parameters):
    y, view, other = outputs
    view.mul_(1.5)
    loss_of(y, view, other).backward()


def changes_the_other(outputs, seen, parameters):
    y, view, other = outputs
    y.mul_(1.5)
    loss_of(y, view, other).backward()


def twice(outputs, seen, parameters):
    loss = loss_of(*outputs)
    loss.backward(retain_graph=True)
    loss.backward()


def of_the_view(outputs, seen, parameters):
    loss = loss_of(*outputs)
    seen.extend(torch.autograd.grad(loss, outputs[1], retain_graph=True))
    loss.backward()


def watches(outputs, seen, parameters):
    outputs[0].register_hook(lambda gradient: seen.append(gradient.clone()))
    outputs[1].register_hook(lambda gradient: gradient * 2)
    loss_of(*outputs).backward()


def retains(outputs, seen, parameters):
    outputs[0].retain_grad()
    outputs[1].retain_grad()
    loss_of(*outputs).backward()
    seen += [outputs[0].grad, outputs[1].grad]


def of_the_other(outputs, seen, parameters):
    loss = loss_of(*outputs)
    seen.extend(torch.autograd.grad(loss, outputs[0], retain_graph=True))
    loss.backward()


def of_weights_and_the_other(outputs, seen, parameters):
    loss = loss_of(*outputs)
    seen.extend(torch.autograd.grad(loss, [outputs[0], parameters[0]], retain_graph=True))
    loss.backward()


def differentiates_gradients(outputs, seen, parameters):
    loss = loss_of(*outputs)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    (loss + 1e-3 * sum(g.square().sum() for g in gradients)).backward()


def train(make, script, planned, sizes=(8, 8, 8, 6, 8, 5)):
    torch.manual_seed(0)
    model, seen = make(), []
    session = Session(Settings(mode=RUN, budget="2x", solver_seconds=0.5, implementations="exact"))
    if planned:
        session.watch_process()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in sizes:
            optimizer.zero_grad()
            x = torch.randn(size, 5, 16)
            script(model(x), seen, list(model.parameters()))
            optimizer.step()
        # where a gradient of an output is watched, and where gradients are differentiated, the model runs as it is
        assert not planned or script is not all_of_them or session.engine.plan is not None
    finally:
        session.close()
        torch._dynamo.reset()
    return [*(p.detach() for p in model.parameters()), *seen]


CHANGES = (changes_the_view, changes_the_other)  # eager refuses it where the output is saved, as OneTable's is
EXACT = (
    all_of_them,
    two_of_them,
    changes_the_view,
    changes_the_other,
    twice,
    of_the_view,
    watches,
    retains,
)


@pytest.mark.parametrize(
    ("make", "script"),
    [
        *((Similarity, script) for script in EXACT),
        *(pytest.param(OneTable, script, marks=pytest.mark.nightly) for script in EXACT if script not in CHANGES),
        *((make, all_of_them) for make in (ViewMadeLast, ViewsAlone, ReducedLater, ChangedInTheModel)),
    ],
)
def test_gradients_of_views_are_added_in_eagers_order(make, script):
    plain = train(make, script, planned=False)
    planned = train(make, script, planned=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


def watches_and_changes(outputs, seen, parameters):
    y, view, other = outputs
    y.register_hook(lambda gradient: seen.append(gradient.clone()))
    view.mul_(1.5)
    loss_of(y, view, other).backward()


def differentiates_gradients_of_a_changed_view(outputs, seen, parameters):
    outputs[1].mul_(1.5)
    differentiates_gradients(outputs, seen, parameters)


def retains_and_asks(outputs, seen, parameters):
    outputs[0].retain_grad()
    of_weights_and_the_other(outputs, seen, parameters)


def asks_twice(outputs, seen, parameters):
    loss, wanted = loss_of(*outputs), [outputs[0], *parameters]
    seen.extend(torch.autograd.grad(loss, wanted, create_graph=True))
    seen.extend(torch.autograd.grad(loss, wanted, retain_graph=True))
    loss.backward()


WHOLE = (of_the_other, of_weights_and_the_other, retains_and_asks, asks_twice, differentiates_gradients)
WHOLE_CHANGED = (watches_and_changes, differentiates_gradients_of_a_changed_view)


@pytest.mark.parametrize(
    ("make", "script"),
    [
        *((Similarity, script) for script in (*WHOLE, *WHOLE_CHANGED)),
        *(pytest.param(OneTable, script, marks=pytest.mark.nightly) for script in WHOLE),
        *(pytest.param(ViewsAlone, script, marks=pytest.mark.nightly) for script in (*WHOLE, *WHOLE_CHANGED)),
        (ChangedBefore, of_the_other),
    ],
)
def test_gradients_for_such_outputs_are_whole(make, script):
    plain = train(make, script, planned=False, sizes=(8, 8, 6))
    planned = train(make, script, planned=True, sizes=(8, 8, 6))
    for a, b in zip(plain, planned, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_two_backwards_at_once_through_one_call_do_not_mix():
    def nested(outputs, seen, parameters):
        loss, others = loss_of(*outputs), [outputs[1].cos().mean()]

        def begin(gradients):
            if others:  # it holds nothing afterwards: that would be a cycle through autograd's nodes
                seen.extend(torch.autograd.grad(others.pop(), parameters[0], retain_graph=True))

        outputs[0].grad_fn.next_functions[0][0].register_prehook(begin)
        loss.backward(retain_graph=True)

    plain = train(Similarity, nested, planned=False, sizes=(8, 8, 8))
    planned = train(Similarity, nested, planned=True, sizes=(8, 8, 8))
    for a, b in zip(plain, planned, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_gradients_for_an_output_that_the_model_changes_afterwards_are_refused():
    with pytest.raises(CaptureFailed, match="gradients for an output that the model changes in place"):
        train(ChangedInTheModel, of_the_other, planned=True)
