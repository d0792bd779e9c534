"""An optimizer for each parameter: the objects of the process are looked through once, not once for each."""

import torch
from torch import nn

from monetrun.runtime import candidates


def test_owners_are_looked_for_once_for_each_parameter(monkeypatch):
    looks, owners = [], candidates.owners
    monkeypatch.setattr(candidates, "owners", lambda ids: looks.append(1) or owners(ids))
    found, model = candidates.Owners(), nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    first, *others = model.parameters()
    assert {id(model), id(model[0])} <= {id(module) for module in found.further([first])}
    assert all(found.further([p]) == [] for p in others)
    assert looks == [1]
    alone = nn.Parameter(torch.ones(1))
    assert found.further([first, alone]) != []  # the model's too, of which a part may be new
    assert looks == [1, 1]


def test_a_new_parameter_at_the_place_of_an_old_one_is_a_new_one(monkeypatch):
    found = candidates.Owners()
    for _ in range(8):
        model = nn.Linear(4, 4)
        assert id(model) in {id(module) for module in found.further(list(model.parameters()))}
        del model
