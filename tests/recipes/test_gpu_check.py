"""recipes/gpu_check.py: sections end in time and leave no process, what they gave is kept, launches are checked."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile

import psutil
import pytest
from click.testing import CliRunner

import gpu_check
import landing
from lib import gpu_sections, gpu_table, sections, wheels
from lib.child import Ended
from lib.sections import Check, Found, Section
from monetrun.core import native
from support import standin_gpu
from support.paths import RECIPES, ROOT, python_path

MIB = 1 << 20


def in_a_process(text, *words):
    """Run Python that adopts orphans in a process of its own, since the test's process has children too."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(RECIPES), str(ROOT)])}
    command = [sys.executable, "-c", textwrap.dedent(text), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


# ---- a section's process


RUN = """
    import json, os, sys
    from dataclasses import asdict
    from pathlib import Path
    from lib.child import adopt_orphans, run_child
    adopt_orphans()
    folder = Path(sys.argv[1])
    ended = run_child(["sh", "-c", sys.argv[2]], os.environ, float(sys.argv[3]), folder / "x", folder)
    print(json.dumps(asdict(ended)))
"""


def test_when_its_time_is_up_a_command_is_ended_with_all_that_it_started(tmp_path):
    script = "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 60111 & echo $!; wait' & echo $!; sleep 60222"
    ended = in_a_process(RUN, tmp_path, script, 2)
    assert ended["exit_code"] is None
    pids = [int(word) for word in ended["stdout"].split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "60111"] not in commands
    assert ["sleep", "60222"] not in commands


def test_what_a_command_leaves_running_is_ended_and_named(tmp_path):
    ended = in_a_process(RUN, tmp_path, "setsid sleep 603 & echo $! ; exit 3", 60)
    assert ended["exit_code"] == 3
    assert not psutil.pid_exists(int(ended["stdout"]))
    assert len(ended["left_over"]) == 1


def test_the_traceback_of_a_worker_is_found_in_what_was_printed():
    before = "warning\n" * 50
    trace = '[rank0]: Traceback (most recent call last):\n[rank0]:   File "x"\n[rank0]: ValueError: no\n'
    assert Ended(1, 0.0, "", before + trace).traceback == trace
    assert Ended(1, 0.0, "", before).traceback == before


# ---- sections and their document


def section(text, read=lambda ended: Found({"out": ended.stdout.strip()}), limit=60.0, **more):
    return Section("one", "group", (sys.executable, "-c", text), limit, read, **more)


def run(found, tmp_path, seconds=60.0):
    return sections.run_section(found, os.environ, seconds, tmp_path)


def test_a_section_that_fails_keeps_its_traceback(tmp_path):
    entry = run(section("print('first'); raise KeyError('second')"), tmp_path)
    assert (entry["status"], entry["figures"]) == ("failed", {"out": "first"})
    (failure,) = entry["failures"]
    assert failure["what"] == "exit code 1"
    assert failure["traceback"].startswith("Traceback (most recent call last):")
    assert failure["traceback"].endswith("KeyError: 'second'\n")


def test_an_output_that_cannot_be_read_is_a_failure_with_its_traceback(tmp_path):
    entry = run(section("print('{')", read=lambda ended: Found(json.loads(ended.stdout))), tmp_path)
    assert entry["status"] == "failed"
    assert "JSONDecodeError" in entry["failures"][0]["what"]
    assert "in test_" not in entry["failures"][0]["what"]
    assert "Traceback" in entry["failures"][0]["traceback"]


def test_a_command_that_cannot_be_started_is_a_failure(tmp_path):
    entry = run(Section("one", "group", ("/no/such/command",), 60.0, lambda ended: Found()), tmp_path)
    assert entry["status"] == "failed"
    assert "No such file" in entry["failures"][0]["what"]


def test_a_section_whose_time_is_up_keeps_what_it_printed(tmp_path):
    text = "import time; print('{\"row\": 1}', flush=True); time.sleep(600)"
    entry = run(section(text, read=gpu_sections.read_rows, limit=5.0), tmp_path)
    assert entry["status"] == "timeout"
    assert entry["figures"] == {"rows": [{"row": 1}]}
    assert entry["failures"][0]["what"].startswith("stopped after ")
    assert entry["limit_seconds"] == 5.0


def test_a_section_is_skipped_without_time_or_without_what_it_needs(tmp_path):
    entry = run(section("1 / 0"), tmp_path, seconds=sections.LEAST_SECONDS - 1)
    assert (entry["status"], entry["reason"]) == ("skipped", "no time was left (--resume goes on)")
    entry = run(section("1 / 0", needs="there is no such library"), tmp_path)
    assert (entry["status"], entry["reason"]) == ("skipped", "there is no such library")
    entry = run(section('print(\'{"skipped": "no compiler"}\')', read=gpu_sections.read_rows), tmp_path)
    assert (entry["status"], entry["reason"]) == ("skipped", "no compiler")


def test_a_check_that_does_not_hold_fails_the_section_and_a_missing_figure_does_not(tmp_path):
    checks = (Check("a <= b", 2, 1), Check("c <= d", None, 1), Check("e <= f", 1, 1))
    entry = run(section("", read=lambda ended: Found(checks=checks)), tmp_path)
    assert entry["status"] == "failed"
    assert [f["what"] for f in entry["failures"]] == ["a <= b: 2 > 1"]
    assert [c["holds"] for c in entry["checks"]] == [False, None, True]


def test_the_document_is_written_after_each_section_and_goes_on_from_an_earlier_one(tmp_path):
    path = tmp_path / "results" / "gpu.json"
    document = sections.Document(path, {"command": "first", "device": "x"})
    document.add({"name": "a", "status": "failed", "figures": {"rate": float("nan")}})
    document.add({"name": "b", "status": "ok"})
    earlier = json.loads(path.read_text())
    assert earlier["sections"][0]["figures"] == {"rate": None}
    again = sections.Document(path, {"command": "second", "device": "x"}, earlier)
    again.add({"name": "a", "status": "ok"})
    found = json.loads(path.read_text())
    assert found["commands"] == ["first", "second"]
    assert [(e["name"], e["status"]) for e in found["sections"]] == [("a", "ok"), ("b", "ok")]
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]


# ---- what the commands print


REPORT = {
    "plain_peak_bytes": 1000 * MIB,
    "budget_bytes": 500 * MIB,
    "planned_peak_bytes": 480 * MIB,
    "measured_peak_bytes": 481 * MIB,
    "planned_reserved_bytes": 490 * MIB,
    "measured_reserved_bytes": 498 * MIB,
    "allocation_retries": 0,
}
TRAINING = {"whole_run_reserved_bytes": 499 * MIB, "settled_allocation_retries": 0}


def failed_checks(report, training):
    return [c.name for c in gpu_sections.launch_checks(report, training) if c.holds is False]


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, []),
        ({"measured_peak_bytes": 483 * MIB}, ["measured peak <= planned peak + 0.5%"]),
        ({"measured_peak_bytes": 470 * MIB}, ["planned peak - 0.5% <= measured peak"]),
        ({"planned_peak_bytes": 501 * MIB, "measured_peak_bytes": 501 * MIB}, ["planned peak <= budget"]),
        ({"planned_reserved_bytes": 501 * MIB}, ["planned reserved <= budget"]),
        ({"planned_reserved_bytes": 460 * MIB}, ["measured reserved <= planned reserved + 2% or 32 MiB"]),
        ({"measured_reserved_bytes": 500 * MIB + 1}, ["measured reserved <= budget"]),
        ({"whole_run_reserved_bytes": 500 * MIB + 1}, ["reserved, as the script reads it, <= budget"]),
        ({"allocation_retries": 1}, ["allocation retries <= 0"]),
        ({"settled_allocation_retries": 1}, ["allocation retries in settled steps <= 0"]),
    ],
)
def test_a_launch_is_checked_against_its_plan_and_its_budget(change, failed):
    report = {**REPORT, **{k: v for k, v in change.items() if k in REPORT}}
    training = {**TRAINING, **{k: v for k, v in change.items() if k in TRAINING}}
    assert failed_checks(report, training) == failed


def test_figures_that_a_launch_does_not_report_are_not_checked():
    assert failed_checks({}, {}) == []
    assert failed_checks({**dict.fromkeys(REPORT), "budget_bytes": 1}, {}) == []
    ended = Ended(0, 1.0, "no line of JSON\n", "")
    whats = [f["what"] for f in gpu_sections.read_launch(ended).failures]
    assert whats == ["the script printed no figures", "monetrun printed no report"]


def test_a_launchs_report_and_the_scripts_own_figures_are_read_from_one_output():
    out = f'{{"training": {json.dumps(TRAINING)}}}\nepoch 1\n{json.dumps(REPORT)}\n'
    found = gpu_sections.read_launch(Ended(0, 1.0, out, ""))
    assert found.figures == {"report": REPORT, "training": TRAINING}
    assert found.failures == ()


def test_what_doctor_found_is_kept_without_this_machines_folders():
    rows = [
        {"name": "python", "state": "ok", "found": "3.12.3 at /opt/torch/bin/python3, Linux x86_64", "mend": ""},
        {"name": "hook", "state": "missing", "found": "not installed", "mend": "pip install ."},
        {"name": "cache", "state": "ok", "found": f"{ROOT}/build/cache", "mend": ""},
    ]
    read = gpu_sections.read_doctor(Ended(0, 1.0, json.dumps(rows), ""))
    assert [row["found"] for row in read.figures["checks"]] == [
        "3.12.3, Linux x86_64",
        "not installed",
        "build/cache",
    ]
    assert read.failures == ({"what": "hook: not installed"},)


@pytest.mark.parametrize("worker", ["", "[gw3] [ 50%] "])
def test_tests_that_ran_are_counted_and_failed_ones_named(worker):
    results = {"tests/a.py::test_one[x y]": "PASSED", "tests/a.py::test_two": "FAILED", "tests/b.py::test_x": "SKIPPED"}
    lines = [f"{worker}{r} {name} " if worker else f"{name} {r} [ 10%]" for name, r in results.items()]
    lines += ["____ test_two ____", "tests/a.py:3: in test_two", "E  assert 1 == 2", "==== short summary ===="]
    lines += ["FAILED tests/a.py::test_two - assert", "= 1 failed in 2s ="]
    found = gpu_sections.read_tests(Ended(1, 1.0, "\n".join(lines), ""))
    assert found.figures["tests"] == {"PASSED": 1, "FAILED": 1, "SKIPPED": 1}
    assert found.figures["summary"] == "= 1 failed in 2s ="
    (failure,) = found.failures
    assert failure["what"] == "failed: tests/a.py::test_two"
    assert failure["traceback"].endswith("E  assert 1 == 2")


def test_the_table_compares_a_launch_with_the_eager_run_of_the_same_training():
    def training(peak, seconds):
        same = {"network": "n", "batch": 8, "precision": "fp32"}
        return {**same, "allocated_bytes": peak, "step_seconds": seconds, "losses": [7.0, 2.0]}

    eager = {"name": "n:eager", "status": "ok", "figures": {"training": training(1000 * MIB, 0.1)}}
    planned = {**training(481 * MIB, 0.12), **TRAINING, "losses": [7.0, 2.02]}
    other = {"name": "n:0.5x", "status": "ok", "figures": {"training": planned, "report": REPORT}}
    smaller = {"name": "nccl", "status": "ok", "figures": {"training": {**training(481 * MIB, 0.1), "batch": 4}}}
    document = {"device": "x", "stand_in": False, "sections": [eager, other, smaller]}
    cells = gpu_table.cells(other, gpu_table.eager_of(document, other))
    assert cells[:6] == ["1,000.0", "1.000", "480.0", "481.0", "0.481", "500.0"]
    assert cells[6:] == ["", "", "490.0", "498.0", "0", "120.0", "1.200", "1.0e-02"]
    assert gpu_table.eager_of(document, smaller) == {}
    assert gpu_table.table(document).row_count == 3


def test_the_page_names_what_failed_and_marks_estimates(tmp_path, monkeypatch):
    training = {"network": "n", "batch": 8, "precision": "fp32", "step_seconds": 0.1}
    command = ["python", "-m", "monetrun", "--budget", "0.5x"]

    def launch(name, plain_reserved, status="ok", *failures):
        figures = {"training": training, "report": {**REPORT, "plain_reserved_bytes": plain_reserved}}
        return {"name": name, "status": status, "command": command, "figures": figures, "failures": failures}

    over = {"what": "measured peak <= planned peak + 0.5%: 2 > 1"}
    late = {"what": "stopped after 36 s", "traceback": "monetrun: trial run\n"}
    stopped = {"name": "m:0.5x", "status": "timeout", "command": command, "figures": {}, "failures": [late]}
    skipped = {"name": "kernels", "status": "skipped", "reason": "no time was left"}
    launches = [launch("n:0.5x", 1010 * MIB), launch("nccl", 1010 * MIB - 1, "failed", over)]
    document = {"device": "NVIDIA X", "sections": [*launches, stopped, skipped]}
    (tmp_path / "gpu_x.json").write_text(json.dumps(document))
    monkeypatch.setattr(landing, "RESULTS", tmp_path)
    header, _, measured, estimated, *rest = landing.gpu_table().splitlines()
    assert header.startswith("| GPU | training |")
    assert "| 0.5x | 1,010 MiB | 490 MiB | 498 MiB |" in measured
    assert "NCCL, one rank | 0.5x | 1,010 MiB, estimated | 490 MiB |" in estimated
    assert rest == [
        "",
        "- X, `nccl` failed: measured peak <= planned peak + 0.5%: 2 > 1",
        "- X, `m:0.5x` ran out of time: stopped after 36 s: monetrun: trial run",
    ]


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("[rank0]: a.NoError: b\n\nmonetrun: error: x.py failed in its trial run\n", "a.NoError: b"),
        ("KeyError: 'a'\nmonetrun: out of memory: planned 9\n", "monetrun: out of memory: planned 9"),
        ("something\nelse\n\n", "else"),
        ("", ""),
    ],
)
def test_a_failures_line_is_the_last_exceptions_or_monetruns(printed, cause):
    assert gpu_table.cause_in(printed) == cause
    entry = {"status": "failed", "failures": [{"what": "exit code 1", "traceback": printed}, {"what": "more"}]}
    assert gpu_table.note(entry) == (f"exit code 1: {cause}" if cause else "exit code 1") + " (and 1 more)"


# ---- carried packages


def test_a_missing_package_is_installed_from_the_carried_wheels_alone(tmp_path, monkeypatch):
    need = wheels.Need("not-a-package", "not_a_package", "a test")
    monkeypatch.setattr(wheels, "NEEDS", (need, wheels.Need("pytest", "pytest", "is here")))
    folder, site = tmp_path / "wheels", tmp_path / "site"
    folder.mkdir()
    assert wheels.missing(site) == [need]
    assert wheels.install(folder, site) == ([], "")
    info = "not_a_package-1.0.dist-info"
    with zipfile.ZipFile(folder / "not_a_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("not_a_package.py", "here = True\n")
        about = "Metadata-Version: 2.1\nName: not-a-package\nVersion: 1.0\nRequires-Dist: scs\n"
        wheel.writestr(f"{info}/METADATA", about)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"not_a_package.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    assert wheels.install(folder, site) == (["not_a_package-1.0-py3-none-any.whl"], "")
    assert wheels.missing(site) == []
    assert (site / "not_a_package.py").exists()


def test_a_checkout_that_is_not_installed_is_registered_with_its_hook(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "version", lambda package: "")
    assert wheels.register_checkout(ROOT, tmp_path) == ""
    (found,) = importlib.metadata.distributions(name="monetrun", path=[str(tmp_path)])
    assert "monetrun.runtime.autoload:autoload" in [e.value for e in found.entry_points if e.group == "torch.backends"]


def test_the_list_of_wheels_has_what_planning_needs_and_leaves_out_what_it_does_not(tmp_path):
    text = wheels.listing(tmp_path, "3.12", "x86_64")
    (command,) = [line for line in text.splitlines() if "pip download" in line]
    words = [word.partition("==")[0] for word in command.partition("-d WHEELS")[2].split()]
    assert {"cvxpy", "qdldl", "pyscipopt", "highspy", "nvidia-cudnn-frontend"} <= set(words)
    assert "scs" not in words
    assert "--python-version 3.12" in command


# ---- the command


def check(*words, **variables):
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), **variables}
    command = [sys.executable, str(RECIPES / "gpu_check.py"), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_sections_are_in_the_order_of_their_importance(tmp_path):
    done = check("--list", "--work", tmp_path, "--networks", "unet,gpt", "--shares", "0.8x")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == [
        *("doctor", "unet:0.5x", "auto", "auto:large", "nccl", "scaler"),
        *("unet:eager", "gpt:eager", "gpt:0.5x"),
        *("unet:compile", "unet:compile-budget", "gpt:compile", "gpt:compile-budget"),
        *("kernels", "cudnn", "cudnn-benchmark", "unet:0.8x", "gpt:0.8x"),
    ]
    done = check("--list", "--work", tmp_path, "--only", "conformance,gpt:*", "--networks", "gpt")
    assert [line.split()[0] for line in done.stdout.splitlines()][-1] == "conformance"
    assert "test_cudnn.py" in done.stdout
    done = check("--only", "nothing", "--work", tmp_path)
    assert done.returncode == 2
    assert "--list shows them" in done.stderr


@pytest.fixture
def described(monkeypatch, tmp_path):
    """The command with two sections of milliseconds, on a device that need not be there; gives a run of it."""

    def good(ended):
        return Found({"out": ended.stdout.strip()})

    def made(settings):
        fails = f"import sys; sys.exit(len(open({str(tmp_path / 'broken')!r}).read()))"
        yield Section("first", "product", (sys.executable, "-c", fails), 60.0, good)
        yield Section("second", "product", (sys.executable, "-c", "print(2)"), 60.0, good)

    facts = {"device": "H1", "torch": "2", "driver": "5"}
    monkeypatch.setattr(gpu_check, "sections", lambda settings: list(made(settings)))
    monkeypatch.setattr(gpu_check, "device_facts", lambda variables, work: facts)
    monkeypatch.setattr(gpu_check, "adopt_orphans", lambda: None)
    monkeypatch.setattr(gpu_check.signal, "signal", lambda number, handler: None)
    (tmp_path / "broken").write_text("x")

    def run(*words):
        out = tmp_path / "gpu.json"
        done = CliRunner().invoke(gpu_check.main, ["--work", str(tmp_path / "work"), "--out", str(out), *words])
        return done, json.loads(out.read_text()) if out.exists() else None

    run.facts, run.mend = facts, lambda: (tmp_path / "broken").write_text("")
    return run


def test_a_failed_section_fails_the_command_and_a_resumed_one_runs_it_again(described):
    done, document = described("--seconds", "500")
    assert done.exit_code == 1
    assert "first" in done.output.splitlines()[-1]
    assert [(e["name"], e["status"]) for e in document["sections"]] == [("first", "failed"), ("second", "ok")]
    assert (document["device"], document["torch"], document["driver"]) == ("H1", "2", "5")
    described.mend()
    done, kept = described("--resume", "--keep-failed")
    assert kept["sections"] == document["sections"]
    done, after = described("--resume", "--seconds", "0")
    assert after["sections"] == document["sections"]  # what failed is not replaced by what had no time
    done, after = described("--resume")
    assert done.exit_code == 0
    assert [(e["name"], e["status"]) for e in after["sections"]] == [("first", "ok"), ("second", "ok")]
    assert after["sections"][1] == document["sections"][1]
    assert len(after["commands"]) == 4


def test_a_document_of_another_device_is_not_gone_on_from(described):
    described()
    described.facts["device"] = "H2"
    done, document = described("--resume")
    assert done.exit_code == 1
    assert "is of device 'H1', this run of 'H2'" in done.output
    assert document["device"] == "H1"


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = check("--work", tmp_path / "work", "--out", tmp_path / "gpu.json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "torch sees no CUDA device" in done.stderr
    assert not (tmp_path / "gpu.json").exists()


# ---- on a stand-in GPU


@pytest.fixture(scope="module")
def on_a_stand_in(tmp_path_factory):
    """The document of a whole run on a stand-in GPU: the product, a GPT in all ways, kernels."""
    if reason := standin_gpu.unavailable_reason():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("gpu_check")
    if (built := native.cache_folder()).exists():  # a compiler needs longer for them than a launch for its training
        shutil.copytree(built, folder / "work" / "cache" / "monetrun" / "native")
    words = ["--stand-in", "--small", "--networks", "gpt", "--shares", "0.65x", "--limits", 5, "--seconds", 3600]
    done = check(*words, "--work", folder / "work", "--out", folder / "gpu.json", **standin_gpu.environment(gib=16))
    return done, json.loads((folder / "gpu.json").read_text())


@pytest.mark.nightly
def test_the_whole_of_it_runs_on_a_stand_in_gpu(on_a_stand_in):
    done, found = on_a_stand_in
    assert (found["device"], found["stand_in"]) == ("Stand-in GPU", True)
    entries = {e["name"]: e for e in found["sections"]}
    assert [n for n, e in entries.items() if e["status"] == "skipped"] == ["auto:large", "cudnn"]
    assert [n for n, e in entries.items() if e["status"] == "timeout"] == []
    assert entries["gpt:eager"]["command"][:3] == ["python", "recipes/gpu_training.py", "gpt"]
    for name in ("doctor", "gpt:eager", "gpt:compile", "gpt:compile-budget"):
        assert entries[name]["status"] == "ok", entries[name]["failures"]
    peak = {w: entries[f"gpt:{w}"]["figures"]["training"]["allocated_bytes"] for w in ("eager", "compile-budget")}
    assert 0 < peak["compile-budget"] < peak["eager"]
    launches = [e for e in entries.values() if "report" in e.get("figures", {})]
    assert len(launches) == 6
    for failure in (f for e in launches for f in e["failures"]):  # whether budgets hold is another test's
        assert failure["what"].startswith("exit code") == bool(failure.get("traceback")), failure
    failed = [n for n, e in entries.items() if e["status"] == "failed"]
    assert done.returncode == (1 if failed else 0), done.stdout + done.stderr
    assert all(name in done.stdout.splitlines()[-1] for name in failed)


@pytest.mark.nightly
def test_its_launches_hold_their_budgets_on_a_stand_in_gpu(on_a_stand_in):
    entries = {e["name"]: e for e in on_a_stand_in[1]["sections"]}
    failed = {n: [f["what"] for f in e["failures"]] for n, e in entries.items() if e["status"] == "failed"}
    assert failed == {}
    for name, entry in entries.items():
        if name not in ("auto", "kernels") and "report" in entry.get("figures", {}):
            checks = {c["name"]: c["holds"] for c in entry["checks"]}
            assert checks["measured peak <= planned peak + 0.5%"], name
            assert checks["reserved, as the script reads it, <= budget"], name
            assert checks["allocation retries in settled steps <= 0"], name
    planned, eager = (entries[f"gpt:{w}"]["figures"]["training"]["reserved_bytes"] for w in ("0.5x", "eager"))
    assert planned < 0.55 * eager
