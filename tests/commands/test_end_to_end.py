"""`monetrun script` from the command line: the same training as torchrun's, the budget, and every refusal."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from monetrun.core import codec
from monetrun.core.plan import Plan
from monetrun.planning.ledger import OWN
from support import launcher
from support.launches import set_apart, without_settings
from support.paths import SCRIPTS

TINY = str(SCRIPTS / "tiny.py")
TWO_RANKS = ("--ddp", "--steps=4", "--bucket-mb=0.01")  # many buckets


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder with what torchrun's training leaves: of one rank ``one.0``, of two ``two.0`` and ``two.1``."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        without_settings(patch)
        torchrun(TINY, str(folder / "one"))
        torchrun("--nproc-per-node=2", TINY, str(folder / "two"), *TWO_RANKS)
    return folder


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    set_apart(monkeypatch, tmp_path)


EXACT = ("--solver-seconds", "1", "--implementations", "exact")  # else the times decide the last bits


def monetrun(*words, expect=0):
    return launcher.run(launcher.MONETRUN, *words, expect=expect)


def torchrun(*words):
    launcher.run(launcher.TORCHRUN, "--standalone", *words)


def same(a, b):
    a, b = torch.load(a), torch.load(b)
    assert a["losses"] == b["losses"]
    assert [k for k in a["state"] if not torch.equal(a["state"][k], b["state"][k])] == []


def test_a_launch_trains_as_torchrun_does_within_the_budget_and_the_second_comes_from_the_cache(plain):
    done = monetrun("--budget", "0.7x", *EXACT, "--json", TINY, "planned")
    same(plain / "one.0", "planned.0")
    assert Path("planned.steps").read_text() == "0 0\n0 1\n0 2\n"  # the trial run took no step
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["planned_peak_bytes"] <= found["budget_bytes"]
    assert found["budget_bytes"] == pytest.approx(0.7 * found["plain_peak_bytes"], abs=1)
    assert found["measured_peak_bytes"] <= found["budget_bytes"]
    assert abs(found["measured_peak_bytes"] / found["planned_peak_bytes"] - 1) < 0.02
    assert found["steps"] == 3
    assert "trial run" in done.stderr

    again = monetrun("--budget", "0.7x", *EXACT, TINY, "planned")
    assert "trial run" not in again.stderr
    assert "plan from the cache" in again.stderr
    same(plain / "one.0", "planned.0")


@pytest.mark.nightly
def test_three_ranks_with_many_buckets_train_as_under_torchrun(tmp_path):
    words = ("--nproc-per-node=3", TINY)
    torchrun(*words, "plain", "--ddp", "--steps=4", "--bucket-mb=0.01")
    options = ("--implementations=exact", "--solver-seconds=1", "--budget=0.75x", "--json")
    done = monetrun(*options, *words, "planned", "--ddp", "--steps=4", "--bucket-mb=0.01")
    assert "planning at the first step" not in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["measured_peak_bytes"] <= found["budget_bytes"]
    assert found["planned_peak_bytes"] < found["plain_peak_bytes"]
    for rank in range(3):
        same(f"plain.{rank}", f"planned.{rank}")


@pytest.mark.nightly
def test_what_is_planned_of_a_rank_does_not_depend_on_how_many_there_are():
    ledgers = []
    for ranks in (2, 4):
        words = ("--out", "p.json", "--budget", "0.75x", "--solver-seconds", "1", f"--nproc-per-node={ranks}")
        monetrun("plan", *words, TINY, "planned", "--ddp")
        plan = codec.loads(Plan, Path("p.json").read_text())
        ledgers.append({name: nbytes for name, nbytes in plan.ledger.items() if name != OWN} | {"": plan.budget_bytes})
    assert ledgers[0] == ledgers[1]
    assert ledgers[0]["DDP buckets"] == ledgers[0]["gradients"] == ledgers[0]["parameters"]


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_ranks_that_run_in_processes_of_multiprocessing_plan_as_others_do(plain, start):
    how = ("--run-path", f"--start-method={start}")
    options = ("--implementations=exact", "--solver-seconds=1", "--budget=0.75x", "--json", *how)
    done = monetrun(*options, "--nproc-per-node=2", TINY, "planned", *TWO_RANKS)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["ranks"]) == 2
    assert found["measured_peak_bytes"] <= found["budget_bytes"]
    for rank in range(2):
        same(plain / f"two.{rank}", f"planned.{rank}")


@pytest.mark.slow
def test_without_a_probe_rank_0_plans_at_the_first_step_for_all(plain):
    done = monetrun(
        *("--nproc-per-node=2", "--no-probe", "--budget", "0.75x", *EXACT, "--json"),
        *(TINY, "planned", *TWO_RANKS),
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["measured_peak_bytes"] <= found["budget_bytes"]
    for rank in (0, 1):
        same(plain / f"two.{rank}", f"planned.{rank}")


def test_plan_writes_a_plan_that_a_launch_runs_and_measures_and_another_model_refuses(tmp_path, plain):
    done = monetrun("plan", "--out", "p.json", "--budget", "0.8x", *EXACT, TINY, "planned")
    assert not Path("planned.0").exists()
    assert "nothing trained" in done.stderr
    plan = codec.loads(Plan, Path("p.json").read_text())
    assert plan.planned_peak_bytes <= plan.budget_bytes
    missing = monetrun("explain", "--measured", "p.json", expect=83)
    assert "monetrun --plan p.json train.py" in missing.stderr
    monetrun("--plan", "p.json", *EXACT, "--report", "report", TINY, "planned")
    same(plain / "one.0", "planned.0")
    assert "Sequential backward" in Path("report/report.html").read_text()
    (rank,) = json.loads(monetrun("explain", "--measured", "--json", "p.json").stdout)["ranks"]
    assert [i["label"] for i in rank["intervals"]] == [
        "Sequential forward",
        "between calls",
        "Sequential backward",
        "between calls",
        "SGD.step",
    ]
    assert all(abs(i["difference"]) < 0.005 for i in rank["intervals"])
    assert max(i["planned_peak_bytes"] for i in rank["intervals"]) == plan.planned_peak_bytes
    assert "Sequential backward" in monetrun("explain", "--measured", "p.json").stdout
    assert monetrun("explain", "--snapshot", "plan.pickle", "p.json").stdout == "plan.pickle\n"
    assert pickle.loads(Path("plan.pickle").read_bytes())["device_traces"][0]
    other = tmp_path / "other.py"
    other.write_text(Path(TINY).read_text().replace("range(4)", "range(5)"))
    refused = monetrun("--plan", "p.json", str(other), "refused", expect=83)
    assert "plan" in refused.stderr
    assert not Path("refused.steps").exists()


@pytest.mark.nightly
def test_a_budget_under_the_smallest_feasible_names_it_and_it_is_feasible():
    done = monetrun("--budget", "3MiB", "--solver-seconds", "1", TINY, "out", expect=80)
    assert "smallest feasible" in done.stderr
    assert "at its peak: Sequential" in done.stderr
    smallest = done.stderr.split("fits: --budget ")[1].split()[0]
    assert not Path("out.steps").exists()
    # the schedule found is kept, and no search is needed to find it again
    done = monetrun("--budget", smallest, "--solver-seconds", "1", TINY, "out")
    assert "trial run" not in done.stderr


@pytest.mark.nightly
def test_a_script_whose_import_fails_shows_its_traceback_as_python_does(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import torch\nimport no_such_module_here\n")
    done = monetrun("--budget", "0.5x", str(script), expect=1)
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert plain.stderr in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.nightly
def test_a_script_that_fails_while_training_shows_its_own_traceback():
    done = monetrun("--budget", "0.9x", TINY, "out", "--fail", "backward", expect=1)
    assert "ValueError: a bad batch" in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.nightly
def test_a_script_that_never_trains_runs(tmp_path):
    script = tmp_path / "idle.py"
    script.write_text("import torch\nprint(torch.zeros(1, 2).sum().item())\n")
    done = monetrun("--budget", "0.5x", str(script))
    assert done.stdout == "0.0\n"
    assert done.stderr.count("ended without a training step in its trial run; planning at the first step") == 1


def test_a_missing_script_is_found_before_anything_starts():
    done = monetrun("--budget", "0.5x", "no_such.py", expect=2)
    assert "no_such.py" in done.stderr


@pytest.mark.nightly
def test_what_no_schedule_fits_beside_ends_in_the_middle_with_the_bytes_by_kind_and_exit_code_84():
    done = monetrun("--budget", "6MiB", "--solver-seconds", "1", TINY, "out", "--hold", str(1 << 29), expect=84)
    assert "no schedule fits" in done.stderr
    assert "other tensors of the script 512" in done.stderr
    assert "fits: --budget 51" in done.stderr
    assert Path("out.steps").read_text() == "0 0\n0 1\n"


@pytest.mark.nightly
def test_memory_that_runs_out_before_the_first_steps_end_restarts_with_a_tighter_plan_which_is_kept(plain):
    words = ("--budget", "0.75x", *EXACT, TINY, "out", "--untried", str(2300 << 10))
    done = monetrun(*words)
    same(plain / "one.0", "out.0")
    assert 1 <= done.stderr.count("starting again") <= 2
    assert "are held; the planned step allocates" in done.stderr
    done = monetrun(*words)
    same(plain / "one.0", "out.0")
    assert "(plan from the cache)" in done.stderr
    assert "starting again" not in done.stderr


@pytest.mark.nightly
def test_an_unwritable_cache_is_a_warning(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MONETRUN_CACHE", str(blocked / "cache"))
    done = monetrun("--budget", "0.9x", "--solver-seconds", "1", TINY, "out")
    assert "cannot be written" in done.stderr
    assert Path("out.0").exists()


@pytest.mark.nightly
def test_a_model_that_cannot_be_captured_runs_as_it_is_after_one_warning_and_strict_refuses(tmp_path):
    script = tmp_path / "scripted.py"
    script.write_text(
        Path(TINY).read_text().replace("net = module = model()", "net = module = torch.jit.script(model())")
    )
    torchrun(str(script), "plain")
    done = monetrun("--budget", "0.8x", str(script), "planned")
    assert done.stderr.count("monetrun: warning") == 1
    assert "scripted" in done.stderr
    same("plain.0", "planned.0")
    refused = monetrun("--budget", "0.8x", "--strict", str(script), "strict", expect=82)
    assert "scripted" in refused.stderr
    assert not Path("strict.steps").exists()
