"""What a launch does where its plan cannot be made."""

import pytest

from monetrun.commands.main import main
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime, ScheduleError
from monetrun.core.plain import PlainPeaks
from monetrun.launcher import job as jobs
from monetrun.launcher.job import open_job
from monetrun.launcher.parser import launch_parser
from monetrun.planning import planner
from monetrun.runtime.settings import PLAIN, RUN
from support.paths import SCRIPTS
from support.step_records import chain_record

TINY = str(SCRIPTS / "tiny.py")

pytestmark = pytest.mark.usefixtures("plain_surroundings")


@pytest.fixture
def fails_with(monkeypatch, tmp_path):
    """Have planning raise this error, for a record that is known."""
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jobs.Job, "_find_record", lambda self, needed=True: setattr(self, "record", chain_record(10)))

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


MIB = 1 << 20


@pytest.mark.parametrize(("budget", "cap"), [("1.0x", 0), ("100MiB", 100 * MIB)])
@pytest.mark.parametrize("error", [InfeasibleBudget("too small"), NoPlanInTime("too slow")])
def test_a_budget_that_the_plain_run_keeps_is_not_refused(budget, cap, error, fails_with, capsys):
    """The plan of a script that keeps what is saved on the host took 1.7 times what its plain run takes."""
    fails_with(error)
    with open_job(launch_parser().parse_launch(["--budget", budget, TINY])[0]) as job:
        job._find_plain = lambda: PlainPeaks(90 * MIB, 100 * MIB, 0, 2)
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
        job._find_plain = lambda: PlainPeaks(90 * MIB, 100 * MIB, 0, 2)
        with pytest.raises(InfeasibleBudget):
            job.decide()
