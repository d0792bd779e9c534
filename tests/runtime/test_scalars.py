"""Scalars of training steps for TensorBoard: what is written, how often, and that nothing ends training."""

import importlib.util
import json
import sys
import types
import warnings

import pytest

from monetrun.capture.peaks import Peaks
from monetrun.runtime import scalars
from monetrun.runtime.scalars import StepScalars, planned_values
from monetrun.runtime.settings import PROBE, Settings
from monetrun.runtime.step_meter import StepMeter
from support import launcher
from support.paths import SCRIPTS
from support.step_records import chain_record


class Writer:
    """As torch's ``SummaryWriter``; warns, as packages do."""

    def __init__(self, folder, flush_secs):
        warnings.warn("old", DeprecationWarning, stacklevel=2)
        self.folder, self.points, self.closed, self.fails = folder, [], False, None
        Writer.made.append(self)

    def add_scalar(self, tag, value, step, new_style, double_precision):
        if self.fails:
            raise self.fails
        self.points.append((tag, value, step))

    def close(self):
        self.closed = True

    def of(self, step):
        return {tag.removeprefix("monetrun/"): value for tag, value, at in self.points if at == step}


@pytest.fixture
def clock(monkeypatch):
    """What ``time.perf_counter`` gives, as a list of one number; writers are ``Writer.made``."""
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter, Writer.made = Writer, []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    now = [100.0]
    monkeypatch.setattr(scalars.time, "perf_counter", lambda: now[0])
    return now


def opened(values, told=None, **settings):
    warn = pytest.fail if told is None else told.append
    return StepScalars(Settings(tensorboard_folder="runs", **settings), warn, values)


def test_a_second_has_one_point_at_most_and_its_mean_step_time(clock):
    values = {"measured_peak_bytes": 0, "unknown": None}
    written = opened(lambda last: {**values, "measured_overhead": 0.1 if last else None}, rank=3)
    (writer,) = Writer.made
    assert writer.folder == "runs/rank3"
    for step in range(1, 28):
        clock[0] += 0.25
        values["measured_peak_bytes"] = 10 * step
        written.step_ended(step)
    assert sorted({at for _, _, at in writer.points}) == [1, 5, 9, 13, 17, 21, 25]
    assert writer.of(1) == {"measured_peak_bytes": 10}
    assert writer.of(9) == {"measured_peak_bytes": 90, "step_seconds": 0.25}
    written.close()
    assert writer.of(27) == {"measured_peak_bytes": 270, "measured_overhead": 0.1}
    assert writer.closed
    written.step_ended(28)
    assert writer.of(28) == {}


def test_values_are_read_only_for_a_point(clock):
    read = []
    written = opened(lambda last: read.append(last) or {})
    for step in (1, 2, 2, 3):
        written.step_ended(step)
    assert read == [False]
    written.close()
    assert read == [False, True]


def test_without_a_step_nothing_is_read(clock):
    opened(pytest.fail).close()
    assert Writer.made[0].closed


def test_nothing_is_written_without_a_folder_or_in_a_trial(clock):
    for settings in (Settings(), Settings(mode=PROBE, tensorboard_folder="runs")):
        written = StepScalars(settings, pytest.fail, pytest.fail)
        written.step_ended(1)
        written.close()
    assert Writer.made == []


def test_a_failure_is_told_once_and_training_goes_on(clock):
    told = []
    written = opened(lambda last: {"budget_bytes": 1}, told)
    Writer.made[0].fails = OSError("No space left on device")
    for step in (1, 2):
        clock[0] += 5
        written.step_ended(step)
    written.close()
    assert told == ["no more scalars are written for TensorBoard: OSError: No space left on device"]


def test_without_the_package_training_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    told = []
    opened(pytest.fail, told).step_ended(1)
    assert len(told) == 1
    assert "ModuleNotFoundError" in told[0]


def test_a_peak_between_two_points_is_in_the_second_one():
    class Meter:
        exact, peak = True, 0

        def peaks(self):
            return Peaks(self.peak, 2 * self.peak)

        def reset_peak(self):
            self.peak = 0

    meter = Meter()
    steps = StepMeter(meter)
    plan = planner_plan()
    for peak in (50, 90, 70):
        steps.forward_begins()
        meter.peak = peak
        steps.optimizer_ended("SGD", 0)
    found = planned_values(plan, steps, "cuda", exact=True)
    assert (found["measured_peak_bytes"], found["measured_reserved_bytes"], found["allocation_retries"]) == (90, 180, 0)
    assert (found["budget_bytes"], found["planned_peak_bytes"]) == (plan.budget_bytes, plan.planned_peak_bytes)
    assert planned_values(plan, steps, "cuda", exact=True)["measured_peak_bytes"] is None
    assert "measured_reserved_bytes" not in planned_values(plan, steps, "cpu", exact=True)


def planner_plan():
    from monetrun.planning import planner

    record = chain_record(8)
    return planner.plan_step(record, planner.baseline(record).plain.peak_bytes, "greedy")


@pytest.mark.usefixtures("plain_surroundings")
def test_a_launch_without_the_package_ends_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec("tensorboard") is not None:
        pytest.skip("tensorboard is installed")
    done = launcher.run(launcher.MONETRUN, "--tensorboard", "runs", SCRIPTS / "tiny.py", "out", expect=2)
    assert "--tensorboard runs needs tensorboard" in done.stderr
    assert "pip install 'monetrun[report]'" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("plain_surroundings")
def test_a_launch_writes_what_tensorboard_reads(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    done = launcher.run(
        launcher.MONETRUN, "--budget", "0.8x", "--json", "--tensorboard", "runs", SCRIPTS / "tiny.py", "out"
    )
    read = events.EventAccumulator(str(tmp_path / "runs" / "rank0"), size_guidance={"tensors": 0}).Reload()
    found = {
        tag.removeprefix("monetrun/"): [(e.step, float(e.tensor_proto.double_val[0])) for e in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }
    report = json.loads(done.stdout)
    assert found["budget_bytes"][-1] == (report["steps"], report["budget_bytes"])
    assert found["planned_peak_bytes"][0][1] == report["planned_peak_bytes"]
    assert max(value for _, value in found["measured_peak_bytes"]) == report["measured_peak_bytes"]
    assert "measured_reserved_bytes" not in found
