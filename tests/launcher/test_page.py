"""The page of ``monetrun explain --html`` and of ``--report``: what it is made from."""

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from monetrun import __version__
from monetrun.commands import run
from monetrun.core import codec
from monetrun.core.errors import UsageError
from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.options import Options
from monetrun.core.plan import Pool, plain_schedule
from monetrun.launcher.page import check_folder, check_log_folder, page_of, write_report
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.rank_figures import RankFigures
from monetrun.launcher.report import Outcome
from monetrun.machine.named_file import replace_file
from monetrun.planning import planner
from monetrun.planning.explain import PARAMETERS, SCRIPT, STATE, WORKSPACE, explain
from monetrun.planning.intervals import Interval, MeasuredStep, RankIntervals, as_plain
from monetrun.planning.moments import moments
from support.paths import SCRIPTS
from support.step_records import chain_record

RECORD = chain_record(64)
MEASURED = MeasuredStep((RankIntervals(0, (Interval(FORWARD, "Net", 10, 2000, 10, 1990),)),))


@pytest.fixture(scope="module")
def plan():
    base = planner.baseline(RECORD)
    budget = int(base.frugal.peak_bytes + 0.3 * (base.plain.peak_bytes - base.frugal.peak_bytes))
    return planner.plan_step(RECORD, budget, "greedy", Options(seconds=1.0), base)


def test_each_moment_of_a_profile_has_its_event_operator_and_way(plan):
    found = explain(plan, RECORD)
    for profile, schedules in (
        (found.plain_profile, [plain_schedule(g) for g in RECORD.graphs]),
        (found.planned_profile, [g.schedule for g in plan.graphs]),
    ):
        named = moments(RECORD, schedules, profile)
        assert tuple(m.nbytes for m in named) == profile
        assert [m.part for m in named] == [RECORD.events[m.event].kind for m in named]
        (schedule,), (graph,) = schedules, RECORD.graphs
        for part, steps in ((FORWARD, schedule.forward), (BACKWARD, schedule.backward)):
            names = [f"{m.module}.{m.what}" for m in named if m.part == part]
            assert names == [graph.operators[s.operator].name for s in steps]
        again = sum(graph.operators[s.operator].phase == FORWARD for s in schedule.backward)
        assert sum("again" in m.how for m in named) == again
    assert again > 0


def test_the_largest_tensors_are_alive_at_the_peak_and_no_larger_than_their_module_holds(plan):
    found = explain(plan, RECORD)
    sizes = [tensor.nbytes for tensor in found.largest]
    assert sizes == sorted(sizes, reverse=True)
    held = {row.module: row.nbytes for row in found.alive}
    kept = [t for t in found.largest if t.module in held]
    assert kept
    assert all(tensor.nbytes <= held[tensor.module] for tensor in kept)
    others = {k: v for k, v in found.at_peak.items() if k in (PARAMETERS, STATE, SCRIPT, WORKSPACE)}
    assert len(sizes) < 30  # all of them, so that they add up
    assert sum(sizes) == plan.planned_peak_bytes - sum(others.values())


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL).group(1))


def test_the_page_carries_its_data_and_no_name_can_end_it(plan):
    title = "</script><b>plan & 1"
    page = page_of(plan, RECORD, MEASURED, title)
    data = data_of(page)
    assert data["title"] == title
    assert data["explanation"]["planned_peak_bytes"] == plan.planned_peak_bytes
    assert data["intervals"][0]["intervals"][0]["difference_bytes"] == -10
    for side in ("plain", "planned"):
        spans = data[side]["spans"]
        assert len(spans) == len(data["parts"]) == len(data["cuts"]) - 1 == len(RECORD.events)
        assert spans[-1][1] == len(data[side]["nbytes"])
        assert [a for a, _ in spans[1:]] == [b for _, b in spans[:-1]]
    assert data["cuts"][0] == 0
    assert data["cuts"][-1] == pytest.approx(1)
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)", page), "it needs no network"


def test_on_a_device_the_page_has_reserved_and_allocated_peaks(plan):
    on_device = replace(plan, pool=Pool(9 << 20, 2 << 20, 6 << 20))
    found = data_of(page_of(on_device, RECORD, None, "p"))
    shown = {key: found["explanation"][key] for key in ("plain_reserved_bytes", "planned_reserved_bytes")}
    assert (found["reserved"], shown) == (True, {"plain_reserved_bytes": 9 << 20, "planned_reserved_bytes": 8 << 20})
    assert found["explanation"]["planned_peak_bytes"] == plan.planned_peak_bytes
    assert not data_of(page_of(plan, RECORD, None, "p"))["reserved"]


def test_the_page_names_a_slow_rank_and_what_was_warned_of(tmp_path, plan):
    options, _ = launch_parser().parse_launch(["--report", str(tmp_path), "train.py"])
    ranks = RankFigures(0, 2000, 1990, 0.5, 0.1), RankFigures(1, 2000, 1980, 0.75, 0.1)
    outcome = Outcome(plan, 1990, None, None, 0, 0.1, 30, ("a warning",), MEASURED, ranks=ranks)
    write_report(options, outcome, replace(RECORD, unlike_eager=("Net: 1 of 1 results differ",)), node=0)
    notes = data_of((tmp_path / "report.html").read_text())["notes"]
    assert "rank 1 is slow: its calls take 1.50 times as long as the fastest rank's" in notes[0]
    assert notes[1:] == ["Net: 1 of 1 results differ", "a warning"]


def test_a_report_folder_is_tried_before_training_and_filled_after_it(tmp_path, plan):
    options, _ = launch_parser().parse_launch(["--report", str(tmp_path / "a" / "b"), "train.py", "--lr", "1"])
    check_folder(options.report_folder)
    figures = RankFigures(0, 2000, 1990, 0.5, 0.1)
    outcome = Outcome(plan, 1990, None, None, 0, 0.1, 3, (), MEASURED, ranks=(figures,))
    write_report(options, outcome, RECORD, node=0)
    folder = tmp_path / "a" / "b"
    found = json.loads((folder / "report.json").read_text())
    assert found["command"] == ["train.py", "--lr", "1"]
    assert found["environment"].items() >= {"monetrun": __version__, "torch": version("torch")}.items()
    shown = data_of((folder / "report.html").read_text())
    assert dict(shown["surroundings"]) == found["environment"]
    assert found["measured_peak_bytes"] == 1990
    assert found["intervals"] == as_plain(MEASURED)
    assert {key: found[key] for key in ("ranks", "steps")} == {"ranks": [codec.to_plain(figures)], "steps": 3}
    assert data_of((folder / "report.html").read_text())["title"] == "train.py --lr 1"
    write_report(options, outcome, None, node=0)  # planned in the worker: the launcher does not know the step
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    several, _ = launch_parser().parse_launch(["--report", str(folder), "--nnodes=1:2", "train.py"])
    for node in (0, 1):  # which may share the folder
        write_report(several, outcome, RECORD, node)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["report.json", *(f"report.node{k}.{end}" for k in (0, 1) for end in ("html", "json"))]
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--report .*file: "):
        check_folder(str(tmp_path / "file"))


def test_a_log_folder_is_tried_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "open_job", lambda options: pytest.fail("it plans"))
    (tmp_path / "file").write_text("")
    script = str(SCRIPTS / "tiny.py")
    options, _ = launch_parser().parse_launch(["--log-dir", str(tmp_path / "file"), script])
    with pytest.raises(UsageError, match=r"--log-dir .*file: "):
        run.run_launch(options)
    for words in (
        ["--log-dir", str(tmp_path / "new")],
        ["--log-dir", "/dev/null"],
        ["--logs-specs=own", "--log-dir=x"],
    ):
        check_log_folder(launch_parser().parse_launch([*words, script])[0])
    assert (tmp_path / "new").is_dir()
    assert not Path("x").exists()


def test_files_of_several_machines_are_replaced_without_meeting(tmp_path, monkeypatch):
    """Processes in containers may have the same number."""
    parts = []
    replaced = Path.replace
    monkeypatch.setattr(Path, "replace", lambda part, file: (parts.append(part), replaced(part, file)))
    for text in ("one", "two"):
        replace_file(tmp_path / "report.json", text)
    assert parts[0] != parts[1]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["two"]
