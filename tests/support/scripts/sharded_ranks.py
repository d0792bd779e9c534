"""The ranks of a script that trains under FSDP2: its process group, this rank's device, and a mesh of all of them."""

import importlib
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def begin(kind, backend="gloo"):
    """Start the process group over `backend`. Gives this rank, its device, of the type `kind`, and the mesh.

    The backend "fake" moves nothing, and allocates nothing, as NCCL.
    """
    if "fake" in backend:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    dist.init_process_group(backend)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    return dist.get_rank(), device, init_device_mesh(kind, (dist.get_world_size(),))
