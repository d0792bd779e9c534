"""What ``monetrun.apply`` refuses at the call, and in which words."""

import pytest
import torch
from torch import nn

import monetrun
from monetrun.core.errors import BudgetSyntaxError, UsageError
from monetrun.integrations.applied_budget import AppliedBudget
from monetrun.runtime import session as process

_REFUSED = [
    ("model", "0.6x", TypeError, "the first argument is 'model', a str, expected the model"),
    (torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), "0.8x", TypeError, "the first argument is of the type SGD,"),
    ("0.6x", nn.Linear(2, 2), TypeError, "the model comes first, and then the budget or the plan: monetrun.apply"),
    (nn.Linear(2, 2), None, TypeError, "the second argument is None, a NoneType, expected a budget (auto |"),
    (nn.Linear(2, 2), True, TypeError, "the second argument is True, a bool, expected a budget"),
    (nn.Linear(2, 2), "12 furlongs", BudgetSyntaxError, "the budget '12 furlongs' has no unit that is known"),
    (nn.Linear(2, 2), 0.6, BudgetSyntaxError, "the budget '0.6' has no unit: 0.6x"),
    (nn.Linear(2, 2), "p0.json", UsageError, "parse_plan(pathlib.Path('p0.json').read_text())"),
]
_OPTIONS = [
    ({"solver_second": 3}, TypeError, "monetrun.apply has no option 'solver_second': did you mean solver_seconds?"),
    ({"zzz": 3}, TypeError, "has no option 'zzz': there are algorithm, solver_seconds,"),
    ({"solver_seconds": "x"}, UsageError, "solver_seconds='x' cannot be used\n  give a positive number of seconds"),
    ({"solver_seconds": -1}, UsageError, "solver_seconds=-1 cannot be used"),
    ({"solver_seconds": True}, UsageError, "solver_seconds=True cannot be used"),
    ({"algorithm": "ipl"}, UsageError, "there is no algorithm 'ipl'\n  choose one of hierarchical,"),
    ({"algorithm": 3}, UsageError, "algorithm=3 cannot be used\n  give a string"),
    ({"implementations": "exakt"}, UsageError, "implementations=exakt: exakt is not one of "),
    ({"implementations": None}, UsageError, "implementations=None cannot be used"),
    ({"mip_solver": "gurobi"}, UsageError, "mip_solver='gurobi' cannot be used\n  give one of scip, highs"),
    ({"cost_model": "roofline:abacus"}, UsageError, "'roofline:abacus' is none of the cost models"),
    ({"strict": "yes"}, UsageError, "strict='yes' cannot be used\n  give True or False"),
]


@pytest.mark.parametrize(("model", "budget", "kind", "said"), _REFUSED)
def test_a_wrong_model_or_budget_is_refused_at_the_call(model, budget, kind, said):
    with pytest.raises(kind) as refused:
        monetrun.apply(model, budget)
    assert said in str(refused.value)
    assert "--" not in str(refused.value)
    assert process._session is None


def test_a_budget_may_be_given_by_its_name_but_not_twice():
    with pytest.raises(TypeError, match=r"given twice, '0\.6x', a str and budget='0\.8x'"):
        monetrun.apply(nn.Linear(2, 2), "0.6x", budget="0.8x")
    try:
        monetrun.apply(nn.Linear(2, 2), budget="0.6x")
        assert process._session.settings.budget == "0.6x"
    finally:
        monetrun.close()


@pytest.mark.parametrize(("options", "kind", "said"), _OPTIONS)
def test_a_wrong_option_is_refused_at_the_call(options, kind, said):
    model = nn.Linear(2, 2)
    for begin in (lambda: monetrun.apply(model, "0.8x", **options), lambda: AppliedBudget("0.8x", **options)):
        with pytest.raises(kind) as refused:
            begin()
        assert said in str(refused.value)
        assert "--" not in str(refused.value)
    assert process._session is None
    assert model._compiled_call_impl is None


def test_a_refused_call_leaves_what_was_applied_before():
    model = nn.Linear(2, 2)
    monetrun.apply(model, "0.8x")
    try:
        applied = process._session
        with pytest.raises(UsageError):
            monetrun.apply(model, "0.8x", algorithm="ipl")
        assert process._session is applied
    finally:
        monetrun.close()


def test_the_options_are_fields_of_the_settings():
    from monetrun.runtime.apply_arguments import OPTIONS
    from monetrun.runtime.settings import Settings

    assert OPTIONS.keys() <= Settings.__dataclass_fields__.keys()
    for name, check in OPTIONS.items():
        check(name, Settings.__dataclass_fields__[name].default)
