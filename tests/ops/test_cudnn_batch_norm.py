"""cuDNN's batch norm in captured graphs: traced as one operator with its reserve space, recomputed, run directly."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from monetrun.capture.execute import build
from monetrun.capture.lowering import lower
from monetrun.core.graph import FORWARD, check
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.ops.families import cudnn_batch_norm
from monetrun.ops.families.normalization import batch_norm_act_is_exact
from monetrun.runtime.backend import Backend
from support.captured import captured
from support.cudnn_norm import CudnnBatchNorm

aten, monet = torch.ops.aten, torch.ops.monet


def net(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(8), nn.SiLU())


class AllAgain:
    """Runs the whole forward again in the backward pass, as far as that can run again."""

    def choose(self, joint):
        self.joint, graph = joint, joint.graph
        check(graph)
        plain = plain_schedule(graph)
        again = [s for s in plain.forward if graph.operators[s.operator].replayable]
        return 0, Schedule(plain.forward, (*again, *plain.backward))


def trained(module, steps=3):
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        y = module(x)
        y.square().sum().backward()
    return y


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("evaluated", [False, True])
def test_recomputing_it_changes_neither_gradients_nor_running_statistics(evaluated):
    plain, planned = net(nn.BatchNorm2d), net(CudnnBatchNorm)
    for module in (plain, planned):
        module[4].train(not evaluated)
    chooser = AllAgain()
    torch._dynamo.reset()
    expected, given = trained(plain), trained(torch.compile(planned, backend=Backend(chooser, "net")))
    assert torch.equal(expected, given)
    assert same([p.grad for p in plain.parameters()], [p.grad for p in planned.parameters()])
    for norm in (1, 4):
        assert torch.equal(plain[norm].running_mean, planned[norm].running_mean)
        assert torch.equal(plain[norm].running_var, planned[norm].running_var)
    norms = [op for op in chooser.joint.graph.operators if "cudnn_batch_norm" in op.target and op.phase == FORWARD]
    assert [op.replayable for op in norms] == [True, True]
    assert norms[1].target == f"monet.cudnn_batch_norm{'_inference' if evaluated else ''}.default"


def test_it_is_traced_without_copies_of_its_new_statistics():
    joint = captured(net(CudnnBatchNorm), torch.randn(2, 3, 9, 9))
    targets = [str(n.target) for n in joint.module.graph.find_nodes(op="call_function", target=aten.copy_.default)]
    assert len(targets) == 4  # two statistics of two norms
    assert not joint.module.graph.find_nodes(op="call_function", target=aten.copy.default)
    assert not [n for n in joint.nodes if "native_batch_norm" in str(n.target)]


def test_the_relu_after_it_can_be_fused_and_its_backward_can_read_its_output():
    joint = captured(net(CudnnBatchNorm), torch.randn(2, 3, 9, 9))
    offered = {op.target: {i.name for i in op.implementations} for op in joint.graph.operators}
    assert "fused:batch-norm" in offered["aten.relu.default"]
    backwards = [op for op in joint.graph.operators if op.target == "aten.cudnn_batch_norm_backward.default"]
    assert [{i.name for i in op.implementations} for op in backwards] == [
        {"default", "output:batch-norm"},  # the last one's output is kept for SiLU
        {"default"},
    ]


def test_aotautograds_own_entries_are_put_back():
    overload = aten.cudnn_batch_norm.default
    before = dict(overload.py_kernels)
    captured(net(CudnnBatchNorm), torch.randn(2, 3, 9, 9))
    assert overload.py_kernels == before
    assert cudnn_batch_norm.traced not in before.values()


def on_cuda(joint):
    """The modules that run a plain schedule with one recomputed batch norm, as if the graph's tensors were on CUDA."""
    plain = plain_schedule(joint.graph)
    norms = joint.module.graph.find_nodes(op="call_function", target=monet.cudnn_batch_norm.default)
    for node in norms:
        node.meta["val"] = (SimpleNamespace(device=torch.device("cuda", 0)),) * 6
    mode = norms[0].all_input_nodes[0].meta["val"].fake_mode
    for node in joint.primals:
        with mode:
            node.meta["val"] = torch.empty_like(node.meta["val"], device="cuda")
    again = Step(joint.nodes.index(norms[0]))
    return build(joint, Schedule(plain.forward, (again, *plain.backward)))


def test_on_cuda_the_modules_call_cudnn_directly():
    forward, backward = on_cuda(captured(net(CudnnBatchNorm), torch.randn(2, 3, 9, 9)))
    for module, calls in ((forward, 2), (backward, 1)):
        targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
        assert targets.count(aten.cudnn_batch_norm.default) == calls
        assert not [t for t in targets if "monet.cudnn_batch_norm" in str(t)]
    first = forward.graph.find_nodes(op="call_function", target=aten.cudnn_batch_norm.default)[0]
    assert [s.op for s in first.args[3:5]] == ["placeholder"] * 2  # it writes the running statistics themselves
    assert not forward.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert not forward.graph.find_nodes(op="call_function", target=aten.copy_.default)
    (again,) = backward.graph.find_nodes(op="call_function", target=aten.cudnn_batch_norm.default)
    assert again.args[3:6] == (None, None, True)


def test_statistics_that_something_else_reads_are_copied():
    joint = captured(net(CudnnBatchNorm), torch.randn(2, 3, 9, 9))
    norms = joint.module.graph.find_nodes(op="call_function", target=monet.cudnn_batch_norm.default)
    forward, _ = on_cuda(joint)
    graph = fx.Graph()
    values = {}
    for node in forward.graph.nodes:  # the same, with the old mean as an output, and its copy back
        values[node] = graph.node_copy(node, values.__getitem__) if node.op != "output" else None
    norm = graph.find_nodes(op="call_function", target=aten.cudnn_batch_norm.default)[0]
    mean = norm.args[3]
    with graph.inserting_before(norm):
        copy = graph.call_function(aten.clone.default, (mean,))
    norm.update_arg(3, copy)
    graph.call_function(aten.copy_.default, (mean, copy))
    graph.output((copy,))
    lower(graph)
    assert norm.args[3] is copy
    assert len(norms) == 2


def test_batches_are_counted_in_one_call():
    graph = fx.Graph()
    with FakeTensorMode():
        counts = [torch.empty((), dtype=torch.int64, device="cuda") for _ in range(3)]
    kept = [graph.placeholder(f"count{i}") for i in range(3)]
    new = [graph.call_function(aten.add.Tensor, (node, 1)) for node in kept]
    for nodes in (kept, new):
        for node, value in zip(nodes, counts, strict=True):
            node.meta["val"] = value
    for node, updated in zip(kept, new, strict=True):
        graph.call_function(aten.copy_.default, (node, updated))
    graph.output((new[2],))
    lower(graph)
    (together,) = graph.find_nodes(op="call_function", target=aten._foreach_add_.Scalar)
    assert together.args == (kept[:2], 1)
    (copy,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert copy.args == (kept[2], new[2])  # something else reads the new count


def test_detachments_and_pairs_of_transpositions_are_left_out():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.mm.default, (x, x))
    twice = graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (y,)),))
    detached = graph.call_function(aten.detach.default, (graph.call_function(aten.detach.default, (twice,)),))
    given_back = graph.call_function(aten.detach.default, (x,))
    graph.output((graph.call_function(aten.relu.default, (detached,)), twice, given_back))
    lower(graph)
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [
        aten.mm.default,
        aten.detach.default,  # of an input: an output is another tensor
        aten.relu.default,
    ]
    (output,) = graph.find_nodes(op="output")
    assert output.args[0][1:] == (y, given_back)


def test_elsewhere_the_modules_stay_as_they_are():
    graph = fx.Graph()
    node = graph.call_function(monet.cudnn_batch_norm_again.default, (None, None, None, 1e-5, 0))
    node.meta["val"] = (torch.empty(1),) * 4
    graph.output(graph.call_function(operator.getitem, (node, 0)))
    before = str(graph)
    lower(graph)
    assert str(graph) == before


def test_what_cannot_be_tried_on_cuda_is_not_called_exact():
    if torch.cuda.is_available():
        pytest.skip("here it is tried")
    assert not batch_norm_act_is_exact(torch.float32, False, torch.device("cuda", 0))
    assert not batch_norm_act_is_exact(torch.float32, False, torch.device("cuda", 0), 4, True)
