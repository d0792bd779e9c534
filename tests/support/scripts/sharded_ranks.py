"""The ranks of a script that trains under FSDP2: its process group, this rank's device, and a mesh of all of them."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def begin(kind):
    """Start the process group over gloo. Gives this rank, its device, of the type `kind`, and the mesh."""
    dist.init_process_group("gloo")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    return dist.get_rank(), device, init_device_mesh(kind, (dist.get_world_size(),))
