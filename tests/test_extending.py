"""docs/extending.md: its three walks, done with the page's own blocks of code in a temporary copy."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from monetrun.core.options import Options
from monetrun.core.plan import Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.planning import planner
from monetrun.solve import ALGORITHMS, descriptions, solver
from support.paths import ROOT
from support.small_graphs import conv_norm_relu, make
from support.step_records import graph_record

PAGE = (ROOT / "docs/extending.md").read_text()
BLOCK = re.compile(r"^`([^`\n]+)`(?:, before `([^`\n]+)`)?\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code of the page: a file, or lines to add to one before the line ``before``."""

    before: str
    text: str


BLOCKS = {path: Block(before, text) for path, before, text in BLOCK.findall(PAGE)}


def write(folder: Path, path: str) -> None:
    """Do what the page says with the block of ``path``: write it, or add it to the file that is there."""
    block, target = BLOCKS[path], folder / path
    text = block.text
    if block.before:
        lines = target.read_text().splitlines(keepends=True)
        (place,) = [i for i, line in enumerate(lines) if line.strip() == block.before]
        text = "".join([*lines[:place], text, *lines[place:]])
    else:
        assert not target.exists()
        target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder in which the page's package ``mine`` is installed."""
    folder = tmp_path_factory.mktemp("installed")
    for path in ("mine/softshrink.py", "mine/drop_largest.py"):
        write(folder, path)
    (folder / "mine/__init__.py").touch()
    project = configparser.ConfigParser()
    project.read_string(BLOCKS["pyproject.toml"].text)
    name, version = (project["project"][key].strip('"') for key in ("name", "version"))
    entry_points = []
    for section in project.sections():
        if group := re.fullmatch(r'project\.entry-points\."(.+)"', section):
            entry_points.append(f"[{group[1]}]")
            entry_points += [f"{key} = {value.strip(chr(34))}" for key, value in project[section].items()]
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (information / "entry_points.txt").write_text("\n".join([*entry_points, ""]))
    return folder


def run_python(*words: str, path: tuple[Path, ...], cwd: Path | None = None) -> str:
    """What a new interpreter prints that finds its modules in the folders ``path``."""
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def test_every_block_of_the_page_has_a_path_and_is_in_a_walk():
    assert len(re.findall(r"^```\w", PAGE, re.MULTILINE)) == len(BLOCK.findall(PAGE)) == len(BLOCKS)
    outside = {"pyproject.toml", "mine/softshrink.py", "mine/drop_largest.py", "tests/solve/test_drop_largest.py"}
    assert BLOCKS.keys() == outside | set(INSIDE)
    assert len(BLOCKS["mine/drop_largest.py"].text.splitlines()) < 40


def test_the_modules_functions_and_files_that_the_page_names_exist():
    paths = set(re.findall(r"`((?:monetrun|cuda_ops|tests|docs)/[\w/.]+)`", PAGE)) - BLOCKS.keys()
    assert {path for path in paths if not (ROOT / path).exists()} == {"cuda_ops/hardsigmoid_cuda.cuh"}
    assert (ROOT / "cuda_ops/hardswish_cuda.cuh").exists()


SOFTSHRINK = """
import json
import torch
import torch.nn.functional as F
from torch import fx
from monetrun.core.graph import Costs
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import solver
from support.captured import Wave, captured, computed

found = []
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for lambd in (0.0, 0.3):
        module = Wave(lambda x: F.softshrink(2 * x, lambd), torch.sin).to(dtype)
        joint = captured(module, torch.randn(16, 64, dtype=dtype))
        values = computed(joint, dtype)
        for (i, k), call in joint.calls.items():
            op, node = joint.graph.operators[i], joint.nodes[i]
            if op.implementations[k].name == "output:softshrink":
                given = call.target(*fx.map_arg(call.args, values.__getitem__))
                assert 0 < values[node].count_nonzero() < given.numel() or lambd == 0
                found.append([op.target, op.implementations[k].exact, torch.equal(given, values[node])])

def fits(kinds, budget_bytes):
    options = Options(recompute=False, implementations=kinds)
    schedule = solver("greedy")(joint.graph, costs, budget_bytes, options).schedule
    return schedule is not None and simulate(joint.graph, costs, schedule).peak_bytes <= budget_bytes

joint = captured(Wave(*[F.softshrink, torch.sin] * 3), torch.randn(16, 64))
costs = Costs("unit", *(tuple((n,) * len(op.implementations) for op in joint.graph.operators) for n in (1.0, 0)))
plain = simulate(joint.graph, costs, plain_schedule(joint.graph)).peak_bytes
print(json.dumps([found, *(fits(kinds, plain - 2 * 16 * 64 * 4) for kinds in ((), ("output",)))]))
"""


def test_walk_1_gives_softshrinks_backward_from_its_output_and_fits_less_memory(package):
    found, without, with_output = json.loads(run_python("-c", SOFTSHRINK, path=(package, ROOT, ROOT / "tests")))
    assert found == [["aten.softshrink_backward.default", True, True]] * 8
    assert (without, with_output) == (False, True)


INSIDE = (
    "monetrun/ops/families/hardsigmoid.py",
    "cuda_ops/hardsigmoid_cpu.hpp",
    "cuda_ops/ops_cpu.cpp",
    "tests/ops/test_hardsigmoid.py",
    "tests/ops/test_kernels.py",
)

NATIVE = """
import torch
import monetrun
from monetrun.ops import definition, kernels
assert kernels.load(), kernels.unavailable_reason()
from monetrun.ops.families import hardsigmoid

def unpack(*_):
    raise RuntimeError("the reference runs")

hardsigmoid.unpack = unpack
grad, mask = torch.full((9,), 6.0), torch.tensor([0b101, 1], dtype=torch.uint8)
try:
    definition.REFERENCES["hardsigmoid_mask_backward"](grad, mask)
except RuntimeError as error:
    print(error)
print(monetrun.__file__, torch.ops.monet.hardsigmoid_mask_backward(grad, mask).tolist())
"""


@pytest.mark.nightly
def test_walk_2_adds_an_operator_whose_native_kernel_runs(tmp_path):
    for folder in ("monetrun", "cuda_ops", "tests", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__", "results", "instances")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path in INSIDE:
        write(tmp_path, path)
    printed = run_python("-c", NATIVE, path=(tmp_path,), cwd=tmp_path).splitlines()
    values = [1.0, 0.0, 1.0, *[0.0] * 5, 1.0]
    assert printed == ["the reference runs", f"{tmp_path / 'monetrun/__init__.py'} {values}"]
    files = ["hardsigmoid", "kernels", "implementations", "registry"]
    tests = "hardsigmoid or has_a_sample or kernel_file_is_compiled or (gives and elementwise) or registers_generators"
    words = ["-m", "pytest", "-n0", "-rA", "-k", tests, *(f"tests/ops/test_{name}.py" for name in files)]
    report = run_python(*words, path=(tmp_path,), cwd=tmp_path)
    passed = re.findall(r"^PASSED \S*test_(\w+)\.py::(\w+)", report, re.MULTILINE)
    assert {file for file, _ in passed} == set(files)
    assert {name for file, name in passed if file == "kernels"} == {
        "test_opcheck",
        "test_every_operator_has_a_sample",
        "test_every_kernel_file_is_compiled",
    }
    own = [name for file, name in passed if file == "hardsigmoid"]
    assert {name: own.count(name) for name in own} == {
        "test_it_is_bitwise_identical_to_atens": 2 * 5 * 3 * 4,
        "test_at_the_bounds_the_gradient_is_0": 2,
        "test_it_reads_a_bit_per_element_instead_of_the_input": 1,
    }
    assert "SKIPPED" not in report


@pytest.fixture
def installed(package, monkeypatch):
    """The page's package can be imported in this process."""
    monkeypatch.syspath_prepend(str(package))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_walk_3_drops_the_largest_saved_tensor_and_no_more_than_needed():
    forward = ("f: > 0", "f: 0 > 1", "f: 1 > 2", "f: 2 > 3")
    graph, costs = make("8 64 16 8 1 1 1 1", *forward, "b: 3 > 4", "b: 4 2 > 5", "b: 5 1 > 6", "b: 6 0 > 7")
    assert simulate(graph, costs, plain_schedule(graph)).peak_bytes == 97
    drop_largest = solver("drop-largest")
    plain = drop_largest(graph, costs, 97, Options())
    assert (plain.schedule, plain.status) == (plain_schedule(graph), "feasible")
    for budget_bytes in (96, 88):
        schedule = drop_largest(graph, costs, budget_bytes, Options()).schedule
        assert schedule.forward == plain_schedule(graph).forward
        assert schedule.backward == (Step(4), Step(5), Step(1), Step(6), Step(7))
    assert drop_largest(graph, costs, 87, Options()).status == "unknown"
    assert drop_largest(graph, costs, 96, Options(recompute=False)).schedule is None


@pytest.mark.usefixtures("installed")
def test_walk_3_plans_a_training_step():
    record = graph_record(*conv_norm_relu(6))
    base = planner.baseline(record)
    budget_bytes = base.plain.peak_bytes * 9 // 10
    plan = planner.plan_step(record, budget_bytes, "drop-largest", Options(), base)
    assert (plan.solver, plan.status) == ("drop-largest", "feasible")
    assert plan.planned_peak_bytes <= budget_bytes
    solution = solver("drop-largest")(record.graphs[0], record.costs[0], budget_bytes, Options())
    assert plan.graphs[0].schedule == solution.schedule != base.frugal_schedules[0]
    assert plan.bound == pytest.approx(solution.bound_seconds / base.plain.seconds - 1)


@pytest.mark.nightly
def test_walk_3_has_a_test_of_its_own_that_passes(package, tmp_path):
    write(tmp_path, "tests/solve/test_drop_largest.py")
    options = ["-n0", "-rA", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    path = (package, ROOT, ROOT / "tests")
    report = run_python("-m", "pytest", *options, str(tmp_path / "tests/solve/test_drop_largest.py"), path=path)
    assert re.findall(r"^PASSED \S*::(\w+)", report, re.MULTILINE) == ["test_a_schedule_is_within_the_budget"]


def test_walk_3_is_listed_by_help_which_imports_no_solver(package):
    code = "import sys; from monetrun.commands.main import main; main(['--help'])\n"
    code += "print([m for m in ('torch', 'cvxpy', 'numpy', 'scipy', 'mine') if m in sys.modules])"
    *text, imported = run_python("-c", code, path=(package, ROOT)).splitlines()
    assert "drop-largest: from mine.drop_largest:ALGORITHM" in " ".join(" ".join(text).split())
    assert f"{{{','.join([*ALGORITHMS, 'drop-largest'])}}}" in "".join(" ".join(text).split())
    assert imported == "[]"


@pytest.mark.usefixtures("installed")
def test_walk_3_is_listed_after_monetruns_own():
    assert tuple(descriptions()) == (*ALGORITHMS, "drop-largest")
