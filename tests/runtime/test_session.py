"""What a session does to models, and which it leaves unchanged."""

import copy
import io
import os
import pickle
import re
import subprocess
import sys
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monetrun
from monetrun.capture import allocator_history, cpu_allocator
from monetrun.core.errors import BudgetSyntaxError, CaptureFailed, InfeasibleBudget, PlanMismatch, PlanningFault
from monetrun.core.graph import BACKWARD
from monetrun.planning import planner
from monetrun.runtime import moved_memory
from monetrun.runtime import session as process
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings
from monetrun.solve import greedy
from support import zoo
from support.sessions import opened_session


@pytest.fixture
def session():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    opened = Session(Settings(mode=RUN, budget="4GiB", solver_seconds=1.0))
    opened.watch_process()
    yield opened
    opened.close()


def small():
    return zoo.SmallResNet(channels=8, blocks=1)


def step(model, optimizer, size=32):
    optimizer.zero_grad()
    x, y = zoo.images(4, size)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_planned_model_keeps_its_type_keys_copies_and_pickles(session):
    model = small()
    keys, kind = list(model.state_dict()), type(model)
    optimizer = zoo.sgd(model)
    for _ in range(3):
        step(model, optimizer)
    assert session.engine.plan is not None
    assert list(model.state_dict()) == keys
    assert type(model) is kind
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._compiled_call_impl is None
        assert all(
            torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True)
        )
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False)._compiled_call_impl is None


def test_evaluation_and_no_grad_run_unplanned(session):
    model = small()
    optimizer = zoo.sgd(model)
    step(model, optimizer)
    captured = sum(p.backend.captured for p in session.planned)
    x, _ = zoo.images(4, 32)
    with torch.no_grad():
        model(x)
    model.eval()
    assert model(x).grad_fn.name() == "AddmmBackward0"
    assert sum(p.backend.captured for p in session.planned) == captured


def test_a_teacher_without_an_optimizer_is_never_planned(session):
    teacher, model = small(), small()
    optimizer = zoo.sgd(model)
    step(model, optimizer)
    assert teacher._compiled_call_impl is None
    assert [p.module() for p in session.planned] == [model]


def test_the_outermost_training_call_is_the_model(session):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, x):
            return self.inner(x) * 2

    model = Wrapper()
    optimizer = zoo.sgd(model)
    step(model, optimizer)
    assert [p.name for p in session.planned] == ["Wrapper"]
    step(model.inner, optimizer)  # as of a module that has a generator and a discriminator
    assert [p.name for p in session.planned] == ["Wrapper", "SmallResNet"]


def test_an_exception_in_forward_shows_the_users_frames(session):
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            raise KeyError("not in this batch")

    model = Wrong()
    zoo.sgd(model)
    with pytest.raises(KeyError, match="not in this batch") as raised:
        model(torch.zeros(1, 3))
    assert "in forward" in "".join(traceback.format_exception(raised.value))


def test_a_model_that_is_compiled_already_is_left_alone_with_one_warning(session, capsys):
    model = small()
    model.compile(backend="eager")
    optimizer = zoo.sgd(model)
    step(model, optimizer)
    assert session.planned == []
    assert capsys.readouterr().err.count("compiled already") == 1


def test_a_model_of_which_nothing_is_captured_is_warned_of(session, capsys):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        @torch._dynamo.disable
        def forward(self, x):
            return self.layer(x)

    model = Hidden()
    optimizer = zoo.sgd(model)
    model(torch.zeros(2, 3)).sum().backward()
    optimizer.step()
    assert "nothing of its forward was captured" in capsys.readouterr().err


def test_apply_refuses_unplannable_models_and_malformed_budgets():
    with pytest.raises(CaptureFailed, match="scripted"):
        monetrun.apply(torch.jit.script(nn.Linear(2, 2)), "1GiB")
    with pytest.raises(BudgetSyntaxError, match="12 furlongs"):
        monetrun.apply(nn.Linear(2, 2), "12 furlongs")


def test_apply_plans_a_model_whose_optimizer_exists():
    assert cpu_allocator.install()
    torch.manual_seed(0)
    model = small()
    optimizer = zoo.sgd(model)
    try:
        assert monetrun.apply(model, "0.9x", solver_seconds=1.0, implementations="exact") is model
        losses = [step(model, optimizer, 64) for _ in range(3)]
        plan = process._session.engine.plan
        assert plan.planned_peak_bytes <= plan.budget_bytes
    finally:
        process._session.close()
    torch.manual_seed(0)
    model = small()
    optimizer = zoo.sgd(model)
    assert losses == [step(model, optimizer, 64) for _ in range(3)]


def test_apply_plans_a_model_whose_optimizer_is_in_another_one_and_leaves_former_trainings_alone():
    class Around(torch.optim.Optimizer):  # as accelerate's: the one inside makes the steps
        def __init__(self, inside):
            self.inside = inside

        param_groups = property(lambda self: self.inside.param_groups)

    former, model = small(), small()
    optimizers = [zoo.sgd(former), Around(zoo.sgd(model))]
    monetrun.apply(model, "0.9x", solver_seconds=1.0)
    try:
        for _ in range(2):
            step(model, optimizers[1].inside, 64)
    finally:
        measured = monetrun.close()
    assert measured["steps"] == 1
    assert former._compiled_call_impl is None


def trained(steps):
    """A model that has made so many steps under a budget."""
    model = small()
    optimizer = zoo.sgd(model)
    monetrun.apply(model, "0.9x", solver_seconds=1.0)
    for _ in range(steps):
        step(model, optimizer, 64)
    return model


def test_close_gives_what_was_measured_and_restores_torch():
    model = trained(3)
    measured = monetrun.close()
    assert measured["steps"] == 2
    assert 0 < measured["measured_peak_bytes"] <= measured["budget_bytes"] < measured["plain_peak_bytes"]
    assert model._compiled_call_impl is None
    assert torch.optim.Optimizer.zero_grad.__module__ == "torch.optim.optimizer"
    assert monetrun.close() == {}


def test_another_budget_ends_the_former_planning():
    model = small()
    optimizer = zoo.sgd(model)
    try:
        monetrun.apply(model, "0.9x", solver_seconds=1.0)
        first = process._session
        step(model, optimizer, 64)
        monetrun.apply(model, "0.9x", solver_seconds=1.0)
        assert process._session is first
        monetrun.apply(model, "0.8x", solver_seconds=1.0)
        for _ in range(2):
            step(model, optimizer, 64)
    finally:
        measured = monetrun.close()
    assert measured["budget_bytes"] == pytest.approx(0.8 * measured["plain_peak_bytes"], abs=1)


def test_under_the_launcher_its_budget_holds(session, monkeypatch):
    monkeypatch.setattr(process, "_launched", True)
    monkeypatch.setattr(process, "_session", session)
    model = small()
    assert monetrun.apply(model, "0.8x") is model
    assert model._compiled_call_impl is None
    assert monetrun.close() == {}
    assert process._session is session


@pytest.mark.slow
def test_a_second_session_starts_without_the_firsts_measurements():
    assert cpu_allocator.install()
    for _ in range(2):
        model = small()
        optimizer = zoo.sgd(model)
        try:
            monetrun.apply(model, "0.8x", solver_seconds=1.0)
            step(model, optimizer)
            engine = process._session.engine
            begun = engine.findings()
            for _ in range(4):
                step(model, optimizer)
            ended = engine.findings()
        finally:
            process._session.close()
        assert (begun["measured_overhead"], begun["measured_peak_bytes"], begun["steps"]) == (None, 0, 0)
        assert begun["intervals"] == []
        assert ended["measured_overhead"] >= 0
        assert ended["measured_peak_bytes"] > 0
        assert ended["steps"] == 4
    assert process._session is None


@pytest.mark.nightly
def test_more_lengths_than_dynamo_recompiles_by_default_keep_the_budget_and_the_losses():
    steps = 12  # Dynamo's limit is 8
    plain, state = zoo.train("lengths", steps)
    opened = Session(Settings(mode=RUN, budget="0.8x", solver_seconds=1.0, implementations="exact"))
    opened.watch_process()
    try:
        losses, planned = zoo.train("lengths", steps)
        engine, warned = opened.engine, opened.reporter.warned
        # a graph for each, none fell back to the plain forward; the second step of two is recorded with the first
        assert len(engine.running.schedules) == steps - 1
    finally:
        opened.close()
    assert losses == plain
    assert all(torch.equal(planned[k], state[k]) for k in state)
    assert engine.peak_bytes <= engine.plan.budget_bytes
    assert warned == set()


def test_an_installed_monetrun_does_nothing_in_processes_it_did_not_start():
    code = (
        "import sys, torch; "
        "ours = sorted(m for m in sys.modules if m.split('.')[0] == 'monetrun'); "
        "assert ours == ['monetrun', 'monetrun.runtime', 'monetrun.runtime.autoload'], ours; "
        "assert torch.optim.Optimizer.__init__.__module__ == 'torch.optim.optimizer'"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MONETRUN_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_hook_that_cannot_start_does_not_break_import_torch():
    environment = {**os.environ, "MONETRUN_MODE": "run", "MONETRUN_BUDGET_BYTES": "many"}
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(1).item())"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1.0\n"
    assert "could not start" in done.stderr


def test_a_plans_forward_has_no_backward_operators(session):
    model = small()
    optimizer = zoo.sgd(model)
    for _ in range(2):
        step(model, optimizer)
    (graph,) = session.engine.running.record.graphs
    forward = [s.operator for s in session.engine.plan.graphs[0].schedule.forward]
    assert not [i for i in forward if graph.operators[i].phase == BACKWARD]


def test_a_warm_up_of_cublas_is_no_backward_of_the_scripts(session):
    allocator_history.warm_up_libraries(torch.device("cpu"))
    assert session._backwards == 0
    weight = torch.ones(2, requires_grad=True)
    torch.autograd.grad(weight.sum(), weight)
    assert session._backwards == 1


@pytest.mark.parametrize("between", [pytest.param("nothing", marks=pytest.mark.nightly), "close"])
def test_a_second_apply_before_the_first_step_holds(between):
    model = small()
    monetrun.apply(model, "0.9x", solver_seconds=1.0)
    if between == "close":
        monetrun.close()
        assert all(m._compiled_call_impl is None for m in model.modules())
    try:
        monetrun.apply(model, "0.8x", solver_seconds=1.0)
        optimizer = zoo.sgd(model)
        for _ in range(3):
            step(model, optimizer, 64)
    finally:
        measured = monetrun.close()
    assert measured["budget_bytes"] == pytest.approx(0.8 * measured["plain_peak_bytes"], abs=1)
    assert measured["measured_peak_bytes"] <= measured["budget_bytes"]


def test_an_impossible_second_budget_is_refused():
    model = small()
    optimizer = zoo.sgd(model)
    monetrun.apply(model, "0.9x", solver_seconds=1.0)
    monetrun.apply(model, "0.05x", solver_seconds=1.0)
    try:
        step(model, optimizer, 64)
        with pytest.raises(InfeasibleBudget, match='fits: "'):  # as it is given here, without an option's dashes
            step(model, optimizer, 64)
    finally:
        monetrun.close()


def test_another_budget_plans_the_other_models_anew_too():
    models = [small(), small()]
    optimizers = [zoo.sgd(model) for model in models]
    try:
        for model in models:
            monetrun.apply(model, "0.9x", solver_seconds=1.0)
        monetrun.apply(models[0], "0.8x", solver_seconds=1.0)
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer, 64)
        assert [call.module() for call in process._session.planned] == models
        assert set(process._session.optimizers) == set(optimizers)
    finally:
        measured = monetrun.close()
    assert 0 < measured["measured_peak_bytes"] <= measured["budget_bytes"]


def test_close_says_why_nothing_was_planned(capsys):
    model = small()
    optimizer = zoo.sgd(model)

    def said_after(train):
        monetrun.apply(model, "0.9x")
        train()
        assert monetrun.close() == {}
        return capsys.readouterr().err

    begins = "monetrun: warning: nothing was planned: "
    assert said_after(lambda: None).startswith(f"{begins}no training forward of SmallResNet has run since apply")
    x, _ = zoo.images(4, 32)
    assert f"{begins}no step of SGD has ended" in said_after(lambda: model(x))
    assert f"{begins}training ended before the plan is made" in said_after(lambda: step(model, optimizer))
    monetrun.apply(model, "0.01x", solver_seconds=1)
    with pytest.raises(monetrun.InfeasibleBudget):
        [step(model, optimizer) for _ in range(3)]
    assert monetrun.close() == {}
    assert f"{begins}no schedule fits the budget" in capsys.readouterr().err
    assert monetrun.close() == {}
    assert capsys.readouterr().err == ""  # nothing was applied


def test_with_strict_an_apply_that_fails_leaves_nothing_behind():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.DataParallel(small())

    outer = Outer()
    optimizer = zoo.sgd(outer)
    with pytest.raises(CaptureFailed, match="DataParallel replicates it"):
        monetrun.apply(outer, "0.9x", strict=True)
    assert process._session is None
    assert outer._compiled_call_impl is None
    assert not optimizer.state


def test_what_is_compiled_within_a_planned_model_is_planned_with_it():
    model = nn.Sequential(small(), nn.ReLU())
    model[0].compile(backend="eager")
    with opened_session(budget="2x", solver_seconds=1.0, strict=True) as session:
        optimizer = zoo.sgd(model)
        for _ in range(3):
            step(model, optimizer)
        assert session.engine.meters.steps.steps == 2
        assert session.reporter.warned == set()


@pytest.mark.parametrize("planned_once", [False, True])
def test_a_fault_of_monetruns_own_has_models_run_as_they_are_and_training_goes_on(planned_once, monkeypatch, capsys):
    """In planning the recorded step, or later where more is held than was planned for."""

    def trained(steps, disturb=lambda: None):
        torch.manual_seed(0)
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses, more = [step(model, optimizer) for _ in range(steps)], []
        disturb()
        more = [torch.ones(1 << 18) for _ in range(20)] * planned_once
        return losses + [step(model, optimizer) for _ in range(3)], [p.clone() for p in model.parameters()], more

    def fail(*args, **kwargs):
        raise KeyError("odd")

    def disturb():
        for module, name in ((planner, "plan_step"), (moved_memory.planner, "plan_step"), (greedy, "most_frugal")):
            monkeypatch.setattr(module, name, fail)

    plain = trained(3)
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    one = Session(Settings(mode=RUN, budget="0.98x", solver_seconds=1.0, implementations="exact"))
    one.watch_process()
    try:
        if not planned_once:
            monkeypatch.setattr(planner, "plan_step", fail)
        losses, parameters, _ = trained(3, disturb if planned_once else lambda: None)
        assert one.engine is None
    finally:
        one.close()
    err = capsys.readouterr().err
    assert err.count("models run without a plan from now on") == err.count("(KeyError: 'odd'), please report it") == 1
    assert losses == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain[1], strict=True))


def test_under_strict_a_fault_of_monetruns_own_ends_the_run(monkeypatch):
    def fail(*args, **kwargs):
        raise KeyError("odd")

    monkeypatch.setattr(planner, "plan_step", fail)
    one = Session(Settings(mode=RUN, budget="0.8x", solver_seconds=1.0, strict=True))
    one.watch_process()
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        step(model, optimizer)
        with pytest.raises(PlanningFault, match="odd"):
            step(model, optimizer)
    finally:
        one.close()


@pytest.mark.nightly
def test_another_models_plan_is_refused_at_the_first_forward():
    trained(2)
    plan = process._session.engine.plan
    monetrun.close()
    other = nn.Sequential(small(), nn.Linear(10, 10))
    zoo.sgd(other)
    monetrun.apply(other, plan)
    try:
        with pytest.raises(PlanMismatch, match="another model"):
            other(zoo.images(4, 64)[0])
    finally:
        monetrun.close()


@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_plan_of_the_recorded_step_is_shown(quiet, capsys):
    model = small()
    optimizer = zoo.sgd(model)
    monetrun.apply(model, "0.8x", solver_seconds=1.0, quiet=quiet)
    try:
        step(model, optimizer, 64)
        assert "plain peak" not in capsys.readouterr().err
        step(model, optimizer, 64)
        said = capsys.readouterr().err
    finally:
        monetrun.close()
    if quiet:
        assert said == ""
        return
    title, peaks, parts, does = said[said.index("monetrun: the plan") :].splitlines()[:4]
    assert title == "monetrun: the plan"
    assert re.search(r"plain peak .* \| budget .* \| planned .* \| overhead ", peaks)
    assert parts.startswith("  parameters ")
    assert "forward operators run again" in does
