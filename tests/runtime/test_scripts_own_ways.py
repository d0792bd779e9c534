"""What a script does with its model besides calling it, and what its forward reads, are as in Python."""

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import open_sizes
from monetrun.runtime import candidates, probe
from monetrun.runtime.trigger import Trigger
from support.models_in_parts import WIDTH, Block, minimized
from support.sessions import opened_session


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.blocks(x))


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(256, WIDTH, generator=generator) for _ in range(count)]


def warnings_of(script, budget="0.95x"):
    """Those of a session in which ``script`` gives what it gives as it is."""
    torch.manual_seed(0)
    plain = script()
    torch.manual_seed(0)
    with opened_session(budget=budget, solver_seconds=0.5, implementations="exact") as opened:
        assert script() == plain
        assert opened.engine is not None
        return opened.reporter.warned


@pytest.mark.nightly
def test_hooks_that_are_added_later_run_and_change_what_they_change():
    def script():
        model, seen = Net(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        losses = []
        for step, x in enumerate(batches(8)):
            if step in (3, 5):
                note = model.blocks[1].norm.register_forward_hook(lambda m, i, o: seen.append(float(o.detach().sum())))
                scale = model.head.register_forward_hook(lambda m, i, o: o * 0.5)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step in (3, 5):
                note.remove()
                scale.remove()
        return losses, seen

    warnings_of(script)


class Annealed(Net):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return super().forward(x) * min(1.0, self.steps / 100)


@pytest.mark.nightly
def test_a_counter_of_steps_is_no_new_model_in_each_step():
    def script():
        torch._dynamo.utils.counters.clear()
        model = Annealed()
        losses = minimized(model, 0.05, lambda x: model(x).square().mean(), batches(12))
        return losses, model.steps

    assert not warnings_of(script)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5


class Counting(Net):
    """It counts, and nothing that it computes depends on the number."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, 0

    def forward(self, x):
        self.calls += 1
        self.seen += x.shape[0] * 2
        return super().forward(x)


def test_a_counter_of_which_nothing_depends_is_captured_once(monkeypatch):
    fixed, original = [], open_sizes.with_numbers
    monkeypatch.setattr(open_sizes, "with_numbers", lambda *given: fixed.append(1) or original(*given))

    def script():
        del fixed[:]
        model = Counting()
        losses = minimized(model, 0.05, lambda x: model(x).square().mean(), batches(12))
        return losses, model.calls, model.seen

    assert not warnings_of(script)
    assert len(fixed) <= 2


class Positions(Net):
    """It makes a table in its first call, an evaluation, say, and only adds it."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(-1, 1, WIDTH).expand(x.shape[0], WIDTH) * 0.1
        return super().forward((x + self.table).tanh() + self.table)


@pytest.mark.parametrize("budget", [pytest.param("0.95x", marks=pytest.mark.nightly), "0.6x"])
def test_a_table_made_in_inference_mode_is_read_again(budget):
    def script():
        model = Positions()
        with torch.inference_mode():
            model(batches(1)[0])
        return minimized(model, 0.05, lambda x: model(x).square().mean(), batches(6))

    assert not warnings_of(script, budget)


class Noisy(Net):
    def forward(self, x):
        noise = torch.from_numpy(np.random.normal(0, 0.1, size=x.shape)).to(x)
        return F.dropout(super().forward(x + noise), 0.1, self.training)


@pytest.mark.nightly
def test_numpys_random_numbers_are_numpys():
    def script():
        np.random.seed(0)
        model = Noisy()
        losses = minimized(model, 0.05, lambda x: model(x).square().mean(), batches())
        return losses, float(np.random.rand()), float(torch.rand([]))

    warnings_of(script)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.rnn(x[:, None])[0])

    def __getstate__(self):
        return self.__dict__.copy()


@pytest.mark.parametrize("after", [False, True], ids=["before training", "after it"])
def test_modules_that_pickle_all_of_their_attributes_are_pickled(after):
    with opened_session(budget="0.95x", solver_seconds=0.5, implementations="exact"):
        model = Recurrent()
        if after:
            minimized(model, 0.05, lambda x: model(x).square().mean(), batches())
        else:
            torch.optim.SGD(model.parameters(), 0.1)
        for module in (model, model.rnn, model.head):
            file = io.BytesIO()
            torch.save(module, file)
            file.seek(0)
            assert torch.load(file, weights_only=False)._compiled_call_impl is None


def test_a_model_is_traced_while_it_trains_and_after_it():
    with opened_session(budget="0.95x", solver_seconds=0.5, implementations="exact"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        targets = {n.target for n in torch.fx.symbolic_trace(model).graph.nodes if n.op == "call_module"}
        for x in batches():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert {n.target for n in torch.fx.symbolic_trace(model).graph.nodes if n.op == "call_module"} == targets
        made = torch.fx.experimental.proxy_tensor.make_fx(model)(batches()[0])
        assert any(node.op == "call_function" for node in made.graph.nodes)


class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(3, 1)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        total = self.energy(positions).square().sum()
        gradient = torch.autograd.grad([total], [positions], create_graph=True)[0]
        assert gradient is not None
        return -gradient


def test_torchscript_knows_autograds_functions():
    positions = torch.randn(5, 3, requires_grad=True)
    model = Force()
    with opened_session(budget="0.95x", solver_seconds=0.5):
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(positions), model(positions))


@pytest.mark.parametrize("closed", [False, True], ids=["while it runs", "after it is closed"])
def test_a_model_that_was_trained_under_a_plan_can_be_scripted(closed, tmp_path):
    """TorchScript could not tell the type of the planned call, which stands in the model: the launch ended there."""
    torch.manual_seed(0)
    with opened_session(budget="0.95x", solver_seconds=0.5, quiet=True) as opened:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for x in batches(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert opened.engine.plan is not None
        if closed:
            opened.close()
        torch.jit.save(torch.jit.script(model.eval()), tmp_path / "model.pt")
        with torch.no_grad():
            assert torch.equal(torch.jit.load(tmp_path / "model.pt")(x), model(x))


@pytest.mark.nightly
def test_a_function_that_the_script_compiles_has_dynamos_limit():
    """Each word is a variant; after eight of them torch runs the function as it is."""

    def script():
        compiled, values = [], []
        torch._dynamo.reset()

        @torch.compile(backend=lambda module, inputs: compiled.append(1) or module)
        def loss_of(y, word):
            return (y * len(word)).square().mean()

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step, x in enumerate(batches(12)):
            optimizer.zero_grad()
            loss = loss_of(model(x), "w" * (step + 1))
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return len(compiled), values

    warnings_of(script)
    assert script()[0] == 8


def cloned(module, change):
    """As meta-learning libraries clone a module: with all attributes, then with other parameters."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {k: change(p) for k, p in module._parameters.items()}
    clone._buffers = dict(module._buffers)
    clone._modules = {k: cloned(child, change) for k, child in module._modules.items()}
    return clone


@pytest.mark.parametrize("trained", [False, True], ids=["before training", "after it"])
def test_a_module_cloned_with_all_of_its_attributes_runs_with_its_own_parameters(trained):
    with opened_session(budget="0.95x", solver_seconds=0.5, implementations="exact"):
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(4096, 8)  # its activations are most of the peak, whatever earlier tests still hold
        for _ in range(3 * trained):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        learner = cloned(model, lambda p: p * 2)
        with torch.no_grad():
            hidden = torch.tanh(F.linear(x, 2 * model[0].weight, 2 * model[0].bias))
            expected = F.linear(hidden, 2 * model[2].weight, 2 * model[2].bias)
            assert torch.equal(learner(x), expected)
        own = [*learner[0]._parameters.values(), *learner[2]._parameters.values()]
        assert all(g.abs().sum() > 0 for g in torch.autograd.grad(learner(x).square().sum(), own))


def test_a_tensor_of_its_own_in_each_batch_is_not_looked_for_each_time(monkeypatch):
    """An attack, or a latent code: each look goes through all objects of the process."""
    looks, owners = [], candidates.owners
    monkeypatch.setattr(candidates, "owners", lambda trained: looks.append(1) or owners(trained))
    with opened_session(budget="0.95x", solver_seconds=0.5):
        for _ in range(20):
            delta = nn.Parameter(torch.zeros(16, 8))
            torch.optim.Adam([delta])
        assert len(looks) <= 4
        model = nn.Linear(8, 8)
        torch.optim.SGD(model.parameters(), 0.1)
        assert isinstance(model._compiled_call_impl, Trigger)


def test_where_no_optimizer_steps_models_run_as_they_are_after_a_while(monkeypatch, capsys):
    monkeypatch.setattr(probe, "MOST_ROUNDS", 5)
    with opened_session(budget="0.95x", solver_seconds=0.5) as opened:
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(8):
            model(torch.randn(16, 8)).sum().backward()
        assert opened.engine is None
    assert "runs without a plan" in (said := capsys.readouterr().err) or "run without a plan" in said


@pytest.mark.parametrize("interrupted", [KeyboardInterrupt, pytest.param(ValueError, marks=pytest.mark.nightly)])
def test_an_interrupted_backward_leaves_no_limit(interrupted):
    """In a notebook, where other cells follow."""
    with opened_session(budget="2MiB", solver_seconds=0.5, implementations="exact") as opened:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def interrupt(gradient):
            raise interrupted

        for step in range(4):
            out = model(torch.randn(64, 64))
            if step == 3:
                loss = out.square()
                loss.register_hook(interrupt)
                with pytest.raises(interrupted):
                    loss.mean().backward()
                torch.empty(4 << 20)  # more than the budget
            else:
                out.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert opened.engine.running is not None


class Autoencoder(nn.Module):
    """Its loss calls methods of its own, not its forward."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 64))

    def encode(self, x):
        return self.encoder(x).chunk(2, -1)

    def decode(self, z):
        return self.decoder(z)

    def loss(self, x):
        mean, scale = self.encode(x)
        return F.mse_loss(self.decode(mean + scale * torch.randn_like(mean)), x) + mean.square().mean()


class WithLstm(nn.Module):
    """LSTMs, of which torch captures nothing on a CPU, between layers that are planned."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Linear(64, 64), nn.LSTM(64, 32, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))

    def loss(self, x):
        return self(x).square().mean()

    def forward(self, x):
        return self.head(self.lstm(torch.tanh(self.embed(x)).view(8, -1, 64))[0])


@pytest.mark.parametrize("kind", [pytest.param(Autoencoder, marks=pytest.mark.nightly), WithLstm])
def test_models_whose_methods_or_recurrent_layers_are_called_train_as_in_eager(kind):
    def steps():
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model.loss(torch.randn(256, 64))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.tolist() for p in model.parameters()]

    plain = steps()
    with opened_session(budget="0.95x", solver_seconds=0.5, implementations="exact") as opened:
        assert steps() == plain
        assert opened.engine.running is not None
        assert opened.engine.plan.graphs
