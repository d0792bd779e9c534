"""Models sharded by FSDP2 train as torch trains them, planned block by block and within the budget.

One process stands for rank 0 of torch's fake process group, whose collectives give every rank what this one sends.
"""

import contextlib
import gc
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from monetrun.capture import cpu_allocator
from monetrun.capture.meter import meter_for
from monetrun.core.step import OUTSIDE
from monetrun.runtime import agreement
from monetrun.runtime.running_plan import intervals_of
from monetrun.runtime.trigger import Trigger
from support import launcher
from support.paths import SCRIPTS
from support.sessions import opened_session

WIDTH, LENGTH, BATCH, WORDS = 48, 32, 8, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-2, -1)).masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.drop(self.out((self.drop(weights) @ v).transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, blocks=2, within_checkpoints=False):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.within_checkpoints = within_checkpoints

    def forward(self, x):
        x = self.words(x) + self.places.weight
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.within_checkpoints and i else block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels, to):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, to, 3, padding=1, bias=False), nn.BatchNorm2d(to)
        self.conv2, self.norm2 = nn.Conv2d(to, to, 3, padding=1, bias=False), nn.BatchNorm2d(to)
        self.skip = nn.Conv2d(channels, to, 1) if channels != to else nn.Identity()

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        return F.relu(y + self.skip(x), inplace=True)


class ResNet(nn.Module):
    """As torchvision's: a stem, stages of blocks in a row, and a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.stage1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.stage2 = nn.Sequential(Residual(8, 16), Residual(16, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.relu(self.norm(self.conv(x)))
        return self.head(self.stage2(self.stage1(x)).mean((2, 3)))


@pytest.fixture
def group(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def reduce_scatter(output, input, *args, **kwargs):  # torch 2.11's leaves the output as it was allocated
        output.copy_(input[: len(output)])

    monkeypatch.setattr(dist, "reduce_scatter_tensor", reduce_scatter)
    monkeypatch.setattr(agreement, "several_ranks", lambda: False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def sharded(model, blocks, **options):
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def gpt(**options):
    model = GPT()
    return sharded(model, model.blocks, **options)


def in_bf16():
    return gpt(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def replicated_between_nodes():
    return gpt(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def replicated():
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    model = GPT()
    for block in model.blocks:
        replicate(block)
    return replicate(model)


def wrapped_in_checkpoints():
    model = GPT()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return sharded(model, model.blocks)


def called_in_checkpoints():
    model = GPT(3, within_checkpoints=True)
    return sharded(model, model.blocks)


def norm_and_head_together():
    model = GPT()
    return sharded(model, [*model.blocks, [model.norm, model.head]])


def within_a_plain_module():
    model = gpt()
    return nn.Sequential(model, nn.Tanh())


def resnet():
    model = ResNet()
    return sharded(model, [*model.stage1, *model.stage2])


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)


def images(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 3, 24, 24, generator=generator)


def trained(build, steps=4, micro_batches=1, given=batch, looks=False):
    """Losses, this rank's part of the state, and the generator's state after training; no tensor of the model stays."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            if micro_batches > 1:
                model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
            x = given(step * micro_batches + micro_batch)
            logits = model(x).float()
            target = x.roll(-1, 1).flatten() if given is batch else torch.arange(16) % 10
            loss = F.cross_entropy(logits.flatten(0, -2), target)
            del logits
            loss.backward()
            losses.append(loss.item())
        if looks:
            losses.append(model(x).float().mean().item())
        optimizer.step()
        optimizer.zero_grad()
    parts = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in model.state_dict().items()}
    return losses, {k: v.tolist() for k, v in parts.items()}, torch.get_rng_state().tolist()


def plain(build, **options):
    """The same of a plain run, and its peak from the second step on."""
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    meter = meter_for(torch.device("cpu"))
    trained(build, steps=1, **options)  # what torch keeps from a first use
    gc.collect()
    before = meter.current_bytes()
    meter.reset_peak()
    return trained(build, **options), meter.peak_bytes() - before


def session(**options):
    return opened_session(**{"solver_seconds": 1.0, "implementations": "exact", **options})


def check(build, budget, plain_within=0.02, **options):
    """Train under ``budget``: bitwise as without it, and with the bytes that are planned. Gives the engine."""
    expected, plain_bytes = plain(build, **options)
    gc.collect()
    before = meter_for(torch.device("cpu")).current_bytes()
    share = int(float(budget.rstrip("x")) * plain_bytes)
    with session(budget=str(before + share)) as opened:  # other tests' garbage is held beside the step
        found = trained(build, **options)
        engine, warned = opened.engine, opened.reporter.warned
    assert found == expected
    assert engine.plan.plain_peak_bytes - before == pytest.approx(plain_bytes, rel=plain_within)
    assert engine.peak_bytes <= engine.plan.budget_bytes
    assert engine.peak_bytes == pytest.approx(engine.plan.planned_peak_bytes, rel=0.01)
    assert warned == set()
    return engine


def test_each_sharded_block_is_planned_and_what_its_hooks_allocate_is_in_the_step(group, capsys):
    engine = check(gpt, "0.7x")
    record = engine.running.record
    assert [g.name for g in record.graphs] == ["FSDPBlock"]
    assert [(e.kind, e.graph) for e in record.events if e.kind != OUTSIDE] == [("forward", 0)] * 2 + [
        ("backward", 0)
    ] * 2
    assert engine.plan.planned_peak_bytes <= engine.plan.budget_bytes < engine.plan.plain_peak_bytes
    recomputed = [s for s in engine.plan.graphs[0].schedule.backward if s.operator < record.graphs[0].forward_count]
    assert recomputed
    # planned and measured bytes agree wherever a graph or an optimizer runs
    for interval in intervals_of(engine.running):
        assert interval.measured_peak_bytes <= interval.planned_peak_bytes * 1.01, interval
    said = [line for line in capsys.readouterr().err.splitlines() if "in parts" in line]
    assert len(said) == 1
    assert "hooks of fully_shard run within it (2 sharded modules)" in said[0]


def nightly(name, *values):
    return pytest.param(*values, id=name, marks=pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "budget", "options"),
    [
        pytest.param(in_bf16, "0.7x", {}, id="bf16"),
        pytest.param(gpt, "0.7x", {"micro_batches": 2}, id="accumulated"),
        pytest.param(wrapped_in_checkpoints, "0.9x", {}, id="wrapped"),
        pytest.param(replicated, "0.7x", {}, id="replicated"),
        nightly("kept", lambda: gpt(reshard_after_forward=False), "0.7x", {}),
        nightly("hsdp", replicated_between_nodes, "0.7x", {}),
        nightly("called", called_in_checkpoints, "0.9x", {}),
        nightly("grouped", norm_and_head_together, "0.7x", {}),
        nightly("within", within_a_plain_module, "0.7x", {}),
        nightly("resnet", resnet, "0.8x", {"given": images, "plain_within": 0.07}),  # of the model without FSDP2, too
    ],
)
def test_sharded_models_train_bitwise_as_without_a_plan_and_keep_their_budget(group, build, budget, options):
    check(build, budget, **options)


def resharding(model):
    return [block._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is not None for block in model.blocks]


@pytest.mark.parametrize("scripted", [True, False], ids=["reshard", "keep"])
def test_the_planned_choice_of_kept_parameters_holds_in_training_alone_and_within_the_budget(group, scripted):
    built = []

    def build():
        model = GPT(4)
        built.append(sharded(model, model.blocks, reshard_after_forward=scripted))
        return model

    engine = check(build, "1.1x" if scripted else "0.3x")  # all four kept take more
    plan, sharding = engine.plan, engine.running.record.sharding
    assert plan.keeps_parameters == {m.name: i in sharding.kept for i, m in enumerate(sharding.modules) if m.choice}
    kept = sum(plan.keeps_parameters.values())
    assert kept == 4 if scripted else kept < 4  # none in the script, or all
    assert [m.kept for m in sharding.modules if m.choice] == [not scripted] * 4
    assert resharding(built[-1]) == [scripted] * 4  # evaluation does as the script says
    for interval in intervals_of(engine.running):
        assert interval.measured_peak_bytes <= interval.planned_peak_bytes * 1.01, interval


def test_parameters_that_a_forward_without_a_backward_has_gathered_are_gathered_anew_after_the_step(group):
    expected = trained(gpt, looks=True)
    with session(budget="1.2x") as opened:
        found = trained(gpt, looks=True)
        assert all(opened.engine.plan.keeps_parameters.values())
    assert found == expected


def zeroed_between_forward_and_backward(model, optimizer, step, saved):
    loss = model(batch(step)).float().square().mean()
    model.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def penalized(model, optimizer, step, saved):
    loss = model(batch(step)).float().square().mean()
    penalty = sum(block.up.weight.to_local().square().sum() for block in model.blocks)
    (loss + penalty).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def rolled_back(model, optimizer, step, saved):
    loss = model(batch(step)).float().square().mean()
    if step == 3:  # this step's backward is left out
        for parameter, before in zip(saved["parameters"], saved["copies"], strict=True):
            parameter.detach().copy_(before)
        return loss.item()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("take_step", [zeroed_between_forward_and_backward, penalized, rolled_back])
def test_the_script_sees_parameters_freed_that_the_plan_keeps(group, take_step):
    def losses():
        torch.manual_seed(0)
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        parameters = list(model.parameters())
        saved = {"parameters": parameters, "copies": [p.detach().clone() for p in parameters]}
        return [take_step(model, optimizer, step, saved) for step in range(6)]

    expected = losses()
    with session(budget="1.2x") as opened:
        assert losses() == expected
        assert any(opened.engine.plan.keeps_parameters.values())


def test_a_root_and_what_is_resharded_to_fewer_ranks_do_as_the_script_says(group):
    engine = check(lambda: gpt(reshard_after_forward=2), "0.9x")
    assert engine.plan.keeps_parameters == {}
    assert [m.choice for m in engine.running.record.sharding.modules] == [False] * 3


def launched(module, out, *words, script="sharded.py", ranks=2):
    options = ("--standalone", f"--nproc-per-node={ranks}")
    done = launcher.run(module, *options, *words[:-1], SCRIPTS / script, out, *words[-1])
    return [torch.load(f"{out}.{rank}") for rank in range(ranks)], done.stderr


def assert_trained_alike(expected, found):
    for theirs, ours in zip(expected, found, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert all(torch.equal(ours["state"][name], value) for name, value in theirs["state"].items())


def assert_peaks_are_as_planned(said, share):
    plain, planned, measured = (
        float(re.search(rf"{name} peak +([0-9.]+) MiB", said)[1]) for name in ("plain", "planned", "measured")
    )
    assert measured <= planned * 1.01 + 0.11  # printed to 0.1 MiB
    assert measured >= planned * 0.99 - 0.11
    assert measured <= share * plain * 1.001 + 0.1
    assert "sharded modules keep their parameters" in said


BLOCKS = ("sharded.py", ("--length", "256", "--blocks", "4"))
RESNET = ("sharded_network.py", ("--size", "160", "--steps", "3"))
KEPT = ("sharded_network.py", ("--keep", "--size", "112", "--steps", "3"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "words", "ranks", "share"),
    [*((*of, ranks, share) for of in (BLOCKS, RESNET) for ranks in (2, 4) for share in (0.8, 0.6)), (*KEPT, 2, 0.8)],
)
def test_ranks_train_as_under_torchrun_at_the_planned_peak(tmp_path, monkeypatch, script, words, ranks, share):
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    of = {"script": script, "ranks": ranks}
    expected, _ = launched(launcher.TORCHRUN, tmp_path / "plain", words, **of)
    options = (f"--budget={share}x", "--implementations=exact", "--solver-seconds=1")
    found, said = launched(launcher.MONETRUN, tmp_path / "planned", *options, words, **of)
    assert_trained_alike(expected, found)
    assert_peaks_are_as_planned(said, share)


def as_under_torchrun(folder, words):
    """Two ranks train under torchrun, and within 0.7x: alike, in parts, at the planned peak. Gives what was printed."""
    expected, _ = launched(launcher.TORCHRUN, folder / "plain", words)
    options = ("--budget=0.7x", "--implementations=exact", "--solver-seconds=1")
    found, said = launched(launcher.MONETRUN, folder / "planned", *options, words)
    assert_trained_alike(expected, found)
    assert "FSDPGPT is planned in parts" in said
    assert_peaks_are_as_planned(said, 0.7)
    return said


@pytest.mark.slow
def test_two_ranks_train_as_under_torchrun_at_the_planned_peak(tmp_path, monkeypatch):
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    assert_peaks_are_as_planned(as_under_torchrun(tmp_path, ()), 0.7)


@pytest.mark.nightly
def test_two_ranks_that_go_on_from_a_checkpoint_train_as_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    as_under_torchrun(tmp_path, ("--save", tmp_path / "saved"))
    as_under_torchrun(tmp_path, ("--load", tmp_path / "saved"))


def test_calls_that_run_as_they_are_make_the_collectives_that_are_planned(group, monkeypatch):
    """Other ranks run the plan: with one all-gather less in this rank, they would wait for ever."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    gathered, gather = [], _fsdp_param_group.foreach_all_gather
    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", lambda *given: gathered.append(1) or gather(*given))

    def counts(steps):
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for step, context in enumerate(steps):
            gathered.clear()
            with context:
                model(batch(step)).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(len(gathered))
        return found

    as_it_is = contextlib.nullcontext(), contextlib.nullcontext()
    scripted = counts(as_it_is)[-1]
    with session(budget="1.2x", quiet=True) as opened:
        counted = FlopCounterMode(display=False)
        keeps = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        found = counts([*as_it_is, *as_it_is, counted, *as_it_is, keeps, *as_it_is])
        (warning,) = opened.reporter.warned
    assert "hooks" in warning
    planned = found[3]
    assert planned < scripted
    assert found[2:] == [planned] * 8


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = nn.Sequential(Perceptron(), nn.Linear(WIDTH, WIDTH))
    parallelize_module(model[0], init_device_mesh("cpu", (4,)), plan)
    return model, model


def tensor_parallel_and_sharded():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "split"))
    model = Perceptron()
    parallelize_module(model, mesh["split"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, fully_shard(model, mesh=mesh["shard"])


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Perceptron(), device_id=torch.device("cpu"), use_orig_params=True)
    return model, model


def pipeline_stage():
    from torch.distributed.pipelining import PipelineStage

    model = nn.Sequential(Perceptron(), Perceptron())
    return PipelineStage(model, 0, 4, torch.device("cpu")), model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (tensor_parallel, "tensor parallelism"),
        (tensor_parallel_and_sharded, "tensor parallelism"),
        (fsdp1, "FSDP1"),
        (pipeline_stage, "stage of a pipeline"),
    ],
)
def test_models_split_among_ranks_in_other_ways_run_as_they_are_after_one_warning(group, build, reason):
    with session(budget="0.7x", quiet=True) as opened:
        whole, model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH)).sum().backward()
            optimizer.step()
        assert opened.engine is None
        assert not any(isinstance(module._compiled_call_impl, Trigger) for module in model.modules())
        (warning,) = opened.reporter.warned
    assert reason in warning
    assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert whole is not None


def flattened_later(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def split_later(model):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (4,))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@pytest.mark.parametrize(("split", "reason"), [(flattened_later, "FSDP1"), (split_later, "tensor parallelism")])
def test_what_is_split_once_its_optimizer_is_made_runs_as_it_is_too(group, split, reason):
    """Accelerate and transformers make the optimizer first, and give it the parameters anew."""
    with session(budget="0.7x", quiet=True) as opened:
        model = Perceptron()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = split(model)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH)).sum().backward()
            optimizer.step()
        assert opened.engine is None
        (warning,) = opened.reporter.warned
    assert reason in warning
