"""`monetrun check`: a planned step beside the plain one and one in float64, and what is allowed between them."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from monetrun.commands import check as command
from monetrun.commands import main as cli
from monetrun.core.errors import UsageError
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.launcher.check import check_beginnings
from monetrun.launcher.differences import difference
from monetrun.planning.check import (
    BUFFER,
    FACTOR,
    GRADIENT,
    CheckedRun,
    CheckReport,
    Difference,
    OperatorSeconds,
    OperatorTime,
    is_another_step,
    judged,
    operator_times,
)
from monetrun.runtime.float64 import SameRandomNumbers
from monetrun.runtime.tensor_distance import same_bits
from support.paths import ROOT, python_path
from support.step_records import chain_record

SCRIPT = """
import numpy
import torch
from torch import nn

blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
net = nn.Sequential(*blocks, nn.BatchNorm1d(64), nn.Linear(64, 64))
optimizer = torch.optim.Adam(net.parameters())
for _ in range(6):
    optimizer.zero_grad()
    net(torch.tensor(numpy.random.normal(size=(512, 64)), dtype=torch.float32)).square().mean().backward()
    optimizer.step()
with open("trained", "a") as file:
    file.write("x")
"""
WRONG = """
import torch
from monetrun.ops.registry import Alternative, Call, implementation

@implementation(torch.ops.aten.gelu_backward.default)
def _half(node, joint):
    yield Alternative("output:half", Call(torch.ops.aten.mul.Scalar, (node.args[0], 0.5)))
"""
ONE = Difference(GRADIENT, "weight", False, 1e-6, 1e-6, 100, 1.0, 1e-7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A script, and an installed package whose implementation of an operator is wrong, and called exact."""
    made = tmp_path_factory.mktemp("check")
    (made / "train.py").write_text(SCRIPT)
    (made / "wrong.py").write_text(WRONG)
    information = made / "wrong-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[monetrun.implementations]\nwrong = wrong\n")
    return made


@pytest.fixture
def checked(folder, plain_surroundings, monkeypatch, capsys):
    """Runs ``monetrun check`` with these words; gives what it printed."""
    monkeypatch.setenv("MONETRUN_CACHE", str(folder / "cache"))  # shared: the same trial run serves all tests
    monkeypatch.setenv("PYTHONPATH", python_path(folder, ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(folder)

    def run(*words, expect=0):
        assert cli.main(["check", "--solver-seconds", "1", "--algorithm", "greedy", *words]) == expect
        assert not (folder / "trained").exists()
        return capsys.readouterr()

    return run


@pytest.mark.slow
def test_a_plan_that_recomputes_has_the_plain_steps_bits_and_is_as_far_from_float64(checked):
    out, err = checked("--json", "--implementations", "none", "--budget", "0.8x", "train.py")
    found = json.loads(out)
    assert (found["passed"], found["problems"], found["not_bitwise"], found["no_float64"]) == (True, [], "", "")
    kinds = [(d["kind"], d["name"]) for d in found["differences"]]
    assert kinds[:3] == [("loss", "1"), ("gradient", "0.0.weight"), ("gradient", "0.0.bias")]
    assert kinds[-1] == ("buffer", "3.num_batches_tracked")
    assert len(kinds) == 1 + 10 + 3
    same = [(d["bitwise"], d["max_abs"], d["relative"], d["within"]) for d in found["differences"]]
    assert set(same) == {(True, 0.0, 0.0, True)}
    floating = [d for d in found["differences"] if d["epsilon"]]
    assert all(d["plain_float64"] == d["planned_float64"] > 0 for d in floating)
    assert all(d["plain_float64"] < 1e-4 * d["norm"] for d in floating if d["norm"] > 1e-3)
    assert sum(d["norm"] > 1e-3 for d in floating) > 9
    assert found["planned_peak_bytes"] <= found["budget_bytes"]
    assert abs(found["measured_peak_bytes"] / found["planned_peak_bytes"] - 1) < 0.02
    assert found["steps"] == 5
    assert {o["phase"] for o in found["operators"]} == {"forward", "backward"}
    assert all(o["measured_seconds"] > 0 for o in found["operators"])
    ran = {phase: {o["name"] for o in found["operators"] if o["phase"] == phase} for phase in ("forward", "backward")}
    assert ran["forward"] & ran["backward"]  # some run again
    assert "planned step" in err


def test_a_wrong_implementation_that_is_called_exact_is_found(checked):
    words = ("--implementations", "output", "--no-recompute", "--budget", "0.85x", "--no-float64", "train.py")
    out, err = checked(*words, expect=86)
    lines = out.splitlines()
    assert lines[0] == "monetrun check  train.py  FAILED"
    # the last two layers' gradients, the loss and the buffers come before the first wrong value, or without it
    assert lines[2].startswith("  8 of 14 values are bitwise those of the plain step; the plan promises the plain step")
    too_much = [line.split()[:2] for line in lines if line.endswith("too much")]
    assert sorted(too_much) == [["gradient", f"{k}.0.{name}"] for k in range(3) for name in ("bias", "weight")]
    at = next(k for k, line in enumerate(lines) if line.lstrip().startswith("farthest from plan"))
    head, *rows = lines[at:]
    assert len(rows) == 10
    column = head.index("pass")  # names of operators may have blanks
    assert {row[column:].split()[0] for row in rows} <= {"forward", "backward"}  # which ones depends on the load
    assert "not compared with float64: --no-float64 was given" in out
    assert "values of the planned step are not the plain step's, most of all gradient 0." in err
    assert "once more" not in err  # a second plain run would not explain it


def test_runs_that_begin_differently_cannot_be_compared():
    one = CheckedRun("w", "i", "r", 1)
    check_beginnings("train.py", one, replace(one, steps=5))
    with pytest.raises(
        UsageError, match=r"two runs of train\.py begin with different inputs, random state: their steps"
    ):
        check_beginnings("train.py", one, replace(one, inputs="j", random="s"))


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (("--no-probe", "train.py"), "monetrun check needs its trial run\n  leave out --no-probe\n", 2),
        (("--report", ".", "train.py"), "trains nothing to report", 2),
        (("--tensorboard", ".", "train.py"), "trains nothing to report", 2),
        (("nothere.py",), "there is no script 'nothere.py'", 2),
        (("--plan", "nothere.json", "train.py"), "the plan nothere.json: No such file", 2),
        (("--no-float", "train.py"), "did you mean --no-float64?", 2),
        (("--budget", "much", "train.py"), "much", 2),
    ],
)
def test_bad_input_ends_before_anything_runs(checked, words, message, code):
    out, err = checked(*words, expect=code)
    assert out == ""
    assert message in err
    assert "trial run up to" not in err


# ---- what is allowed


def test_exact_plans_allow_no_difference_unless_the_plain_step_does_not_repeat_itself():
    near = replace(ONE, planned_float64=2e-7, plain_float64=1e-7)
    assert not judged([near], bitwise=True)[0].within
    assert judged([replace(near, bitwise=True)], bitwise=True)[0].within
    assert judged([replace(near, repeats=False)], bitwise=True)[0].within


def test_rounding_may_lead_a_stated_factor_farther_from_float64_than_the_plain_step():
    def within(**changes):
        return judged([replace(ONE, plain_float64=1e-5, **changes)], bitwise=False)[0].within

    assert within(planned_float64=0.99 * FACTOR * 1e-5)
    assert not within(planned_float64=1.01 * FACTOR * 1e-5)
    assert not within(planned_float64=math.nan)


def test_where_the_plain_steps_gradients_jump_the_planned_ones_may_do_so_elsewhere():
    jumped = replace(ONE, norm=3.0, planned_float64=0.0, plain_float64=0.5)
    other = replace(ONE, name="other", norm=4.0, plain_float64=1e-6)
    assert judged([jumped, replace(other, planned_float64=3.9)], bitwise=False)[1].within  # 10 x 0.5 / 5 of its norm
    assert not judged([jumped, replace(other, planned_float64=4.1)], bitwise=False)[1].within


def test_a_gradient_of_rounding_alone_is_measured_by_the_size_of_the_others():
    large = replace(ONE, elements=10_000, norm=100.0, planned_float64=0.0, plain_float64=0.0)
    zero = replace(ONE, name="bias", elements=100, norm=1e-9, planned_float64=9e-6, plain_float64=1e-9)
    assert judged([large, zero], bitwise=False)[1].within  # its size is 10: as 100 elements of 1
    assert not judged([zero], bitwise=False)[0].within
    assert not judged([replace(large, kind=BUFFER), zero], bitwise=False)[1].within


def test_of_gradients_that_are_0_but_for_rounding_a_relative_difference_is_said_to_tell_little():
    zero = replace(ONE, name="bias", distance=2e-9, norm=1e-9, planned_float64=2e-9, plain_float64=1e-9, allowed=1e-8)
    of_note = replace(ONE, planned_float64=1e-7, plain_float64=1e-7, allowed=1e-6)
    out = io.StringIO()
    report = CheckReport(2 << 20, 1 << 20, 1 << 20, None, None, 5, "", "rounding", (zero, of_note), (), ())
    command.show(report, "t.py", Console(file=out, width=200))
    assert "  of 1 of them the plain value is mostly rounding, too" in out.getvalue()
    out = io.StringIO()
    too_much = replace(report, differences=(replace(zero, allowed=1e-12), of_note))
    command.show(too_much, "t.py", Console(file=out, width=200))
    assert "mostly rounding" not in out.getvalue()


def test_without_float64_the_root_of_epsilon_is_allowed():
    assert judged([replace(ONE, distance=3.1e-4)], bitwise=False)[0].within
    assert not judged([replace(ONE, distance=3.2e-4)], bitwise=False)[0].within


@pytest.mark.parametrize("odd", [math.inf, math.nan])
@pytest.mark.parametrize("float64", [False, True])
def test_what_is_not_finite_needs_the_plain_steps_bits_and_excuses_no_other_value(odd, float64):
    measured = {"planned_float64": 1.0, "plain_float64": 1e-7} if float64 else {}
    wrong = replace(ONE, name="wrong", distance=1.0, **measured)
    overflowed = replace(ONE, name="overflowed", norm=odd, **measured)
    assert [d.within for d in judged([overflowed, wrong], bitwise=False)] == [False, False]
    assert judged([replace(overflowed, bitwise=True)], bitwise=False)[0].within
    if float64:
        apart = replace(ONE, name="apart", planned_float64=odd, plain_float64=odd)
        assert [d.within for d in judged([apart, wrong], bitwise=False)] == [False, False]


def test_large_values_have_totals():
    large = replace(ONE, norm=1e200, distance=1e190, planned_float64=1e190, plain_float64=1e190)
    assert judged([large, large], bitwise=False)[0].within
    assert not is_another_step([large])


def test_a_gradient_that_overflows_does_not_hide_another_step():
    assert is_another_step([replace(ONE, norm=math.inf, plain_float64=math.inf), replace(ONE, plain_float64=0.9)])
    assert not is_another_step([replace(ONE, norm=math.inf, plain_float64=math.inf), replace(ONE, plain_float64=0.1)])


def test_a_float64_run_with_other_random_numbers_is_recognized():
    assert is_another_step([replace(ONE, plain_float64=0.9)])
    assert is_another_step([replace(ONE, plain_float64=math.nan)])
    assert not is_another_step([replace(ONE, plain_float64=0.1)])


def test_a_float64_run_draws_the_random_numbers_of_the_models_precision():
    def drawn(dtype):
        torch.manual_seed(0)
        x = torch.ones(8, dtype=dtype)
        numbers = (torch.rand(8), torch.randn(8, dtype=dtype), torch.rand_like(x), torch.empty_like(x).normal_())
        return *numbers, torch.nn.functional.dropout(x), torch.randint(9, (8,))

    expected = drawn(torch.float32)
    with SameRandomNumbers(torch.float32, torch.float32):
        given = drawn(torch.float64)
    assert [g.dtype for g in given] == [torch.float64] * 5 + [torch.int64]
    assert all(torch.equal(g, e.to(g.dtype)) for g, e in zip(given, expected, strict=True))
    assert torch.get_default_dtype() == torch.float32


def test_values_are_compared_bit_by_bit_and_by_their_norms():
    plain = torch.tensor([[3.0, 4.0], [0.0, math.inf]])
    planned = torch.tensor([[3.5, 4.0], [-0.0, math.inf]])
    found = difference(GRADIENT, "w", planned, plain[:, :], plain.double())
    assert (found.bitwise, found.max_abs, found.distance, found.elements) == (False, 0.5, 0.5, 4)
    assert (found.planned_float64, found.plain_float64) == (0.5, 0.0)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert same_bits(plain.t(), plain.t().contiguous())
    assert difference(GRADIENT, "w", torch.tensor([math.nan]), torch.tensor([1.0]), None).max_abs == math.inf
    assert difference(GRADIENT, "w", torch.zeros(2), torch.zeros(3), None).distance == math.inf
    assert difference(GRADIENT, "w", torch.tensor([3.0]), torch.tensor([4.0]), None).relative == 0.25
    sparse = torch.tensor([0.0, 2.0]).to_sparse()
    assert difference(GRADIENT, "w", sparse, torch.tensor([0.0, 2.5]), None).distance == 0.5


def test_operators_are_sorted_by_their_distance_from_the_planned_seconds():
    record = chain_record(8)
    schedule = plain_schedule(record.graphs[0])
    first, second = schedule.forward[:2]
    planned = [record.costs[0].seconds[s.operator][0] for s in (first, second)]
    again = Schedule(schedule.forward, (first, first, *schedule.backward))
    measured = [
        OperatorSeconds(0, "forward", first.operator, 0, planned[0] + 1),
        OperatorSeconds(0, "backward", first.operator, 0, 2 * planned[0] - 3),
        OperatorSeconds(0, "backward", second.operator, 0, 7.0),  # does not run there
        OperatorSeconds(0, "forward", second.operator, 0, planned[1] + 2),
    ]
    found = operator_times(record, [again], measured)
    assert [(t.phase, t.runs, round(t.difference, 6)) for t in found] == [
        ("backward", 2, -3),
        ("forward", 1, 2),
        ("forward", 1, 1),
    ]
    assert Step(first.operator) == first


def test_the_report_shows_ten_operators_and_the_values_that_differ():
    times = tuple(OperatorTime(f"layer{k}.mm_{k}", f"layer{k}", "forward", "default", 1, 1e-3, 2e-3) for k in range(12))
    wrong = replace(ONE, distance=0.5, max_abs=0.25)
    report = CheckReport(2 << 20, 1 << 20, 3 << 20, None, None, 5, "", "", (wrong,), ("gradient b",), times)
    out = io.StringIO()
    command.show(replace(report, differences=judged([wrong], bitwise=True)), "t.py", Console(file=out, width=160))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines[0] == "monetrun check t.py FAILED"
    assert lines[1] == "budget 2.0 MiB | planned peak 1.0 MiB | measured peak 3.0 MiB, in 5 steps"
    assert "gradient weight 0.25 0.5 - - 0 too much" in lines
    assert "mm_9 layer9 forward default 1.000 2.000" in lines
    assert "mm_10" not in out.getvalue()
    assert "operators: planned 12.000 ms, measured 24.000 ms in the planned step" in lines
    judged_report = replace(report, differences=judged([wrong], bitwise=True))
    assert [p.partition(",")[0] for p in judged_report.problems] == [
        "1 of 1 values of the planned step are not the plain step's",
        "only one of the two steps has gradient b",
        "the planned step takes 3.0 MiB of 2.0 MiB",
    ]
    endless = replace(wrong, allowed=math.inf, norm=math.nan, distance=math.inf)
    (row,) = json.loads(json.dumps(command.as_json(replace(report, differences=(endless,))), allow_nan=False))[
        "differences"
    ]
    assert (row["allowed"], row["norm"], row["relative"]) == (None, None, None)
    endless = replace(report, differences=judged([replace(wrong, max_abs=math.inf)], bitwise=True))
    assert json.loads(json.dumps(command.as_json(endless), allow_nan=False))["differences"][0]["max_abs"] is None
