"""What a rank leaves for the launcher."""

import contextlib
import json
import time

import pytest

from monetrun.launcher.report import read_outcome
from monetrun.runtime.reporter import WARNING, Reporter
from monetrun.runtime.settings import CHECK, PROBE, RUN, Settings


def test_a_process_that_is_killed_leaves_what_it_had_found_minutes_before(monkeypatch, tmp_path):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reporter = Reporter(Settings(mode=RUN, report_folder=str(tmp_path)))
    found = []
    for now[0], steps in [(1001.0, 3), (1119.0, 40), (1121.0, 41), (1130.0, 45), (1250.0, 80)]:
        reporter.write_now_and_then(lambda s=steps: {"steps": s})
        files = list(tmp_path.glob("rank0.json"))
        found.append(json.loads(files[0].read_text())["steps"] if files else None)
    assert found == [None, None, 41, 41, 80]


def test_a_report_is_left_once_the_first_steps_have_settled_and_says_that_it_is_not_the_last(tmp_path):
    reporter = Reporter(Settings(mode=RUN, report_folder=str(tmp_path)))
    found = []
    for steps in range(1, 6):
        reporter.write_now_and_then(lambda s=steps: {"steps": s}, settled=steps > 2)
        files = list(tmp_path.glob("rank0.json"))
        found.append(json.loads(files[0].read_text())["steps"] if files else None)
    assert found == [None, None, 3, 3, 3]
    assert read_outcome(tmp_path).interim
    reporter.write({"steps": 5})
    assert (read_outcome(tmp_path).interim, read_outcome(tmp_path).steps) == (False, 5)


def test_the_folder_of_a_job_may_be_cleaned_away_on_its_second_day(tmp_path, capsys):
    Reporter(Settings(mode=RUN, report_folder=str(tmp_path / "gone" / "reports"))).write({"steps": 3})
    assert json.loads((tmp_path / "gone" / "reports" / "rank0.json").read_text())["steps"] == 3
    assert capsys.readouterr().err == ""


def test_a_report_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    (tmp_path / "file").touch()
    reporter = Reporter(Settings(mode=RUN, report_folder=str(tmp_path / "file")))
    for steps in (1, 2):
        reporter.write({"steps": steps})
    assert capsys.readouterr().err.count("the report cannot be written") == 1


def test_a_reader_of_the_screen_that_is_gone_ends_nothing(monkeypatch):
    reporter = Reporter(Settings(mode=RUN))
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails, too
        monkeypatch.setattr("sys.stderr", full)
        reporter.tell("a line")
        reporter.note("another")
    assert full.closed
    reporter.warn("one after it was closed")
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"mode": RUN}, ["warning: w", "t", "n", "warning: n"]),
        ({"mode": RUN, "quiet": True}, ["warning: w", "warning: n"]),
        ({"mode": PROBE}, []),
        ({"mode": CHECK, "quiet": True}, []),
    ],
)
def test_quiet_hides_all_but_warnings_and_a_trial_run_these_too(settings, shown, capsys):
    reporter = Reporter(Settings(**settings))
    reporter.warn("w")
    reporter.tell("t")
    reporter.note("n")
    reporter.note("warning: n")
    assert capsys.readouterr().err.splitlines() == [f"monetrun: {line}" for line in shown]


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 0), (0.3, 2)])
def test_what_takes_long_is_told_when_it_does_and_how_long_it_took(seconds, told, monkeypatch, capsys):
    monkeypatch.setattr("monetrun.runtime.reporter._SLOW_SECONDS", 0.1)
    with Reporter(Settings(mode=RUN)).if_slow("compiling Net"):
        time.sleep(seconds)
        assert len(capsys.readouterr().err.splitlines()) == told // 2  # before it ends
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == told // 2
    assert all(line.startswith("monetrun: compiling Net: 0.") for line in lines)


def test_a_warning_about_this_ranks_memory_is_in_its_report(tmp_path, capsys):
    reporter = Reporter(Settings(mode=RUN, report_folder=str(tmp_path), rank=1, world_size=2))
    reporter.note("4.0 MiB more are held")
    reporter.note(f"{WARNING}not enforced")
    reporter.write({})
    assert json.loads((tmp_path / "rank1.json").read_text())["warnings"] == ["not enforced"]
    assert "monetrun (rank 1): warning: not enforced" in capsys.readouterr().err
