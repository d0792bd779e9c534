"""What a launch does where its plan cannot be made."""

from dataclasses import replace

import pytest
import torch

from monetrun.commands.main import main
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime, ScheduleError, UsageError
from monetrun.core.plain import PlainPeaks
from monetrun.core.plain_step import plain_step
from monetrun.core.step import replay
from monetrun.launcher import job as jobs
from monetrun.launcher import keys, memory, plain
from monetrun.launcher.job import open_job
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.ranks import Ranks, find_ranks
from monetrun.launcher.trial import Trial
from monetrun.machine.device import MemoryInfo
from monetrun.planning import planner
from monetrun.runtime.settings import PLAIN, RUN, Settings
from support.paths import SCRIPTS
from support.step_records import chain_record

TINY = str(SCRIPTS / "tiny.py")

pytestmark = pytest.mark.usefixtures("plain_surroundings")


@pytest.fixture
def fails_with(monkeypatch, tmp_path):
    """Have planning raise this error, for a record that is known."""
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jobs.Job, "_find_record", lambda self, **_: setattr(self, "record", chain_record(10)))

    def have(error):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(planner, "plan_step", fail)

    return have


@pytest.mark.parametrize("error", [ScheduleError("operator 1 is missing"), KeyError("odd")])
def test_a_fault_of_monetruns_own_in_planning_has_the_models_run_as_they_are(fails_with, error):
    fails_with(error)
    with open_job(launch_parser().parse_launch(["--budget", "0.7x", TINY])[0]) as job:
        decision = job.decide()
    assert (decision.mode, decision.plan) == (RUN, None)
    assert decision.as_is.startswith("models run without a plan, their budget is not enforced")
    assert str(error) in decision.as_is


def test_a_refusal_and_a_fault_under_strict_end_the_launch(fails_with, capsys):
    fails_with(InfeasibleBudget("too small"))
    assert main(["--budget", "0.7x", TINY]) == 80
    fails_with(ScheduleError("operator 1 is missing"))
    assert main(["--budget", "0.7x", "--strict", TINY]) == 70
    assert "operator 1 is missing" in capsys.readouterr().err


MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(("budget", "cap"), [("1.0x", 0), ("100MiB", 100 * MIB)])
@pytest.mark.parametrize("error", [InfeasibleBudget("too small"), NoPlanInTime("too slow")])
def test_a_budget_that_the_plain_run_keeps_is_not_refused(budget, cap, error, fails_with, capsys):
    """The plan of a script that keeps what is saved on the host took 1.7 times what its plain run takes."""
    fails_with(error)
    with open_job(launch_parser().parse_launch(["--budget", budget, TINY])[0]) as job:
        job._find_plain = lambda look: PlainPeaks(90 * MIB, 100 * MIB, 0, 2)
        decision = job.decide()
        variables = job.follow(decision)
    assert (decision.mode, decision.budget_bytes) == (PLAIN, cap)
    assert variables["MONETRUN_PLAN_FILE"] == ""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"monetrun: warning: {error.message}; models run as they are: the plain run's first steps took"
    )


@pytest.mark.parametrize(("budget", "words"), [("0.99x", []), ("99MiB", []), ("1.0x", ["--strict"])])
def test_a_smaller_one_is_and_so_is_each_under_strict(budget, words, fails_with):
    fails_with(InfeasibleBudget("too small"))
    with open_job(launch_parser().parse_launch(["--budget", budget, *words, TINY])[0]) as job:
        job._find_plain = lambda look: PlainPeaks(90 * MIB, 100 * MIB, 0, 2)
        with pytest.raises(InfeasibleBudget):
            job.decide()


@pytest.fixture
def free(monkeypatch):
    """Have a GPU on which so much is free."""

    def have(nbytes):
        monkeypatch.setattr(memory, "query", lambda *_: (MemoryInfo("cuda:0", "GPU-1", GIB, nbytes, "nvml"),))

    return have


def on_gpu(job, plain):
    """Have ``job`` be of one GPU, on which the plain run was measured, with 5 MiB beside torch's allocator."""
    job.ranks = Ranks("cuda", 1, 1)
    job._find_plain = lambda look: plain
    job._find_record = lambda **_: setattr(job, "record", replace(chain_record(10), device="cuda:0"))
    return job


LITTLE, MOST = (PlainPeaks((n - 10) * MIB, n * MIB, 0, 2, outside_bytes=5 * MIB) for n in (100, 300))


@pytest.mark.parametrize("words", [[], ["--budget=auto"]])
@pytest.mark.parametrize(
    ("free_mib", "peaks", "error", "said"),
    [
        (400, MOST, InfeasibleBudget("too small\n  at its peak: mm"), "too small;"),
        (400, MOST, NoPlanInTime("too slow"), "too slow"),
        (150, LITTLE, None, "150.0 MiB are free on the device"),
        (400, None, InfeasibleBudget("too small"), "too small"),
        (400, None, None, "400.0 MiB are free on the device"),
    ],
)
def test_what_auto_has_no_plan_for_runs_as_under_torchrun(
    words, free_mib, peaks, error, said, fails_with, free, monkeypatch, capsys
):
    fails_with(error or AssertionError("planned"))
    free(free_mib * MIB)
    if error and peaks is None:
        monkeypatch.setattr(memory, "CUDA_RESERVE_BYTES", 100 * MIB)
    with open_job(launch_parser().parse_launch([*words, TINY])[0]) as job:
        decision = on_gpu(job, peaks).decide()
        variables = job.follow(decision)
    assert (decision.mode, variables["MONETRUN_BUDGET_BYTES"]) == (PLAIN, "0")
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    took = f": the plain run's first steps took {peaks.reserved_bytes / MIB:.1f} MiB" if peaks else ""
    assert line.endswith(f"models run as they are, without a limit, as under torchrun{took}")


@pytest.mark.parametrize("words", [["--strict"], ["--budget=100%"], ["--budget=240MiB"]])
def test_a_budget_that_is_stated_and_auto_under_strict_are_hard(words, fails_with, free):
    fails_with(InfeasibleBudget("too small"))
    with open_job(launch_parser().parse_launch([*words, TINY])[0]) as job:
        free(400 * MIB)
        with pytest.raises(InfeasibleBudget):
            on_gpu(job, MOST).decide()
        free(150 * MIB)
        with pytest.raises(InfeasibleBudget if "240MiB" in words[0] else UsageError):
            on_gpu(job, MOST).decide()


def test_a_step_from_the_cache_that_no_plan_fits_is_recorded_again(monkeypatch, tmp_path):
    """The script may read its sizes from a file, or from what it imports."""
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    batches = [10, 400, 400]

    def run_trial(*args, **kwargs):
        return Trial(replace(chain_record(batches.pop(0)), torch_version=torch.__version__))

    monkeypatch.setattr(jobs, "run_trial", run_trial)
    words = ["--budget", "20000B", TINY]
    with open_job(launch_parser().parse_launch(words)[0]) as job:
        job.trial()
    with open_job(launch_parser().parse_launch(["--budget", "1000B", TINY])[0]) as job:
        with pytest.raises(InfeasibleBudget):
            job.planned()
        assert replay(*plain_step(job.record)).peak_bytes > 20_000
    assert batches == [400]
    with open_job(launch_parser().parse_launch(words)[0]) as job:
        assert replay(*plain_step(job.trial())).peak_bytes > 20_000  # it is kept


def test_a_steps_key_has_the_devices_that_are_there_and_none_for_a_modelled_device(monkeypatch):
    asked = []

    def query(kind, ranks):
        asked.append((kind, ranks))
        return (MemoryInfo("cuda:0", "GPU-1", GIB, GIB, "nvml"),) * ranks

    monkeypatch.setattr(keys, "query", query)
    measured, modelled = (
        launch_parser().parse_launch(["--budget", "0.7x", f"--cost-model={model}", TINY])[0]
        for model in ("measured", "roofline:h100")
    )
    eight = Ranks("cuda", 8, 16)  # where there are fewer
    assert keys.record_key(modelled, eight) != keys.record_key(measured, eight)
    assert asked == [("cuda", 8)]


def test_a_steps_key_has_the_variables_that_the_script_names_and_all_of_a_packages_files(monkeypatch, tmp_path):
    script, package = tmp_path / "train.py", tmp_path / "package"
    script.write_text('import os\nbatch = int(os.environ.get("BATCH", "8"))\n')
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    main_file = package / "__main__.py"
    main_file.write_text("batch = 8\n")
    monkeypatch.chdir(tmp_path)  # where ``python -m`` looks first
    (tmp_path / "bare").mkdir()
    bare_file = tmp_path / "bare" / "train.py"  # of a folder without an __init__.py
    bare_file.write_text("batch = 8\n")

    def key(*words):
        options = launch_parser().parse_launch(["--budget", "0.7x", *words])[0]
        return keys.record_key(options, find_ranks(options))

    of_script, of_module, of_bare, of_folder = (
        key(str(script)),
        key("-m", "package"),
        key("-m", "bare.train"),
        key("bare"),
    )
    monkeypatch.setenv("OTHER", "16")
    assert (key(str(script)), key("-m", "package")) == (of_script, of_module)
    monkeypatch.setenv("BATCH", "16")
    main_file.write_text("batch = 16\n")
    assert key(str(script)) != of_script
    assert key("-m", "package") != of_module
    bare_file.write_text("batch = 16\n")
    assert key("-m", "bare.train") != of_bare
    (tmp_path / "bare" / "__main__.py").write_text("batch = 16\n")
    assert key("bare") != of_folder


def test_what_was_found_for_another_number_of_nodes_is_not_used():
    with open_job(launch_parser().parse_launch(["--nnodes=1:2", "--nproc-per-node=3", TINY])[0]) as job:
        before, job.record = job.record_key, chain_record(10)
        job.met(1)
        assert (job.record_key, job.record is None, job.ranks.world_size) == (before, False, 3)
        job.met(2)
        assert (job.record_key != before, job.record, job.ranks.world_size) == (True, None, 6)


def test_peaks_in_a_cache_that_cannot_be_written_end_no_launch(monkeypatch, tmp_path):
    class ReadOnly:
        def get(self, *_):
            return None

        def remove(self, kind, key):
            raise PermissionError(f"{kind} {key}")

    monkeypatch.setattr(plain, "measure_plain_run", lambda *_: None)
    options = launch_parser().parse_launch(["--budget", "0.7x", TINY])[0]
    place = (Settings(), tmp_path, None, ReadOnly())
    assert plain.find_plain(options, Ranks("cuda", 1, 1), "key", *place, look=False) == (None, "key")
