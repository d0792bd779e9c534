"""A model that warns in its forward is captured whole, and its warnings are shown, where they were given."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture.warned import let_models_warn
from support.sessions import opened_session


class Warning_(UserWarning):
    pass


class Warns(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number == 3:
                warnings.warn(f"{number} is deprecated", Warning_, stacklevel=1)
                warnings.warn("so is this", stacklevel=1)
            x = F.gelu(layer(x))
        return x


def trained():
    torch.manual_seed(0)
    model = Warns()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(256, 32)).square().mean().backward()
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


def test_a_model_that_warns_is_captured_whole_and_its_warnings_are_shown():
    with pytest.warns(Warning_):
        expected = trained()
    with (
        opened_session(budget="0.9x", solver_seconds=1.0, implementations="exact") as opened,
        warnings.catch_warnings(record=True) as shown,
    ):
        warnings.simplefilter("always")
        assert trained() == expected
        assert opened.reporter.warned == set()
        assert len(opened.engine.running.record.graphs) == 1
        assert opened.engine.breaks == {}
    own = [w for w in shown if w.filename == __file__]
    assert {(w.category, str(w.message)) for w in own} == {(Warning_, "3 is deprecated"), (UserWarning, "so is this")}


def test_a_substitute_of_the_scripts_own_ends_nothing():
    let_models_warn()
    let_models_warn.cache_clear()
    let_models_warn()  # one is registered already
