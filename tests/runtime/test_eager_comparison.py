"""A trial compares its models with eager at its end: results, gradients and buffers, bit for bit."""

import random
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from monetrun.core import codec
from monetrun.core.step import StepRecord
from monetrun.runtime import eager_comparison, probe
from monetrun.runtime.eager_comparison import EagerComparison
from monetrun.runtime.session import Session
from monetrun.runtime.settings import PROBE, Settings
from monetrun.runtime.trigger import Nesting
from support.step_records import chain_record


class Ended(Exception):
    """In place of the process's end."""

    def __init__(self, record):
        super().__init__()
        self.record = record


@pytest.fixture
def trial(monkeypatch, tmp_path):
    """Runs a script in this process as a trial does, and gives its record."""

    def leave(record, path):
        raise Ended(record)

    monkeypatch.setattr(probe, "leave", leave)
    session = Session(Settings(mode=PROBE, budget="1.0x", record_file=str(tmp_path / "record.json")))

    def run(script):
        session.watch_process()
        with pytest.raises(Ended) as ended:
            script()
        return ended.value.record

    yield run
    session.close()
    torch._dynamo.reset()


def training(make_model, inputs=lambda: (torch.randn(8, 16),)):
    def script():
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(*inputs()).square().sum()
            loss.backward()
            optimizer.step()
            del loss

    return script


def small(*more):
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), *more, nn.Linear(32, 16))


class Traced(nn.Module):
    """Has an operator of the script's own, which computes otherwise where it is traced."""

    def __init__(self):
        super().__init__()
        self.library = torch.library.Library("compared", "FRAGMENT")
        if not hasattr(torch.ops.compared, "scaled"):
            self.library.define("scaled(Tensor x) -> Tensor")
            scale = 1.0

            def scaled(x):
                return x * (scale if type(x) is torch.Tensor else 1.001)

            self.library.impl("scaled", scaled, "CompositeImplicitAutograd")

    def forward(self, x):
        return torch.ops.compared.scaled(x)


def test_a_model_that_computes_as_eager_leaves_nothing_to_tell(trial):
    assert trial(training(small)).unlike_eager == ()


def test_what_was_traced_otherwise_than_eager_computes_is_told(trial):
    (told,) = trial(training(lambda: small(Traced()))).unlike_eager
    assert told.startswith("Sequential: 1 of 1 results, ")
    assert "gradients differ from eager's, by up to " in told


SHORT = chain_record(0, widths=(40,))


class Call:
    """Stands for a planned call: what is captured of ``module`` computes as ``captured``."""

    name, captured, parts = "Net", 1, ()

    def __init__(self, module, captured=None):
        self.module, self.nesting, self._captured = lambda: module, Nesting(), captured or module

    def __call__(self, *args, **kwargs):
        return self._captured(*args, **kwargs)


def differences(call, *args):
    comparison = EagerComparison()
    comparison.of_first_call(call)(*args)
    return comparison.differences(SHORT, torch.device("cpu"))


def test_a_step_that_takes_long_or_more_than_is_free_is_not_made_again(monkeypatch):
    module = nn.Linear(4, 4)
    comparison = EagerComparison()
    comparison.of_first_call(Call(module, lambda x: 2 * module(x)))(torch.randn(2, 4))
    assert comparison.differences(chain_record(8), torch.device("cpu")) == ()  # 159 s
    assert comparison.differences(SHORT, torch.device("cpu")) != ()
    free = SimpleNamespace(free_bytes=1000)
    monkeypatch.setattr(eager_comparison, "cpu_memory", lambda: free)
    assert comparison.differences(SHORT, torch.device("cpu")) == ()


def test_the_script_finds_buffers_and_random_numbers_as_they_were():
    module = small()
    call, x = Call(module), torch.randn(8, 16)
    comparison = EagerComparison()
    comparison.of_first_call(call)(x)
    x.zero_()  # the values of the call are compared, whatever has become of them
    buffers, states = [b.clone() for b in module.buffers()], (torch.get_rng_state(), random.getstate())
    assert comparison.differences(SHORT, torch.device("cpu")) == ()
    assert all(map(torch.equal, buffers, module.buffers()))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert all(p.grad is None for p in module.parameters())


def test_gradients_of_inputs_and_buffers_are_compared_too():
    module = nn.BatchNorm1d(4)

    def captured(x):
        module.num_batches_tracked.add_(1)  # twice
        return module(x) + 0 * x.mean() + (x - x.detach())

    x = torch.randn(8, 4, requires_grad=True)
    assert differences(Call(module, captured), x) == (
        "Net: 1 of 3 gradients, 1 of 3 buffers differ from eager's, by up to 1 of the largest value",
    )


def test_a_model_that_is_another_in_each_call_is_not_told_of():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return self.calls * super().forward(x)

    assert differences(Call(Counting(4, 4)), torch.randn(2, 4)) == ()


def test_what_is_captured_may_be_another_in_each_call_too():
    module, calls = nn.Linear(4, 4), iter(range(1, 9))
    assert differences(Call(module, lambda x: next(calls) * module(x)), torch.randn(2, 4)) == ()


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ([1.0, 2.0], [1.0, float("nan")], float("inf")),
        ([float("-inf"), 2.0], [float("-inf"), 1.0], 0.5),
        ([float("nan"), 2.0], [float("nan"), 2.0], 0.0),
        ([float("inf"), 2.0], [float("-inf"), 2.0], float("inf")),
        ([2j], [1j], 0.5),
        ([], [], 0.0),
    ],
)
def test_values_that_are_no_numbers_hide_no_difference(one, other, found):
    assert eager_comparison._difference(torch.tensor(one), torch.tensor(other)) == found


@pytest.mark.parametrize(
    "given",
    [torch.randn(1, 4).expand(2, 4), object(), torch.eye(4).to_sparse(), torch.randn(2, dtype=torch.cfloat).conj()],
)
def test_what_cannot_be_given_again_is_not_compared(given):
    class Ignoring(nn.Linear):
        def forward(self, x, other):
            return super().forward(x)

    module = Ignoring(4, 4)
    call = Call(module, lambda x, other: 2 * module(x, other))
    assert differences(call, torch.randn(2, 4), None) != ()
    assert differences(call, torch.randn(2, 4), given) == ()


def test_a_comparison_that_ends_the_process_costs_no_record(monkeypatch, tmp_path):
    path = str(tmp_path / "record.json")
    with probe.comparing(SHORT, path):
        kept = codec.loads(StepRecord, (tmp_path / "record.json.uncompared").read_text())
    assert kept == SHORT
    assert list(tmp_path.iterdir()) == []
    left = []
    monkeypatch.setattr(probe, "leave", lambda *given: left.append(given))
    monkeypatch.setattr(probe, "_COMPARING_SECONDS", 0.05)
    with probe.comparing(SHORT, path):
        time.sleep(0.5)
    assert left == [(SHORT, path)]


def test_a_forward_that_cannot_run_again_ends_nothing():
    class Once(nn.Linear):
        called = False

        def forward(self, x):
            assert not self.called
            self.called = True
            return super().forward(x)

    assert differences(Call(Once(4, 4)), torch.randn(2, 4)) == ()
