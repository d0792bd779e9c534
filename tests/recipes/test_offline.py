"""Capture without memory: the graph of a fake model equals that of the real one."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from lib import networks, offline
from monetrun.core.errors import CaptureFailed, UsageError
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch._dynamo.reset()


def plain(joint, costs):
    return simulate(joint.graph, costs, plain_schedule(joint.graph))


@pytest.mark.nightly
@pytest.mark.slow
def test_resnet50_at_batch_184_is_captured_without_its_memory():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with offline.fake_tensors():
        model = torchvision.models.resnet50()
        x, y = torch.empty(184, 3, 224, 224), torch.zeros(184, dtype=torch.int64)
        joint = offline.capture(model, (x,), loss=lambda out: F.cross_entropy(out, y))
    costs = offline.costs(joint, "roofline:p100")
    assert 14.5 * 2**30 < plain(joint, costs).peak_bytes < 15.0 * 2**30  # MONeT reports 15.06 GB with parameters
    gradients = sum(t.nbytes for t in joint.graph.tensors if t.kept)
    assert gradients == sum(p.nbytes for p in model.parameters()) + 4  # and the loss
    assert 184 / plain(joint, costs).seconds == pytest.approx(231, abs=2)  # images a second
    assert costs.device == "roofline:p100"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < max(2 * 2**30, before + 2**28)


def test_tied_weights_and_buffers_are_one_storage():
    with offline.fake_tensors():
        model = networks.GPT(layers=1, length=64)
        model.register_buffer("scale", torch.ones(256))
        batch = {"tokens": torch.zeros(4, 64, dtype=torch.int64)}
        joint = offline.capture(model, (batch,), loss=lambda out: out["loss"] + (out["logits"] * model.scale).mean())
    graph = joint.graph
    parameters = [t for t in graph.tensors if t.external and t.nbytes == model.token.weight.nbytes]
    assert len(parameters) == 1  # the embedding, which is the head as well
    gradients = [t for t in graph.tensors if t.kept and t.nbytes == model.token.weight.nbytes]
    assert len(gradients) == 1


def test_without_a_loss_the_graph_ends_at_the_outputs():
    with offline.fake_tensors():
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        joint = offline.capture(model, (torch.empty(16, 32),))
    outputs = [n.meta["val"].shape for n in joint.outputs]
    assert outputs == [torch.Size([16, 8])]
    assert len(joint.gradients) == 5
    assert joint.graph.name == "Sequential"


def test_evaluation_mode_draws_no_random_numbers():
    with offline.fake_tensors():
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        x = torch.empty(4, 8)
        train = offline.capture(model, (x,))
        evaluation = offline.capture(model, (x,), train=False)
    assert len(train.graph.operators) > len(evaluation.graph.operators)
    assert not model.training


def test_real_tensors_are_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureFailed, match=r"offline\.fake_tensors\(\)"):
        offline.capture(model, (torch.ones(2, 4),))


def test_a_forward_that_breaks_is_refused():
    with offline.fake_tensors():
        model = networks.TwoHalves()
        with pytest.raises(CaptureFailed, match="captured as 2 graphs"):
            offline.capture(model, (torch.empty(2, 3, 32, 32),))


def test_fake_tensors_cannot_be_measured():
    with offline.fake_tensors():
        joint = offline.capture(nn.Linear(4, 4), (torch.empty(2, 4),))
    with pytest.raises(UsageError, match="roofline:p100, roofline:v100"):
        offline.costs(joint, "measured")
