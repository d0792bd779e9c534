"""An optimizer for each parameter: the objects of the process are looked through once, not once for each."""

import gc

import torch
from torch import nn

from monetrun.runtime import candidates


def names(modules, model):
    of = {id(module): name for name, module in model.named_modules()}
    return {of[id(module)] for module in modules if id(module) in of}


def test_owners_are_looked_for_once_for_all_parameters_of_a_model(monkeypatch):
    looks, owners = [], candidates.owners
    monkeypatch.setattr(candidates, "owners", lambda ids: looks.append(1) or owners(ids))
    found, model = candidates.Owners(), nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    for k, layer in enumerate(model):
        for p in layer.parameters():
            assert names(found.of([p]), model) == {"", str(k)}
    assert len(looks) == 2
    assert names(found.of(list(model.parameters())), model) == {"", *map(str, range(8))}
    other = nn.Linear(4, 4)
    assert id(other) in {id(module) for module in found.of([model[0].weight, other.weight])}
    assert len(looks) == 4


def test_two_models_in_one_module_are_both_found():
    whole = nn.ModuleDict({"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 4)})
    found = candidates.Owners()
    assert names(found.of(list(whole["generator"].parameters())), whole) == {"", "generator"}
    assert names(found.of(list(whole["critic"].parameters())), whole) == {"", "critic"}


def test_a_new_parameter_at_the_place_of_an_old_one_is_a_new_one():
    found = candidates.Owners()
    for _ in range(8):
        model = nn.Linear(4, 4)
        assert id(model) in {id(module) for module in found.of(list(model.parameters()))}
        del model


def test_a_parameter_may_be_swapped_with_another_tensor_where_its_owner_is_known():
    """As ``Module.to`` does with FSDP2's parameters: torch refuses it for those that have weak references."""
    found, model = candidates.Owners(), nn.Linear(4, 4)
    assert model in found.of(list(model.parameters()))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert model.weight.dtype == torch.float64
    assert model in found.of(list(model.parameters()))


def test_tensors_that_are_no_parameters_are_not_looked_for_and_unowned_ones_once_each(monkeypatch):
    looks, owners = [], candidates.owners
    monkeypatch.setattr(candidates, "owners", lambda ids: looks.append(1) or owners(ids))
    found = candidates.Owners()
    assert found.of([torch.zeros(3, requires_grad=True)]) == []
    assert looks == []
    assert found.of([nn.Parameter(torch.zeros(3))]) == []
    assert looks == [1]


def test_parameters_of_no_module_are_looked_for_once_for_an_optimizer(monkeypatch):
    looks, owners = [], candidates.owners
    monkeypatch.setattr(candidates, "owners", lambda ids: looks.append(1) or owners(ids))
    found, optimizer = candidates.Owners(), torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1)
    assert found.trained_by(optimizer) == found.trained_by(optimizer) == []
    assert looks == [1]
    model = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model.parameters())})
    assert model in found.trained_by(optimizer)


def test_owners_are_found_where_the_script_has_frozen_its_objects():
    model = nn.Linear(4, 4)
    candidates._unfreeze.cache_clear()
    gc.freeze()
    try:
        assert model in candidates.Owners().of(list(model.parameters()))
    finally:
        gc.unfreeze()
