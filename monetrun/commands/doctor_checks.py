"""The checks of ``monetrun doctor``: each finds out whether monetrun can use one part of this machine.

A check returns what it found, or what is missing and how to fix it. No check raises.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from monetrun import __version__
from monetrun.core.errors import MonetrunError
from monetrun.runtime.settings import NEWER_TORCH, hooks, too_old_torch, why_no_hook

OK = "ok"
WARNING = "warning"
MISSING = "missing"

# counted on the references: calls of ATen's kernels, and bytes beside operands and results
WITHOUT_KERNELS = (
    "on CUDA each mask, pooling and normalization is 7 to 23 calls of ATen's instead of 1 to 4, with 3 to 24 bytes of"
    " workspace an element, so that plans seldom use them"
)

_NVIDIA_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # on Linux, and in Windows' subsystem for it
_PCI, _NVIDIA = Path("/sys/bus/pci/devices"), "0x10de"

# as in monetrun.capture.program
WITHOUT_PROGRAMS = "Python calls the operators of planned steps on CUDA, 2 to 12 microseconds each"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check.

    Attributes:
        name: what was checked.
        state: ``"ok"``, ``"warning"`` (monetrun works without it, with less) or ``"missing"`` (nothing runs without
            it).
        found: versions, paths, or what is wrong.
        mend: how to fix it, or empty.
    """

    name: str
    state: str
    found: str
    mend: str = ""


def run_checks() -> Iterator[Check]:
    """Run all checks, in the order in which a launch needs what they check."""
    system = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    yield Check("python", OK, system)
    yield Check("monetrun", OK, __version__)
    yield _torch()
    yield _torchvision()
    yield _hook()
    for package, needed in (("cvxpy", MISSING), ("pyscipopt", WARNING), ("highspy", WARNING)):
        yield _solver(package, needed)
    yield _compiler()
    yield _allocator()
    yield _nvml()
    yield _kernels()
    yield _programs()
    yield _cudnn()
    yield _memory()
    yield _cache()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # a library that torch needs is missing or of another build
        return Check("torch", MISSING, f"cannot be imported: {error}", NEWER_TORCH)
    if why := too_old_torch():
        return Check("torch", MISSING, why, NEWER_TORCH)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    threads = f"{torch.get_num_threads()} threads"
    return Check("torch", OK, f"{torch.__version__}, built {built}, {threads}")


def _torchvision() -> Check:
    version = _version("torchvision")
    if not version:
        return Check("torchvision", WARNING, "is not installed", "the recipes need it")
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        return Check("torchvision", WARNING, f"{version} does not match torch: {error}", "install both from one index")
    return Check("torchvision", OK, version)


def _hook() -> Check:
    """Monetrun's entry point in ``torch.backends``: torch loads it in every worker, to give it its plan."""
    why, mend = why_no_hook()
    if why:
        return Check("hook", MISSING, why, mend)
    found = hooks()
    if found is None:
        other = os.environ["PYTHON_EXEC"]
        return Check(
            "hook", WARNING, f"not looked for: PYTHON_EXEC={other} runs workers", f"{other} -m monetrun doctor"
        )
    return Check("hook", OK, found[0])


def _solver(package: str, needed: str) -> Check:
    version = _version(package)
    if not version:
        return Check(package, needed, "is not installed", f"pip install {package}")
    try:
        importlib.import_module(package)
    except (ImportError, OSError) as error:
        return Check(
            package, needed, f"{version} cannot be imported: {error}", f"pip install --force-reinstall {package}"
        )
    return Check(package, OK, version)


def _compiler() -> Check:
    try:
        native = importlib.import_module("monetrun.core.native")
    except ModuleNotFoundError:
        return Check("compiler", WARNING, "this build of monetrun has no native part")
    try:
        command = native.compiler()
    except MonetrunError as error:
        return Check("compiler", WARNING, error.message, error.hint)
    try:
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("compiler", WARNING, f"{shlex.join(command)} does not run: {error}", "set CXX to a C++ compiler")
    return Check("compiler", OK, f"{answer.stdout.partition(chr(10))[0]} at {shlex.join(command)}")


def _allocator() -> Check:
    """The CPU allocator that enforces a budget; without it a budget on a CPU is planned but not enforced."""
    name, source = "allocator", "cpu_allocator.cpp"
    try:
        native = importlib.import_module("monetrun.core.native")
        import torch
    except ImportError as error:
        return Check(name, WARNING, f"not available: {error}")
    header = Path(torch.__file__).parent / "include" / "c10" / "core" / "CPUAllocator.h"
    if not header.is_file():
        return Check(name, WARNING, f"this torch has no {header}", "install torch from its official wheel")
    try:
        native.compiler()
        folder, kept = native.source_folder(), native.cache_folder()
    except MonetrunError as error:
        return Check(name, WARNING, f"cannot be built: {error.message}", error.hint)
    if not (folder / source).is_file():
        return Check(name, WARNING, f"there is no {folder / source}", "install monetrun again")
    built = list(kept.glob("cpu_allocator-*.so"))
    where = f"built in {kept}" if built else "not built yet; the first run on a CPU builds it"
    return Check(name, OK, where)


def _has_nvidia_board() -> bool:
    """Whether this machine has an NVIDIA GPU, with or without a driver."""
    if any(Path(path).exists() for path in _NVIDIA_DRIVERS):
        return True
    with contextlib.suppress(OSError):
        return any(path.read_text().strip() == _NVIDIA for path in _PCI.glob("*/vendor"))
    return False


def _nvml() -> Check:
    without = None if _has_nvidia_board() else Check("nvml", OK, "not needed: there is no NVIDIA GPU")
    try:
        import pynvml
    except ImportError as error:
        return without or Check("nvml", WARNING, str(error), "pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return without or Check("nvml", WARNING, f"{error}: CUDA devices cannot be found with NVML")
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        count = pynvml.nvmlDeviceGetCount()
        names = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
        return Check("nvml", OK, f"driver {version}, {count} devices{': ' * bool(names)}{', '.join(names)}")
    except pynvml.NVMLError as error:
        return Check("nvml", WARNING, str(error), "run nvidia-smi for details")
    finally:
        pynvml.nvmlShutdown()


def _kernels() -> Check:
    """What compiles the CUDA kernels of ``torch.ops.monet``, at the first run on a device."""
    name = "kernels"
    try:
        import torch

        cubin = importlib.import_module("monetrun.core.cubin")
        native = importlib.import_module("monetrun.core.native")
    except (ImportError, OSError, RuntimeError) as error:
        return Check(name, WARNING, f"not available: {error}")
    try:
        compiler, kept = cubin.compiler().name, native.cache_folder()
    except MonetrunError as error:
        if not torch.cuda.is_available():
            return Check(name, OK, "not used: torch sees no CUDA device")
        return Check(name, WARNING, f"{error.message}: {WITHOUT_KERNELS}", error.hint)
    built = any(path.suffix in (".cubin", ".ptx") for path in kept.glob("ops_cuda-*"))
    where = f"built in {kept}" if built else "built by the first run on a CUDA device"
    return Check(name, OK, f"for CUDA by {compiler}, {where}")


def _programs() -> Check:
    """What calls the operators of a planned step on CUDA: a compiled program, or Python where there is no compiler."""
    name = "programs"
    try:
        import torch

        native = importlib.import_module("monetrun.core.native")
    except (ImportError, OSError, RuntimeError) as error:
        return Check(name, WARNING, f"not available: {error}")
    if not torch.cuda.is_available():
        return Check(name, OK, "not used: torch sees no CUDA device")
    try:
        native.compiler()
        kept = native.cache_folder()
    except MonetrunError as error:
        return Check(name, WARNING, f"{error.message}: {WITHOUT_PROGRAMS}", error.hint)
    where = f"built in {kept}" if list(kept.glob("program-*.so")) else "built by the first run on a CUDA device"
    return Check(name, OK, f"planned steps on CUDA run without Python between operators, {where}")


def _cudnn() -> Check:
    """The optional package that lists and runs cuDNN's plans; it is used on CUDA devices only."""
    name, package = "cudnn", "nvidia-cudnn-frontend"
    try:
        import torch

        cudnn = importlib.import_module("monetrun.ops.cudnn")
    except (ImportError, OSError, RuntimeError) as error:
        return Check(name, WARNING, f"not available: {error}")
    reason = cudnn.unavailable_reason()
    if reason is None:
        return Check(name, OK, f"{package} {_version(package)}, cuDNN {torch.backends.cudnn.version()}")
    if not torch.cuda.is_available():
        return Check(name, OK, f"not used: {reason}")
    return Check(name, WARNING, f"{reason}: convolutions run as torch chooses", f"pip install {package}")


def _memory() -> Check:
    try:
        device = importlib.import_module("monetrun.machine.device")
        kind = device.default_kind()
        found = device.smallest(device.query(kind))
    except ImportError as error:
        return Check("memory", MISSING, f"cannot be read: {error}", "install monetrun again")
    except MonetrunError as error:
        return Check("memory", WARNING, error.message, error.hint)
    gib = 2.0**30
    text = f"{found.device}: {found.free_bytes / gib:.1f} of {found.total_bytes / gib:.1f} GiB free ({found.source})"
    return Check("memory", OK, text)


def _cache() -> Check:
    try:
        store = importlib.import_module("monetrun.machine.store")
        root: Path = store.default_root()
    except ImportError as error:
        return Check("cache", WARNING, f"cannot be used: {error}")
    except MonetrunError as error:
        return Check("cache", WARNING, error.message, error.hint)
    folder = root
    while not os.path.exists(folder):  # the first plan makes the folder; a check does not
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        mend = "every launch will plan again; set MONETRUN_CACHE to a folder of yours"
        return Check("cache", WARNING, f"{root} cannot be written: {error.strerror}", mend)
    return Check("cache", OK, str(root))
