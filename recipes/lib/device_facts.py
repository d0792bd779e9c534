"""Print as JSON which GPU this is, and with what software it is used."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from typing import Any

import torch


def driver() -> str | None:
    """The driver's version by NVML; None where it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except (ImportError, pynvml.NVMLError):
        return None


def compiler() -> str | None:
    """The last line that nvcc prints of its version; None without one."""
    found = shutil.which("nvcc")
    if found is None:
        return None
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout.strip().splitlines() or [""])[-1]


def facts() -> dict[str, Any]:
    """What the document's header says."""
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device")
    about = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    return {
        "device": about.name,
        "capability": f"{about.major}.{about.minor}",
        "devices": torch.cuda.device_count(),
        "multiprocessors": about.multi_processor_count,
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": list(torch.cuda.nccl.version()) if torch.distributed.is_nccl_available() else None,
        "nvcc": compiler(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
    }


if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
