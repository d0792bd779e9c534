"""Commands that plan without training, from the command line: each makes one trial run."""

import importlib
import json
import re
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from monetrun.commands import main as cli
from monetrun.commands import plan
from monetrun.launcher.job import Job
from monetrun.launcher.parser import command_parser, launch_parser
from support import launcher

SCRIPT = """
import sys
import torch

batch = int(sys.argv[sys.argv.index("--batch") + 1])
net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.randn(batch, 64)).square().mean().backward()
optimizer.step()
with open("trained", "a") as file:
    file.write("x")
"""
ACCUMULATING = """
import contextlib
import sys
import torch

batch, passes, samples = map(int, sys.argv[1:])
torch.distributed.init_process_group("gloo")
assert samples == batch * passes * torch.distributed.get_world_size()
net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)])
net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    for k in range(passes):
        with net.no_sync() if k < passes - 1 else contextlib.nullcontext():
            net(torch.randn(batch, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""
WORDS = ("train.py", "--batch", "256", "--points", "9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("commands")
    (made / "train.py").write_text(SCRIPT)
    return made


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, folder):
    monkeypatch.setenv("MONETRUN_CACHE", str(folder / "cache"))  # shared: the same trial run serves all tests
    monkeypatch.chdir(folder)


def free_port():
    with socket.socket() as free:  # torchrun's own is one for all that runs on this machine
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(capsys, *words, expect=0):
    assert cli.main(words) == expect
    return capsys.readouterr()


def test_frontier_prints_and_draws_every_budget_from_one_trial_run(capsys):
    out, err = run(
        *(capsys, "frontier", "--points", "3", "--solver-seconds", "1", "--json", "f.json", "--plot", "f.svg"),
        *WORDS,
    )
    found = json.loads(Path("f.json").read_text())
    assert [p["budget_bytes"] for p in found["points"]] == sorted({p["budget_bytes"] for p in found["points"]})[::-1]
    assert len(found["points"]) == 3
    assert found["points"][0]["budget_bytes"] == found["plain_peak_bytes"]
    assert found["points"][-1]["budget_bytes"] == found["smallest_bytes"] < found["plain_peak_bytes"]
    assert "train.py --batch 256 --points 9" in out
    assert Path("f.svg").read_text().startswith("<?xml")
    assert err.count("trial run") == 1
    assert "next: monetrun --budget" in err
    assert err.rstrip().endswith("train.py --batch 256 --points 9")
    assert not Path("trained").exists()
    plan_words = ("plan", "--budget", "0.8x", "--solver-seconds", "1", "--out", "p.json", *WORDS)
    run(capsys, *plan_words)
    run(capsys, "explain", "--html", "p.html", "p.json")
    data = json.loads(Path("p.html").read_text().partition('type="application/json">')[2].partition("</script>")[0])
    assert data["frontier"]["points"] == found["points"]  # the page has what was found last


def test_a_plan_is_explained_with_its_record_from_the_cache_and_refused_without_it(capsys, monkeypatch, tmp_path):
    run(capsys, "plan", "--budget", "0.7x", "--solver-seconds", "1", "--out", "p.json", *WORDS)
    out, _ = run(capsys, "explain", "p.json")
    assert re.search(r"By module: \d+ operators run again.*; with other implementations the plan adds", out)
    cached, _ = run(capsys, "cache", "list")
    assert re.search(r"^plan .* \d+\.\d KiB of 801\.5 KiB, overhead [+-]", cached, re.M)
    assert " on cpu" in cached.split("probe ", 1)[1].splitlines()[0]
    found = json.loads(run(capsys, "explain", "--json", "p.json").out)
    plan = json.loads(Path("p.json").read_text())
    assert found["planned_peak_bytes"] == plan["planned_peak_bytes"] == sum(found["at_peak"].values())
    assert found["overhead"] == plan["overhead"]
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "empty"))
    assert "monetrun plan --out p.json SCRIPT" in run(capsys, "explain", "p.json", expect=83).err
    assert "nothing.json" in run(capsys, "explain", "nothing.json", expect=2).err
    assert "train.py is not a plan" in run(capsys, "explain", "train.py", expect=83).err


@pytest.mark.nightly
def test_batch_finds_the_largest_and_prints_the_command_to_type_next(capsys):
    words = ("--budget", "600KiB", "--max-overhead", "99%", "--multiple", "64", "--algorithm", "greedy")
    out, err = run(capsys, "batch", *words, "--solver-seconds", "1", "--json", "train.py", "--batch", "{batch}")
    found = json.loads(out)
    assert found["batch"] % 64 == 0
    assert found["planned_peak_bytes"] <= 600 << 10
    assert found["overhead"] <= 0.99
    assert found["verified"][-1]["batch"] == found["batch"] or not found["verified"][-1]["fits"]
    kept = "--algorithm greedy --solver-seconds 1"
    assert err.rstrip().endswith(f"next: monetrun --budget 600KiB {kept} train.py --batch {found['batch']}")
    assert not Path("trained").exists()


@pytest.mark.nightly
def test_accumulating_batches_of_two_ranks_keep_the_step_and_the_printed_command_trains_within_the_budget(
    capsys, folder
):
    (folder / "accumulating.py").write_text(ACCUMULATING)
    launch = ("--nproc-per-node", "2", "--master-port", str(free_port()), "--algorithm", "greedy")
    search = ("--budget", "1MiB", "--accumulate", "1536", "--max-overhead", "99%", "--json")
    out, err = run(capsys, "batch", *search, *launch, "accumulating.py", "{batch}", "{accumulate}", "{global}")
    found = json.loads(out)
    batch = found["batch"]
    assert 768 % batch == 0
    assert 8 < batch < 768
    assert found["next_batch"] == min(n for n in range(batch + 1, 769) if 768 % n == 0)
    assert (found["accumulate"], found["global_batch"]) == (768 // batch, 1536)
    assert found["planned_peak_bytes"] <= 1 << 20
    command = err.rstrip().rpartition("next: ")[2]
    assert command.endswith(f"accumulating.py {batch} {768 // batch} 1536")
    module, *words = shlex.split(command)
    done = launcher.run(module, "--json", *words)
    trained = json.loads(done.stdout.splitlines()[-1])
    assert trained["measured_peak_bytes"] <= 1 << 20


def test_a_script_that_never_trains_is_an_error_of_its_own(capsys, folder):
    (folder / "idle.py").write_text("import torch\n")
    assert "without a training step" in run(capsys, "batch", "--budget", "1GiB", "idle.py", "{batch}", expect=85).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("frontier", "--points", "1", "train.py"), "--points 1"),
        (("frontier", "--points", "many", "train.py"), "many"),
        (("frontier", "--budgets", "0.8y", "train.py"), "'0.8y'"),
        (("frontier", "--budgets", "80%", "train.py"), "a share of the free memory"),
        (("frontier", "--plot", "f.gif", "train.py"), "f.gif"),
        (("frontier", "--json", "none/f.json", "train.py"), "no such folder"),
        (("frontier", "--no-probe", "train.py"), "needs its trial run"),
        (("frontier",), "usage: monetrun frontier"),
        (("frontier", "--json", "train.py"), "no script was given: train.py is the FILE of --json"),
        (("--nproc-per-node", "train.py"), "no script was given: train.py is the value of --nproc-per-node"),
        (("--no-cache", "--quiet"), "no script was given\n"),
        (("frontier", "none.py"), "none.py"),
        (("batch", "--budget", "1GiB", "train.py", "--batch", "8"), "{batch}"),
        (("batch", "--budget", "0.5x", "train.py", "{batch}"), "grows with the batch"),
        (("batch", "--budget", "1GiB", "--max-overhead", "20", "train.py", "{batch}"), "'20'"),
        (("batch", "--budget", "12Gbit", "train.py", "{batch}"), "'12Gbit'"),
        (("explain",), "PLAN_FILE"),
    ],
)
def test_what_cannot_be_used_is_refused_before_any_trial_run(capsys, words, message):
    err = run(capsys, *words, expect=2).err
    assert message in err
    assert err.count("monetrun: error") == 1
    assert "trial run up" not in err


def test_the_next_command_keeps_a_launchs_options_and_drops_the_commands():
    def options(parser):
        parser.add_argument("--points", type=int)
        parser.add_argument("--out", default="")

    words = ["--nproc-per-node=2", "--points", "3", "--out", "-", "--budget=1GiB", "--json", "--strict"]
    parser = command_parser("frontier", "", options, not_reusable=["solver_seconds"])
    launch, args = parser.parse_launch([*words, "--solver-seconds", "9", "-m", "a.b", "--json", "c d"])
    assert (args.points, args.out, launch.script_args) == (3, "-", ("--json", "c d"))
    assert launch.reusable_words == ("--nproc-per-node=2", "--strict", "-m")
    assert launch.command_line("2GiB") == "monetrun --budget 2GiB --nproc-per-node=2 --strict -m a.b --json 'c d'"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--budget=1GiB", "--cost-model", "roofline:h100", "--json"], "monetrun --plan p.json "),
        (["--implementations", "in-place,conv", "-m"], "monetrun --plan p.json --implementations in-place,conv -m "),
        (["--nproc-per-node=2", "--gpus", "4"], "monetrun --plan p.json --nproc-per-node=2 --nproc-per-node=4 "),
        (["--nodes", "3", "--strict"], "monetrun --plan p.json --strict --nnodes=3 "),
    ],
)
def test_the_command_after_plan_launches_what_was_planned(words, command, capsys):
    options, args = plan.prepare_parser().parse_launch([*words, "--out=p.json", "a.b", "--lr", "c d"])
    options = plan._on_cluster(options, args)
    plan.show(SimpleNamespace(options=options, print_plan=lambda title: None, modelled_bytes=0), "p.json")
    assert capsys.readouterr().err.splitlines()[0].endswith(f"next: {command}a.b --lr 'c d'")
    again, _ = launch_parser().parse_launch(shlex.split(f"{command}a.b --lr 'c d'")[1:])
    assert all(getattr(options.torchrun, name) == value for name, value in vars(again.torchrun).items())
    assert again.implementations == options.implementations


def test_what_was_planned_for_another_device_is_planned_there_again(capsys):
    words = ["--budget=1GiB", "--cost-model", "roofline:h100", "--out=p.json", "train.py"]
    options, _ = plan.prepare_parser().parse_launch(words)
    plan.show(SimpleNamespace(options=options, print_plan=lambda title: None, modelled_bytes=1 << 36), "p.json")
    assert capsys.readouterr().err.splitlines()[0].endswith("next: on such a device monetrun --budget 1GiB train.py")


@pytest.mark.parametrize("name", ["frontier", "batch"])
def test_what_frontier_and_batch_print_to_type_next_trains_here(name):
    parser = importlib.import_module(f"monetrun.commands.{name}").prepare_parser()
    options, _ = parser.parse_launch(["--cost-model", "roofline:h100", "--strict", "train.py"])
    assert options.command_line("1GiB") == "monetrun --budget 1GiB --strict train.py"


def test_plan_leaves_a_scripts_own_out_to_the_script(monkeypatch):
    seen = []
    monkeypatch.setattr(Job, "planned", lambda job: job)
    monkeypatch.setattr(plan, "write_plan", lambda job, out: seen.append((out, job.options.script_args)))
    monkeypatch.setattr(plan, "show", lambda job, out: None)
    assert cli.main(["plan", "train.py", "--out", "models"]) == 0
    assert cli.main(["plan", "--budget", "0.5x", "--out", "p.json", "train.py", "--out=models", "--", "-x"]) == 0
    assert seen == [("plan.json", ("--out", "models")), ("p.json", ("--out=models", "--", "-x"))]


def test_plan_replaces_a_plan_and_no_other_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    mine = tmp_path / "plan.json"
    monkeypatch.setattr(Job, "planned", lambda job: job)
    monkeypatch.setattr(plan, "write_plan", lambda job, out: None)
    monkeypatch.setattr(plan, "show", lambda job, out: None)
    for content in ("my notes", '{"mine": 1}', "[]"):
        mine.write_text(content)
        assert cli.main(["plan", "train.py"]) == 2
        assert "there is a file that is no plan" in capsys.readouterr().err
    for content in ("", '{"schema": 1, "graphs": []}'):  # another version's
        mine.write_text(content)
        assert cli.main(["plan", "train.py"]) == 0
