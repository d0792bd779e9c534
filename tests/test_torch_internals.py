"""The table of torch's private names lists all that monetrun uses, and the installed torch has them."""

import importlib
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses import FakeTensorMode
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.multiprocessing.reductions import StorageWeakRef

from support import torch_internals

NAMES = [name for row in torch_internals.rows() for name in row.names]


def test_the_table_lists_what_the_source_uses():
    assert torch_internals.problems() == [], "python tests/support/torch_internals.py --write updates the packages"


SOURCE = """
import os
import torch
from torch._guards import TracingContext as Context
from torch.distributed import run

aten = torch.ops.aten
aten._fused_norm.default

def use(node, module, storage):
    module._undocumented = storage._address
    os._exit(run.run(node.meta["secret"], node.meta.get("val"), node.meta["monetrun_own"]))
    return Context.try_get(), _mine(node)._mine

def _mine(node):
    return "late" in node.meta
"""


def test_the_scan_finds_private_imports_attributes_and_metadata(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file.py").write_text(SOURCE)
    (uses,) = torch_internals.uses_by_file(tmp_path).values()
    assert torch_internals.private_names(uses, torch_internals.own_names(tmp_path)) == {
        "torch._guards.TracingContext",
        "torch._guards.TracingContext.try_get",
        "torch.ops.aten._fused_norm.default",
        "._undocumented",
        "._address",
        'meta["secret"]',
        'meta["val"]',
        'meta["late"]',
    }
    assert uses.has("torch.distributed.run.run")
    assert uses.has("torch.ops.aten._fused*")
    assert uses.has("Module._undocumented")
    assert not uses.has("torch.distributed.run.config_from_args")


def test_missing_unused_and_misplaced_names_are_problems(tmp_path):
    table = tmp_path / "table.md"
    text = torch_internals.TABLE.read_text()
    cells = next(row.cells for row in torch_internals.rows() if row.names == ("Module._call_impl",))
    for wrong, problem in (
        (text.replace("| `Module._call_impl` |", "| `Module._gone` |"), "Module._gone is not used"),
        (text.replace("| `Module._call_impl` |", "| `Module._gone` |"), "uses ._call_impl, which is not in the table"),
        (text.replace(f"| {cells[0]} | {cells[1]} |", f"| {cells[0]} | solve |"), "(the table has: solve)"),
    ):
        table.write_text(wrong)
        assert any(problem in found for found in torch_internals.problems(table))
    torch_internals.write(table)
    assert table.read_text() == text


@pytest.fixture(scope="module")
def objects():
    """For each class in the table an object of it."""

    def refuse(module, inputs):
        raise ValueError

    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as failure:
        torch.compile(lambda x: x + 1, backend=refuse)(torch.ones(2))
    with pytest.raises(torch._dynamo.exc.Unsupported) as broken:
        torch.compile(lambda x: x if x.sum() > 0 else -x, backend="eager", fullgraph=True)(torch.ones(2))
    torch._dynamo.reset()
    mode = FakeTensorMode()
    converter = mode.fake_tensor_converter
    with mode:
        fake = torch.empty(2)
    storage = torch.empty(2).untyped_storage()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    sharded = torch.distributed.fsdp.fully_shard(torch.nn.Linear(1, 1), mesh=mesh)
    state = sharded._get_fsdp_state()
    torch.distributed.destroy_process_group()
    return {
        "BackendCompilerFailed": failure.value,
        "FSDPModule": sharded,
        "FSDPParam": state._fsdp_param_group.fsdp_params[0],
        "FSDPParamGroup": state._fsdp_param_group,
        "FSDPState": state,
        "FakeTensor": fake,
        "FakeTensorConverter": converter,
        "FakeTensorMode": mode,
        "MetaConverter": converter.meta_converter,
        "Module": torch.nn.Linear(1, 1),
        "OpOverload": torch.ops.aten.relu.default,
        "SimpleElasticAgent": LocalElasticAgent(WorkerSpec("", 1, Mock(), entrypoint="train.py"), Mock()),
        "StorageWeakRef": StorageWeakRef(storage),
        "Unsupported": broken.value,
        "UntypedStorage": storage,
    }


def resolve(name):
    """The object of a dotted name: an import, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("torch.") and not n.endswith("*")])
def test_the_installed_torch_has_the_name(name):
    resolve(name)


def test_the_installed_torch_has_the_operators_of_each_family():
    families = [name for name in NAMES if name.startswith("torch.") and name.endswith("*")]
    chains = {chain for uses in torch_internals.uses_by_file().values() for chain in uses.chains}
    for family in families:
        for chain in chains:
            if torch_internals.covers(family, chain):
                resolve(chain)


def test_objects_of_torch_have_the_private_attributes(objects):
    names = [name.split(".") for name in NAMES if name[0].isalpha() and "." in name and not name.startswith("torch.")]
    names = [(owner, attribute) for owner, attribute in names if owner != "function"]  # monetrun sets those
    assert {owner for owner, _ in names} == set(objects)
    assert [n for n in names if not hasattr(objects[n[0]], n[1])] == []


def test_joint_graphs_carry_the_metadata_that_capture_reads():
    from support.captured import CASES, captured

    module, shape = CASES["batch norm"]
    nodes = list(captured(module, torch.randn(shape)).module.graph.nodes)
    assert {"val", "partitioner_tag", "nn_module_stack"} <= {key for node in nodes for key in node.meta}
    tags = {node.meta.get("partitioner_tag") for node in nodes}
    assert {"is_forward", "is_backward", "must_be_in_forward"} <= tags
    assert any("tangents" in str(node.target) for node in nodes if node.op == "placeholder")
