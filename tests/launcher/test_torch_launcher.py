"""What torch's own tests of its launcher check (``test/distributed/launcher/test_run.py``), with monetrun's defaults.

None of these scripts trains. With TORCHRUN_TOO=1 each runs under torchrun, too: what fails there is not asked of us.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest

from monetrun.commands.main import main as monetrun
from monetrun.commands.run import run as launch

WORKER = """
import os, sys
for name in (
    "LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR "
    "MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID OMP_NUM_THREADS "
    "OF_THE_LAUNCHER TORCHELASTIC_ERROR_FILE"
).split():
    assert os.environ[name], name
if sys.argv[1] == "fail":
    raise RuntimeError("as asked")
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").close()
"""
PROGRAM = '#!/bin/bash\necho "makes $1/$RANK"\ntouch "$1/$RANK"\n'
LAUNCHED_BY_TORCH = """
import sys, torch.distributed
with open(sys.argv[1], "w") as file:
    file.write(str(torch.distributed.is_torchelastic_launched()))
"""
MEET = """
import os, sys, torch, torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=world)
ones = torch.nn.functional.one_hot(torch.tensor(rank), world)
dist.all_reduce(ones)
if os.environ.get("MONETRUN_TRIAL") != "1":  # a trial has no other ranks
    assert ones.sum().item() == world
    open(os.path.join(sys.argv[2], str(rank)), "w").close()
"""

pytestmark = pytest.mark.usefixtures("plain_surroundings")


def torchrun(words: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(words)
    except ChildFailedError as failed:
        return int(next(iter(failed.failures.values())).exitcode)
    except (ValueError, RuntimeError):
        return 2
    return 0


@pytest.fixture(params=["monetrun", "torchrun"] if os.environ.get("TORCHRUN_TOO") else ["monetrun"])
def run(request, monkeypatch, tmp_path):
    """Runs words in this process, which has imported torch already; gives the exit code."""
    monkeypatch.setenv("OF_THE_LAUNCHER", "set")
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    function = torchrun if request.param == "torchrun" else monetrun
    before = dict(os.environ)
    yield lambda *words: function([str(word) for word in words])
    os.environ.clear()  # torchrun leaves variables
    os.environ.update(before)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "ranks").mkdir()
    made = {"worker": WORKER, "launched_by_torch": LAUNCHED_BY_TORCH, "meet": MEET}
    for name, text in made.items():
        (tmp_path / f"{name}.py").write_text(text)
    program = tmp_path / "program.sh"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return SimpleNamespace(
        program=program, ranks=tmp_path / "ranks", **{name: tmp_path / f"{name}.py" for name in made}
    )


def ran(folder: Path) -> list[str]:
    """The ranks that ran since the last time."""
    found = sorted(file.name for file in folder.iterdir())
    for file in folder.iterdir():
        file.unlink()
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


FOUR = ["0", "1", "2", "3"]
QUICK = ("--monitor-interval=0.1", "--start-method=spawn")


def test_a_script_runs_in_every_rank_by_every_rendezvous(run, files):
    by_name = ("--nnodes=1", "--rdzv-id=17")
    by_address = ("--nnodes=1", "--master-addr=localhost", f"--master-port={free_port()}", "--node-rank=0")
    elastic = (
        *("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=18"),
        "--rdzv-conf=join_timeout=5,last_call_timeout=1,timeout=5",
    )
    for place in (by_name, by_address, ("--nnodes=1", "--standalone"), elastic):
        assert run(*place, "--nproc-per-node=4", *QUICK, files.worker, files.ranks) == 0
        assert ran(files.ranks) == FOUR, place


@pytest.mark.slow
def test_a_program_runs_without_python_by_options_and_by_variables(run, files, monkeypatch):
    options = ("--nnodes=1", "--nproc-per-node=4", "--rdzv-id=19", *QUICK, "--no-python")
    assert run(*options, "--module", files.program, files.ranks) == 2
    assert ran(files.ranks) == []
    assert run(*options, files.program, files.ranks) == 0
    assert ran(files.ranks) == FOUR
    assert run("--nnodes=1", *QUICK, "--no-python", files.program, files.ranks) == 0
    assert ran(files.ranks) == ["0"]
    variables = {"NNODES": "1", "NPROC_PER_NODE": "4", "RDZV_ID": "20", "MONITOR_INTERVAL": "0.1", "NO_PYTHON": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PET_MODULE", "1")
    assert run(files.program, files.ranks) == 2
    monkeypatch.setenv("PET_MODULE", "0")
    assert run(files.program, files.ranks) == 0
    assert ran(files.ranks) == FOUR


def test_the_number_of_workers_is_a_number_or_the_machines(run, files):
    import torch

    def with_workers(count: str) -> int:
        return run("--nnodes=1", f"--nproc-per-node={count}", *QUICK, "--no-python", files.program, files.ranks)

    with patch("torch.accelerator.is_available", return_value=False):
        assert with_workers("auto") == 0
    assert ran(files.ranks) == sorted(str(rank) for rank in range(torch._utils.cpu_count()))
    assert with_workers("unknown") == 2
    for kind, name in (("gpu", "cuda"), ("xpu", "xpu")):
        with (
            patch(f"torch.{name}.is_available", return_value=True),
            patch(f"torch.{name}.device_count", return_value=3),
            patch("torch.accelerator.is_available", return_value=True),
            patch("torch.accelerator.device_count", return_value=3),
            patch("torch.accelerator.current_accelerator", return_value=MagicMock(type=kind)),
        ):
            for count in ("auto", kind):
                assert with_workers(count) == 0
                assert ran(files.ranks) == FOUR[:3]


def test_a_failed_worker_is_recorded_once_and_a_malformed_number_of_nodes_is_refused(run, files):
    elastic = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--max-restarts=0")
    conf = "--rdzv-conf=join_timeout=5,last_call_timeout=1,timeout=5"
    with patch("torch.distributed.elastic.events.record") as record:
        assert run(*elastic, conf, "--nproc-per-node=4", *QUICK, files.worker, "fail") == 1
    record.assert_called_once()
    assert run("--nnodes=2:20:30", files.worker, files.ranks) == 2
    assert run("--run-path", "--logs-specs=none_of_that_name", files.worker, files.ranks) == 2


def test_the_agents_own_error_is_raised_and_the_rendezvous_is_shut_down(files, monkeypatch, tmp_path):
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

    class Broken(Exception):
        pass

    monkeypatch.setenv("OF_THE_LAUNCHER", "set")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--nnodes=1", "--no-cache", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    words += [*QUICK, str(files.worker), str(files.ranks)]
    run_agent = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent.run"
    with (
        patch("torch.distributed.elastic.events.record") as record,
        patch(run_agent, side_effect=Broken),
        pytest.raises(Broken),
    ):
        launch(words)
    record.assert_called_once()
    with (
        patch("torch.distributed.launcher.api.LocalElasticAgent") as agent,
        patch("torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler") as handler,
    ):
        agent.return_value.run.return_value = RunResult(WorkerState.SUCCEEDED)
        assert launch(words) == 0
    handler.return_value.shutdown.assert_called_once()


def test_captured_output_has_the_prefix_that_was_asked_for(run, files, monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: ")
    captured = ("--redirects=3", "--tee=3", "--no-python")
    assert run("--nnodes=1", "--nproc-per-node=4", *QUICK, *captured, files.program, files.ranks) == 0
    printed = capfd.readouterr().out
    assert all(f"[rank{rank}]: makes " in printed for rank in FOUR)


# ---- scripts that import torch, in each rank


@pytest.mark.nightly
def test_a_script_knows_that_the_agent_launched_it_and_only_then(run, files, tmp_path):
    found = tmp_path / "found"
    assert run("--run-path", "--nnodes=1", "--nproc-per-node=1", *QUICK[:1], files.launched_by_torch, found) == 0
    assert found.read_text() == "True"
    found.unlink()
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    with patch("torch.distributed.run.metadata") as metadata:
        metadata.entry_points.return_value.select.return_value.__getitem__.return_value.load.return_value = (
            DefaultLogsSpecs
        )
        words = ("--run-path", "--nnodes=1", "--nproc-per-node=1", *QUICK[:1], "--logs-specs=default")
        assert run(*words, files.launched_by_torch, found) == 0
    assert found.read_text() == "True"
    subprocess.run([sys.executable, files.launched_by_torch, found], check=True)
    assert found.read_text() == "False"


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("tcp://localhost:{}", marks=pytest.mark.nightly), "env://"])
def test_ranks_meet_by_address_and_by_environment(run, files, method):
    port = free_port()
    place = ("--run-path", "--nnodes=1", "--nproc-per-node=4", "--master-addr=localhost", f"--master-port={port}")
    assert run(*place, *QUICK[:1], files.meet, method.format(port), files.ranks) == 0
    assert ran(files.ranks) == FOUR


@pytest.mark.nightly
def test_a_script_runs_from_its_path_in_every_rank(run, files):
    assert run("--run-path", "--nnodes=1", "--nproc-per-node=4", *QUICK, files.worker, files.ranks) == 0
    assert ran(files.ranks) == FOUR


@pytest.mark.nightly
def test_two_agents_form_one_launch(files):
    words = ["--nnodes=1:2", "--nproc-per-node=4", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    words += ["--rdzv-conf=timeout=5", "--rdzv-id=21", *QUICK, str(files.worker), str(files.ranks)]
    environment = {**os.environ, "OF_THE_LAUNCHER": "set"}
    agents = [subprocess.Popen([sys.executable, "-m", "monetrun", *words], env=environment) for _ in range(2)]
    assert [agent.wait(120) for agent in agents] == [0, 0]
    assert ran(files.ranks) == [str(rank) for rank in range(8)]
