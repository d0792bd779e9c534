"""The registry: generators of other packages, the order of what is offered, and names that it refuses."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import fx

from monetrun.ops import registry
from monetrun.ops.registry import Alternative, Call, implementation
from support.captured import Wave, captured
from support.paths import DOCS, ROOT

USE = """
import torch, torch.nn.functional as F
from support.captured import CASES, Wave, captured, computed
from torch import fx

joint = captured(Wave(lambda x: F.logsigmoid(3 * x), torch.sin), torch.randn(4, 5))
values = computed(joint, torch.float32)
(found,) = [
    (i, k)
    for i, op in enumerate(joint.graph.operators)
    for k, impl in enumerate(op.implementations)
    if impl.name == "output:log-sigmoid"
]
call = joint.calls[found]
given = call.target(*fx.map_arg(call.args, values.__getitem__))
torch.testing.assert_close(given, values[joint.nodes[found[0]]])
print("from output:", joint.graph.operators[found[0]].target)
"""


def test_the_readmes_implementation_works_from_an_installed_package(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "implementations.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 30
    for name, text in {
        "mine/__init__.py": "",
        "mine/log_sigmoid.py": code,
        "mine-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n",
        "mine-1.0.dist-info/entry_points.txt": "[monetrun.implementations]\nmine = mine.log_sigmoid\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.stdout == "from output: aten.log_sigmoid_backward.default\n", done.stderr


def test_every_family_registers_generators_or_declares_operators():
    names = {g.__module__.rpartition(".")[2] for g in itertools.chain(*all_generators().values())}
    files = (ROOT / "monetrun/ops/families").glob("[a-z]*.py")
    assert names >= {path.stem for path in files if "@operator(" not in path.read_text()}


def all_generators():
    registry.load()
    return registry._generators


def two_masks_or_fused(node, joint):
    """Offers two masks of the input, of which ``two_masks_or_output`` offers the second too."""
    x = node.args[0]
    for high in (2.0, 1.0):
        mask = joint.optional(x, torch.ops.monet.range_mask.default, x, 0.0, high)
        yield Alternative("intermediate:sine", Call(torch.ops.monet.mask_scale.default, (x, mask, high)), exact=False)
    yield Alternative("fused:sine", Call(torch.ops.aten.sin.default, (x,)))


def two_masks_or_output(node, joint):
    x = node.args[0]
    yield Alternative("output:sine", Call(torch.ops.aten.sin.default, (x,)))
    for high in (1.0, 0.5):
        mask = joint.optional(x, torch.ops.monet.range_mask.default, x, 0.0, high)
        yield Alternative("intermediate:sine", Call(torch.ops.monet.mask_scale.default, (x, mask, 0.5)), exact=False)
    yield Alternative("in-place", Call(torch.ops.aten.sin_.default, (x,)), x)


def test_the_order_of_registration_changes_no_graph(monkeypatch):
    sine = torch.ops.aten.sin.default
    graphs = []
    for generators in itertools.permutations((two_masks_or_fused, two_masks_or_output)):
        monkeypatch.setattr(registry, "_generators", {**all_generators(), sine: []})
        for generator in generators:
            implementation(sine)(generator)
        graphs.append(captured(Wave(torch.tanh, torch.sin, torch.tanh), torch.randn(4, 5)).graph)
    one, other = graphs
    assert one.fingerprint == other.fingerprint
    ways, same = ([op.implementations for op in graph.operators if op.target == "aten.sin.default"] for graph in graphs)
    assert ways == same
    assert [impl.name for impl in ways[0]] == [
        "default",
        "fused:sine",
        "in-place",
        *["intermediate:sine"] * 4,
        "output:sine",
    ]
    assert sum(op.target == "monet.range_mask.default" for op in one.operators) == 3


def test_a_name_of_no_known_kind_is_refused(monkeypatch):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    y = graph.call_function(torch.ops.aten.sin.default, (x,))
    y.meta["val"] = torch.ones(3)
    graph.output(y)
    offer = Alternative("faster", Call(torch.ops.aten.sin.default, (x,)))
    monkeypatch.setitem(registry._generators, torch.ops.aten.sin.default, [lambda node, joint: [offer]])
    with pytest.raises(ValueError, match=r"'faster' of aten\.sin\.default: its kind is none of"):
        registry.alternatives(fx.GraphModule(torch.nn.Module(), graph))
