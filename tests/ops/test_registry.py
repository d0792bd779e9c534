"""What a package beside monetrun adds, and what the registry refuses."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import fx

from monetrun.ops import registry
from monetrun.ops.registry import Alternative, Call
from support.paths import README, ROOT

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
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
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
