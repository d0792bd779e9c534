"""What a script does with a model can make a plan impossible: the model then runs as it is, after one warning."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.core.errors import CaptureFailed
from monetrun.runtime import children, session
from monetrun.runtime.session import Session
from monetrun.runtime.settings import AS_IS_MARK, PROBE, PROBED, RUN, Settings
from support import launcher


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Opens a session with these settings; ``os._exit`` raises ``Ended``."""
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()

    def leave(code):
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(torch.distributed, "init_process_group", torch.distributed.init_process_group)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "init_process_group", torch.distributed.init_process_group)
    parallel = nn.parallel.DistributedDataParallel
    monkeypatch.setattr(parallel, "__init__", parallel.__init__)
    monkeypatch.setattr(parallel, "register_comm_hook", parallel.register_comm_hook)
    sessions = []

    def open_one(mode=RUN, **settings):
        record_file = str(tmp_path / "record.json")
        sessions.append(
            Session(Settings(mode=mode, budget="4GiB", solver_seconds=1.0, record_file=record_file, **settings))
            if mode == PROBE
            else Session(Settings(mode=mode, budget="4GiB", solver_seconds=1.0, **settings))
        )
        sessions[-1].watch_process()
        return sessions[-1]

    yield open_one
    for one in sessions:
        one.close()
    assert session._session is None


def critic():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def penalized(every=1, steps=3, make=critic, separate=False):
    """Losses of training with a gradient penalty in each ``every``-th step, of a call of its own, and the model."""
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for step in range(1, steps + 1):
        x = torch.randn(16, 8, requires_grad=True)
        loss = net(x).mean()
        if step % every == 0:
            of = net(x).mean() if separate else loss
            (gradient,) = torch.autograd.grad(of, x, create_graph=True)
            loss = loss + (gradient.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net


def test_a_trial_of_double_backward_ends_with_the_reason_and_the_run_trains_as_it_is(opened, tmp_path, capsys):
    plain, net = penalized()
    one = opened(PROBE)
    with pytest.raises(Ended, match=str(PROBED)):
        penalized()
    one.close()
    found = json.loads((tmp_path / "record.json.unseen").read_text())
    assert found["as_is"]
    assert found["reason"].startswith("Sequential runs without a plan: the script takes gradients of gradients")

    one = opened(RUN, as_is=found["reason"])
    losses, ours = penalized()
    assert losses == plain
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), net.parameters(), strict=True))
    assert capsys.readouterr().err == f"monetrun: warning: {found['reason']}\n"
    one.close()
    opened(RUN, as_is=found["reason"], strict=True)
    with pytest.raises(CaptureFailed, match="gradients of gradients"):
        penalized()


@pytest.mark.parametrize("owner", [torch.cuda, torch.accelerator], ids=["cuda", "accelerator"])
def test_where_the_script_captures_cuda_graphs_models_run_as_they_are(opened, tmp_path, capsys, monkeypatch, owner):
    begun, name = [], "CUDAGraph" if owner is torch.cuda else "Graph"
    if not hasattr(owner, name):
        pytest.skip("torch 2.11 has no such graphs")
    graph = getattr(owner, name)
    monkeypatch.setattr(graph, "capture_begin", lambda graph, pool=None: begun.append(pool))

    def trained(capture):
        torch.manual_seed(0)
        net = critic()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        losses = []
        for step in range(4):
            loss = net(torch.randn(16, 8)).square().mean()
            if step == capture:
                graph.capture_begin(None, pool=step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = trained(2)
    one = opened(PROBE)
    with pytest.raises(Ended, match=str(PROBED)):
        trained(0)
    one.close()
    found = json.loads((tmp_path / "record.json.unseen").read_text())
    assert (found["as_is"], begun) == (True, [2])
    assert found["reason"].startswith("Sequential runs without a plan: the script captures CUDA graphs")
    opened(RUN, report_folder=str(tmp_path))
    assert trained(2) == plain
    assert begun == [2, 2]
    assert "runs without a plan from now on: the script captures CUDA graphs" in capsys.readouterr().err


def test_a_step_before_any_backward_ends_no_trial_but_a_second_one_does(opened, tmp_path):
    opened(PROBE)
    net = critic()
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # as torch.distributed.checkpoint does, to allocate the optimizer's state
    assert not (tmp_path / "record.json").exists()
    with pytest.raises(Ended, match=str(PROBED)):
        optimizer.step()
    assert json.loads((tmp_path / "record.json").read_text())["graphs"] == []


def test_a_worker_without_a_trial_marks_double_backward_before_its_first_step_and_ends(opened, tmp_path):
    plain, _ = penalized()
    one = opened(RUN, report_folder=str(tmp_path))
    with pytest.raises(Ended, match=str(PROBED)):
        penalized()
    one.close()
    assert "gradients of gradients" in (tmp_path / AS_IS_MARK).read_text()
    opened(RUN, report_folder=str(tmp_path))  # the launch has started anew
    assert penalized()[0] == plain


class Critic(nn.Module):
    """With buffers that each forward changes, and random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)

    def forward(self, x):
        return self.last(nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.2))


@pytest.mark.parametrize("make", [pytest.param(critic, marks=pytest.mark.slow), Critic])
def test_double_backward_after_steps_under_a_plan_goes_on_as_it_is_after_one_warning(make, opened, tmp_path, capsys):
    def trained(separate):
        torch.manual_seed(0)
        losses, net = penalized(every=4, steps=9, make=make, separate=separate)
        return [*map(torch.tensor, losses), *(t.clone() for t in net.state_dict().values()), torch.rand(3)]

    plain, plain_in_one = trained(separate=True), trained(separate=False)
    one = opened(RUN, report_folder=str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(trained(separate=True), plain, strict=True))
    assert not (tmp_path / AS_IS_MARK).exists()
    err = capsys.readouterr().err
    assert err.count("warning") == err.count("runs without a plan from now on") == 1
    one.report()
    assert json.loads((tmp_path / "rank0.json").read_text())["steps"] == 1  # the first two are recorded
    one.close()
    one = opened()  # in the step of the warning the call's two gradients are added later than in eager
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(trained(separate=False), plain_in_one, strict=True))
    one.close()
    opened(RUN, report_folder=str(tmp_path), strict=True)
    with pytest.raises(CaptureFailed, match="gradients of gradients"):
        trained(separate=True)


def test_a_graph_may_be_retained_first_after_steps_under_a_plan(opened):
    def trained():
        net = critic()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(4):
            loss = net(torch.randn(16, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward(retain_graph=step == 3)
            if step == 3:
                loss.backward()
            optimizer.step()
        return list(net.parameters())

    plain = trained()
    one = opened()
    assert all(torch.equal(a, b) for a, b in zip(trained(), plain, strict=True))
    assert one.engine.plan is not None


def test_gradients_of_gradients_of_what_is_not_planned_leave_the_plan_alone(opened):
    one = opened()
    net = critic()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        net(gradient.detach()).mean().backward()
        gradient.sum().backward()
        optimizer.step()
    assert one.engine.plan is not None


def saved_elsewhere(steps=3, checkpointed=False):
    """Losses of training with what autograd saves kept in copies, and how many there were."""
    net = critic()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses, copies = [], []

    def pack(saved):
        copies.append(saved.clone())
        return len(copies) - 1

    for step in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
        else:
            with torch.autograd.graph.saved_tensors_hooks(pack, copies.__getitem__):
                out = net(x)
        optimizer.zero_grad()
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, len(copies)


def test_a_model_whose_saved_tensors_the_scripts_hooks_take_runs_as_it_is(opened, tmp_path, capsys):
    """Their plan would have on the device what the script has elsewhere: it was refused at the plain run's peak."""
    plain = saved_elsewhere()
    one = opened(PROBE)
    with pytest.raises(Ended, match=str(PROBED)):
        saved_elsewhere()
    one.close()
    found = json.loads((tmp_path / "record.json.unseen").read_text())
    assert found["as_is"]
    assert "save_on_cpu" in found["reason"]
    one = opened(RUN)
    assert saved_elsewhere() == plain
    assert one.engine is None
    assert capsys.readouterr().err == f"monetrun: warning: {found['reason']}\n"
    one.close()
    opened(RUN, strict=True)
    with pytest.raises(CaptureFailed, match="what autograd saves"):
        saved_elsewhere()


def test_a_model_that_is_checkpointed_whole_is_planned(opened):
    plain, _ = saved_elsewhere(checkpointed=True)
    one = opened(RUN)
    assert saved_elsewhere(checkpointed=True)[0] == plain
    assert one.engine is not None


def test_sparse_gradients_run_as_they_are_after_one_warning_and_strict_refuses(opened, capsys):
    def trained():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        losses = []
        for _ in range(3):
            loss = net(torch.randint(50, (16, 4))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = trained()
    one = opened()
    assert trained() == plain
    printed = capsys.readouterr().err
    assert printed.count("warning") == 1
    assert "Sequential runs without a plan" in printed
    assert "a sparse tensor" in printed
    assert "its budget is not enforced" in printed
    assert "sparse tensor" in printed
    one.close()
    opened(strict=True)
    with pytest.raises(CaptureFailed, match="sparse tensor"):
        trained()


def test_a_model_called_in_the_scripts_own_compilation_is_warned_of(opened, capsys):
    def trained():
        net = critic()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        @torch.compile(backend="aot_eager")
        def compiled_loss(x):
            return net(x).square().mean()

        for _ in range(2):
            compiled_loss(torch.randn(16, 8)).backward()
            optimizer.step()

    one = opened()
    trained()
    printed = capsys.readouterr().err
    assert printed.count("warning") == 1
    assert "Sequential runs without a plan: it is called within what the script compiles itself" in printed
    assert "compiled_loss" in printed
    one.close()
    opened(strict=True)
    with pytest.raises(CaptureFailed, match="compiled_loss"):
        trained()


def test_a_script_that_compiles_only_its_loss_is_planned_without_a_warning(opened, capsys):
    one = opened()
    net = critic()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loss = torch.compile(lambda y: y.square().mean(), backend="aot_eager")
    for _ in range(3):
        loss(net(torch.randn(16, 8))).backward()
        optimizer.step()
    assert one.engine.plan is not None
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_is_only_called_within_transforms_is_warned_of_once(opened, capsys, strict):
    opened(strict=strict)
    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    def step():
        values = {name: p.detach() for name, p in model.named_parameters()}
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, torch.ones(5, 8))
        for name, p in model.named_parameters():
            p.grad = gradients[name].mean(0)
        optimizer.step()

    with pytest.raises(CaptureFailed, match="no training forward") if strict else contextlib.nullcontext():
        step()
        step()
    assert capsys.readouterr().err.count("Sequential has made no training forward before SGD's step") == (not strict)


def test_a_step_that_the_script_compiles_is_seen(opened, recwarn):
    session = opened()
    model = critic()
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(5, 8)).square().sum().backward()
        step()
    assert session.engine.meters.steps.steps >= 2
    assert not [w for w in recwarn if "monetrun" in str(w.message)]  # Dynamo does not trace what observes the step


def test_a_trial_of_a_script_without_an_optimizer_ends_with_its_second_backward(opened, tmp_path):
    opened(PROBE)
    net = critic()
    net(torch.randn(4, 8)).mean().backward()
    with pytest.raises(Ended):
        net(torch.randn(4, 8)).mean().backward()
    assert "without an optimizer" in json.loads((tmp_path / "record.json.unseen").read_text())["reason"]


def test_training_in_a_child_ends_a_trial_and_is_warned_of_once_in_a_run(opened, tmp_path, capsys, monkeypatch):
    from torch.optim import optimizer as hooks

    net = critic()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    monkeypatch.setattr(hooks, "_global_optimizer_pre_hooks", hooks._global_optimizer_pre_hooks.copy())
    children.watch(Settings(mode=RUN, report_folder=str(tmp_path)))
    children.watch(Settings(mode=RUN, report_folder=str(tmp_path)))
    optimizer.step()
    optimizer.step()
    assert capsys.readouterr().err.count("trains in processes that it starts itself") == 1
    children.watch(Settings(mode=PROBE, record_file=str(tmp_path / "record.json")))
    with pytest.raises(Ended):
        optimizer.step()
    assert json.loads((tmp_path / "record.json.unseen").read_text())["reason"] == children.REASON


SPAWN = """
import torch

def work(rank):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with open(f"steps{rank}", "a") as file:
            file.write("step ")

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=1)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--no-probe"]])
def test_launches_of_scripts_that_train_in_children_or_differentiate_twice(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "spawn.py").write_text(SPAWN)
    launch = (launcher.MONETRUN, "--solver-seconds=2", *options)
    done = launcher.run(*launch, "spawn.py")
    assert (tmp_path / "steps0").read_text() == "step step "
    assert ("the trial run cannot see" in done.stderr) == (not options)
    assert done.stderr.count("models run without a plan: it trains in processes") == 1

    twice = tmp_path / "twice.py"
    twice.write_text(
        "import torch\nfrom test_unplannable_use import penalized\n"
        "if __name__ == '__main__': print(penalized()[0], flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
    done = launcher.run(*launch, "--nproc-per-node=2", "twice.py")
    plain = subprocess.run([sys.executable, "twice.py"], capture_output=True, text=True, check=True)
    assert done.stdout == plain.stdout * 2
    assert done.stderr.count("gradients of gradients") == 1


def test_an_optimizer_that_is_gone_at_the_end_has_been_there(tmp_path):
    """A script may keep it in a function; what it trained was no module's."""
    session = Session(Settings(mode=RUN, report_folder=str(tmp_path)))
    session.watch_process()
    try:
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        weight.sum().backward()
        optimizer.step()
        del optimizer
        session.report()
    finally:
        session.close()
    assert "train no parameters of a module" in json.loads((tmp_path / "rank0.json").read_text())["unplanned"]
