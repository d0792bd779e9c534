"""What is told where memory has run out: how much was needed, who held what, and the budget that would do."""

import dataclasses
import json

import pytest
import torch

from monetrun.capture import cpu_allocator
from monetrun.capture.refusal import is_refusal
from monetrun.core import codec
from monetrun.core.errors import BudgetExceeded
from monetrun.core.step import replay
from monetrun.launcher import report, restart
from monetrun.planning import planner
from monetrun.planning.summary import rounding_note
from monetrun.runtime import out_of_memory, traceback_file
from monetrun.runtime.settings import Settings
from monetrun.runtime.traceback_file import ERROR_FILE
from support.step_records import chain_record


def a_plan():
    record = chain_record(1000, widths=(40,) * 30)
    base = planner.baseline(record)
    return record, planner.plan_step(record, base.plain.peak_bytes, "greedy", known=base)


def test_the_least_budget_is_read_from_what_the_allocators_say():
    _, plan = a_plan()
    assert cpu_allocator.install()
    held = cpu_allocator.allocated_bytes()
    cpu_allocator.set_limit(held + 1000)
    try:
        with pytest.raises(torch.OutOfMemoryError) as refused:
            torch.empty(4096, dtype=torch.uint8)
    finally:
        cpu_allocator.set_limit(None)
    assert out_of_memory.needed_bytes(str(refused.value), plan) == plan.budget_bytes + 3096
    on_cuda = "CUDA out of memory. Tried to allocate 2.50 MiB. GPU 0 has a total capacity of 79.11 GiB of which"
    assert out_of_memory.needed_bytes(on_cuda, plan) == plan.budget_bytes + 2621440
    assert out_of_memory.needed_bytes("out of memory", plan) == 0


def written(folder, **found):
    (folder / "rank0.json").write_text(json.dumps({"rank": 0, "exact": True, "steps": 0, "intervals": [], **found}))


def test_the_closing_line_names_amounts_by_kind_and_a_budget(tmp_path):
    _, plan = a_plan()
    needed = plan.budget_bytes + (8 << 10)
    short = {"needed_bytes": needed, "held": {"parameters": 2048, "gradients": 0, "other tensors": 4096}}
    written(tmp_path, plan=codec.to_plain(plan), short=short)
    text = "\n".join(report.outcome_lines(report.read_outcome(tmp_path), BudgetExceeded.exit_code))
    assert "needed at least" in text
    assert "held: parameters 2.0 KiB, other tensors 4.0 KiB" in text
    budget = int(text.split("--budget ")[1].removesuffix("KiB")) << 10
    assert needed <= budget < needed + 1024


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
def test_a_restart_leaves_free_what_was_lacking_and_a_second_one_much_more(tmp_path, steps):
    record, plan = a_plan()
    lacking = plan.budget_bytes // 50
    plan_file, record_file = tmp_path / "plan.json", tmp_path / "record.json"
    plan_file.write_text(codec.dumps(plan))
    record_file.write_text(codec.dumps(record))
    settings = Settings(plan_file=str(plan_file), record_file=str(record_file), report_folder=str(tmp_path))
    options = dataclasses.make_dataclass("Options", ["algorithm"])("greedy")
    options.solver_options = lambda: Settings(solver_seconds=1.0).solver_options()
    peaks = []
    for restarts in range(2):
        short = {"needed_bytes": plan.budget_bytes + lacking, "held": {"weights": 1}}
        written(tmp_path, steps=steps, plan=codec.to_plain(plan), short=short)
        line = restart.tighter_plan(settings.to_environment(), BudgetExceeded.exit_code, restarts, options)
        assert f"in training step {steps + 1}: starting again" in line
        made = codec.loads(type(plan), plan_file.read_text())
        assert line.endswith("free" + rounding_note(made, codec.loads(type(record), record_file.read_text())))
        peaks.append(replay(record, [g.schedule for g in made.graphs]).peak_bytes)
    assert peaks[0] <= plan.budget_bytes - lacking - plan.budget_bytes // 100 + 1
    assert peaks[0] >= plan.budget_bytes * 0.85  # 8% of the budget and more were given up without need
    assert peaks[1] <= peaks[0] - plan.budget_bytes * 0.1


def test_a_convolution_that_no_engine_computes_within_the_limit_is_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    codes, refused = [], []
    for text in ("GET was unable to find an engine to execute this computation", "sizes do not match"):
        traceback_file.write(RuntimeError(text), None)
        codes.append(json.loads((tmp_path / "error.json").read_text())["message"].get("errorCode"))
        refused.append(is_refusal(RuntimeError(text)))
    assert codes == [84, None]
    assert refused == [True, False]


def test_once_steps_have_settled_nothing_is_trained_again(tmp_path):
    record, plan = a_plan()
    (tmp_path / "plan.json").write_text(codec.dumps(plan))
    (tmp_path / "record.json").write_text(codec.dumps(record))
    files = {"plan_file": str(tmp_path / "plan.json"), "record_file": str(tmp_path / "record.json")}
    settings = Settings(**files, report_folder=str(tmp_path))
    written(
        tmp_path,
        steps=3,
        plan=codec.to_plain(plan),
        short={"needed_bytes": plan.budget_bytes + 9, "held": {"weights": 1}},
    )
    assert restart.tighter_plan(settings.to_environment(), BudgetExceeded.exit_code, 0, None) == ""
