"""The environment of a trial run: what torchrun gives to rank 0's worker, and what marks the process as a trial."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.ranks import Ranks
from monetrun.runtime.autoload import NO_RANK_YET
from monetrun.runtime.settings import PREFIX, TRIAL, Settings


def trial_environment(options: LaunchOptions, ranks: Ranks, settings: Settings, error_file: Path) -> dict[str, str]:
    """All variables of a trial run's process.

    The addresses are of this machine, and the port is free: nothing of the run is there yet.

    Args:
        options: of the launch.
        ranks: the workers that it will start.
        settings: for the process.
        error_file: where it writes an uncaught exception.
    """
    args = options.torchrun
    is_named = args.rdzv_id != "none" and not args.standalone
    environment = {
        **os.environ,
        **settings.to_environment(),
        TRIAL: "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "ROLE_NAME": str(args.role),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_WORLD_SIZE": str(ranks.local),
        "ROLE_WORLD_SIZE": str(ranks.world_size),
        "GROUP_WORLD_SIZE": str(ranks.nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(args.max_restarts),
        "TORCHELASTIC_RUN_ID": str(args.rdzv_id) if is_named else str(uuid.uuid4()),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # there is no agent yet, whose store could be used
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": str(args.signals_to_handle),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        # Trackers stay silent: what the trial would tell them, the run tells them again.
        "WANDB_MODE": "disabled",
        "COMET_MODE": "disabled",
        "COMET_AUTO_LOG_DISABLE": "true",
        "MLFLOW_TRACKING_URI": (error_file.parent / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "SWANLAB_MODE": "disabled",
        "NEPTUNE_MODE": "debug",
        "CLEARML_OFFLINE_MODE": "1",
    }
    environment.pop(NO_RANK_YET, None)  # of --run-path's workers; a trial has its rank from the beginning
    if ranks.local > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    if getattr(args, "virtual_local_rank", False) and ranks.kind == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return environment


def allocator_variables(kind: str) -> dict[str, str]:
    """The variables that configure torch's allocator, unless the user has configured it.

    On CUDA they make its segments expandable, which keeps reserved memory close to allocated memory.
    """
    if kind != "cuda" or "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True", PREFIX + "OWN_ALLOCATOR": "1"}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
