"""Models that cannot be captured whole train as torch trains them, with a plan of their parts and within the budget."""

import random
import traceback

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from monetrun.capture import execute
from monetrun.core.errors import CaptureFailed, ScheduleError
from monetrun.planning.coverage import planned_share
from monetrun.runtime import breaks
from monetrun.runtime.sharding import around_forward
from monetrun.runtime.traceback_file import of_the_script
from support.models_in_parts import WIDTH, Block, Net, session, trained


class TorchsOwnInALoop(Net):
    def __init__(self):
        super().__init__(*(nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True) for _ in range(2)))

    def through(self, x):
        x = x.view(-1, 8, WIDTH)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x.flatten(0, 1)


class SequentialWithoutMomentum(Net):
    """Between blocks, a BatchNorm that reads a number of its own buffer."""

    def __init__(self):
        super().__init__(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH, momentum=None), Block()))

    def through(self, x):
        return self.blocks[0](x)


class CheckpointedNorm(Net):
    """Eager updates the BatchNorm's statistics in the forward, and again where the region runs again."""

    def __init__(self):
        super().__init__(Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), Block())

    def through(self, x):
        x = checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)
        return self.blocks[2](x)


class CheckpointedNormAfterABreak(CheckpointedNorm):
    """The graph after the break cannot be captured, and not run as Dynamo's graph either: its region takes buffers."""

    def through(self, x):
        torch._dynamo.graph_break()
        return super().through(x)


class Recurrent(Net):
    def __init__(self):
        super().__init__(Block(), nn.GRU(WIDTH, WIDTH), Block())

    def through(self, x):
        x, _ = self.blocks[1](self.blocks[0](x).view(8, -1, WIDTH))
        return self.blocks[2](x.flatten(0, 1))


class Hooked(Net):
    def __init__(self):
        super().__init__(Block(), Block(), Block())
        self.seen = []
        self.blocks[0].register_forward_hook(lambda module, given, x: x * 1.5)
        self.blocks[1].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        self.blocks[2].register_full_backward_hook(lambda module, into, out: self.seen.append(out[0].sum().item()))

    def through(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class ReadByHooks(Net):
    """Hooks that read numbers of what they see: the model's, and one block's."""

    def __init__(self):
        super().__init__(Block(), Block())
        self.seen = []
        self.register_forward_hook(lambda module, given, x: self.seen.append(x.sum().item()))

    def through(self, x):
        return self.blocks[1](self.blocks[0](x))


class ReadInParts(ReadByHooks):
    def __init__(self):
        super().__init__()
        self.blocks[1].register_forward_hook(lambda module, given, x: self.seen.append(float(x.detach().mean())))
        self.blocks[1].register_full_backward_hook(lambda module, into, out: self.seen.append(float(out[0].mean())))


class SharedAndSkipped(Net):
    """LayerDrop over a shared block, one that gives a dict, one without gradients and one in a checkpoint."""

    class Dict(Block):
        def forward(self, x):
            return {"x": super().forward(x), "n": len(x)}

    def __init__(self):
        shared = Block()
        super().__init__(shared, shared, self.Dict(), Block(), Block())
        self.chosen = random.Random(0)

    def through(self, x):
        if torch.rand([]).item() < 0.5:
            x = self.blocks[0](x)
        if self.chosen.random() < 0.7:
            x = self.blocks[1](x)
        x = self.blocks[2](x)["x"]
        with torch.no_grad():
            y = self.blocks[3](x)
        return checkpoint(self.blocks[4], self.blocks[3](x), use_reentrant=False) + y


class NotesNumber(nn.Module):
    """A number that follows from the data is kept by the model, which has no parts to plan but such layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, 5)
        self.seen = []

    def forward(self, x):
        x = torch.tanh(self.up(x))
        self.seen.append(x.detach().std().item())
        return self.down(torch.tanh(x))


class Experts(nn.Module):
    """A mixture of experts: which rows an expert gets follows from the data, and so does whether it runs."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == k)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]))
        return self.head(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parts", "where"),
    [
        (TorchsOwnInALoop, {"TransformerEncoderLayer"}, "graph_break()"),
        (Hooked, {"Block"}, "module.py"),
        (SharedAndSkipped, {"Block", "Dict"}, "torch.rand([])"),
        (Experts, {"Block"}, "if rows.numel():"),
        pytest.param(SequentialWithoutMomentum, {"Block"}, "batchnorm.py", marks=pytest.mark.nightly),
        pytest.param(CheckpointedNorm, {"Block"}, "CheckpointedNorm", marks=pytest.mark.nightly),
        pytest.param(Recurrent, {"Recurrent"}, "self.blocks[1]", marks=pytest.mark.nightly),
        pytest.param(NotesNumber, {"NotesNumber"}, "self.seen.append", marks=pytest.mark.nightly),
    ],
)
def test_a_model_in_parts_trains_bitwise_as_eager_within_its_budget(capsys, kind, parts, where):
    plain = trained(kind)
    with session() as opened:
        assert trained(kind) == plain
        engine, warned = opened.engine, opened.reporter.warned
    record = engine.running.record
    assert parts <= {graph.name for graph in record.graphs}
    assert record.breaks[0].name == kind.__name__
    assert where in record.breaks[0].where
    assert engine.peak_bytes <= engine.plan.budget_bytes
    said = [line for line in capsys.readouterr().err.splitlines() if "in parts" in line]
    assert len(said) == 1
    assert where in said[0]
    assert f"{planned_share(record):.0%} of the step's peak is planned" in said[0]
    assert warned == set()


def test_under_a_default_device_a_number_that_follows_from_the_data_is_not_lost():
    """TorchDynamo's graph of the whole then gives None in its place."""
    torch.set_default_device("cpu")
    try:
        plain = trained(NotesNumber)
        with session() as opened:
            assert trained(NotesNumber) == plain
            assert opened.engine.running.record.breaks
    finally:
        torch.set_default_device(None)


def test_a_checkpointed_region_in_a_graph_that_cannot_be_captured_runs_in_python():
    plain = trained(CheckpointedNormAfterABreak)
    with session() as opened:
        assert trained(CheckpointedNormAfterABreak) == plain
        assert "Block" in {graph.name for graph in opened.engine.running.record.graphs}
        assert opened.engine.peak_bytes <= opened.engine.plan.budget_bytes


class OfOtherWidth(nn.Module):
    """Its forward fails: the script's mistake."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Mistaken(Net):
    def __init__(self):
        super().__init__(Block(), OfOtherWidth())

    def through(self, x):
        return self.blocks[1](self.blocks[0](x))


class WithoutKey(Mistaken):
    def through(self, x):
        return {}[f"block{len(x)}"]


@pytest.mark.parametrize("kind", [Mistaken, WithoutKey])
def test_a_mistake_of_the_scripts_has_the_traceback_that_it_has_under_torchrun(capfd, kind):
    def failure():
        with pytest.raises((RuntimeError, KeyError)) as raised:
            trained(kind)
        trace = of_the_script(raised.value.__traceback__)
        lines = [frame.line for frame in traceback.extract_tb(trace)]
        # torch has another line where a module has a compiled call
        return repr(raised.value), [line for line in lines if "_call_impl(" not in line]

    error, lines = failure()
    with session():
        found, ours = failure()
    assert found == error
    assert ours == lines
    assert capfd.readouterr().err == ""


class Split(Net):
    def __init__(self):
        super().__init__(Block(), Block())

    def through(self, x):
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1](x)


@pytest.mark.parametrize(
    ("kind", "width", "runs_as_it_is", "error"),
    [
        (Split, 5, "a part of Split", ScheduleError),  # the graph after the break: the one before it has run
        (Block, WIDTH, "Block", KeyError),
    ],
)
def test_a_graph_for_which_building_fails_runs_as_it_is_with_one_warning(
    monkeypatch, kind, width, runs_as_it_is, error
):
    plain, build = trained(kind), execute.build

    def odd(joint, *rest):
        if joint.outputs[0].meta["val"].shape[-1] == width:
            raise error("odd")
        return build(joint, *rest)

    monkeypatch.setattr(execute, "build", odd)
    with session() as opened:
        assert trained(kind) == plain
        (warning,) = opened.reporter.warned
        assert warning.startswith(f"{runs_as_it_is} runs without a plan")
        assert "odd" in warning


@torch.library.custom_op("monetrun_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Without an implementation for fake tensors, as some operators of torch for some dtypes."""
    return 2 * x


doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


class NotForFakeTensors(Net):
    """After a break, in the same frame, comes an operator that Dynamo cannot go on after."""

    def __init__(self):
        super().__init__(Block(), Block())

    def through(self, x):
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1](doubled(x))


def test_what_fails_on_fake_tensors_runs_in_python_also_in_a_forward_that_has_begun(capfd):
    plain = trained(NotForFakeTensors)
    with session() as opened:
        assert trained(NotForFakeTensors) == plain
        assert "Block" in {graph.name for graph in opened.engine.running.record.graphs}
        assert opened.engine.peak_bytes <= opened.engine.plan.budget_bytes
        assert opened.reporter.warned == set()
    assert "Traceback" not in capfd.readouterr().err


class ChangedWithinAGraph(Net):
    """Each call of the block is a graph of its own, which writes over its input."""

    def __init__(self):
        super().__init__(Block(), Block())

    def through(self, x):
        x = self.blocks[0](x)
        for block in self.blocks:
            torch._dynamo.graph_break()
            x *= torch.empty_like(x).uniform_(0.9, 1.1)
            x = x + block(x)
        return x


def test_an_input_that_graphs_write_over_is_not_read_again():
    plain = trained(ChangedWithinAGraph)
    with session(budget="0.9x") as opened:
        assert trained(ChangedWithinAGraph) == plain
        assert opened.engine.plan is not None


@pytest.mark.parametrize(("kind", "captured"), [(ReadByHooks, "ReadByHooks"), (ReadInParts, "Block")])
def test_hooks_that_cannot_be_captured_run_around_forwards_that_are(kind, captured):
    plain = trained(kind)
    with session() as opened:
        assert trained(kind) == plain
        record = opened.engine.running.record
        assert opened.reporter.warned == set()
    assert captured in {graph.name for graph in record.graphs}
    assert [b.name for b in record.breaks] == [kind.__name__] * (kind is ReadInParts)


def test_a_forward_that_uses_streams_of_its_own_is_left_to_python():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (x, 2))
    graph.output(doubled)
    breaks.check(torch.fx.GraphModule(nn.Module(), graph))
    doubled.meta["custom"] = {"stream": 1}
    with pytest.raises(CaptureFailed, match="uses CUDA streams"):
        breaks.check(torch.fx.GraphModule(nn.Module(), graph))


def test_flex_attention_is_left_to_the_kernel_that_the_scripts_own_compile_makes_of_it():
    """In a captured graph it would run as products of whole matrices of scores."""
    graph = fx.Graph()
    query = graph.placeholder("query")
    graph.output(graph.call_function(torch.ops.higher_order.flex_attention, (query, query, query)))
    with pytest.raises(CaptureFailed, match="flex_attention is one kernel only"):
        breaks.check(fx.GraphModule({}, graph))


@pytest.mark.parametrize("before", [False, True])
def test_what_a_script_sets_as_forward_within_a_call_with_hooks_stays(before):
    """Lightning's strategies set ``training_step`` for the one call that DistributedDataParallel makes."""
    module, called = nn.Linear(2, 2), []

    def own(x):
        called.append("own")
        return x

    def for_one_call(x):
        if before:
            module.forward = own
        else:
            del module.forward
        called.append("one call")
        return module(x)

    if before:
        module.forward = own
    x = torch.ones(1, 2)
    for _ in range(2):
        module.forward = for_one_call
        around_forward(module, lambda module, given, named: module.forward(*given, **named), (x,), {})
        assert module.__dict__.get("forward") is (own if before else None)
    assert called == (["one call", "own"] if before else ["one call"]) * 2
