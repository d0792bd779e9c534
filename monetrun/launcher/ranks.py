"""How many workers a launch starts, and on which kind of device."""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass

from monetrun.core.errors import UsageError
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.process import restored_environment
from monetrun.machine.device import default_kind


@dataclass(frozen=True, slots=True)
class Ranks:
    """The workers of a launch.

    Attributes:
        kind: their device, ``"cuda"`` or ``"cpu"``.
        local: workers on this node.
        nodes: nodes, each with ``local`` workers.
    """

    kind: str
    local: int
    nodes: int

    @property
    def world_size(self) -> int:
        """Workers on all nodes."""
        return self.local * self.nodes


def find_ranks(options: LaunchOptions) -> Ranks:
    """The workers that torchrun will start on this machine's devices.

    Raises:
        UsageError: see ``local_world_size``.
    """
    return Ranks(default_kind(), local_world_size(options), options.min_nodes)


def local_world_size(options: LaunchOptions) -> int:
    """How many workers torchrun will start on this node. This checks all of torchrun's options.

    Raises:
        UsageError: torchrun would refuse them (``--nproc-per-node``, ``--nnodes``, ``--redirects``, ...).
    """
    from torch.distributed import run

    # config_from_args would create a log folder, set environment variables and log: none of this is wanted here.
    args = copy.copy(options.torchrun)
    if not args.logs_specs:
        args.log_dir = os.devnull
    logger = logging.getLogger(run.__name__)
    with restored_environment():
        logger.disabled = True
        try:
            config, _, _ = run.config_from_args(args)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise UsageError(f"torchrun's options: {error}", "torchrun --help lists them") from error
        finally:
            logger.disabled = False
    if config.nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node {args.nproc_per_node}: no worker to start", "give at least 1")
    return int(config.nproc_per_node)
