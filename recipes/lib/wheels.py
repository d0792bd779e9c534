"""The packages that a check needs on a machine without a network: which are missing, and how they are carried there."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 24, 17)  # pip matches manylinux_2_N exactly


@dataclass(frozen=True, slots=True)
class Need:
    """A package.

    Attributes:
        package: its name in a registry.
        module: what it installs.
        purpose: what it is needed for.
        planning: without it, plans come from the greedy search.
    """

    package: str
    module: str
    purpose: str
    planning: bool = False


NEEDS = (
    Need("torchvision", "torchvision", "the networks"),
    Need("nvidia-ml-py", "pynvml", "free memory and the driver's version"),
    Need("cvxpy", "cvxpy", "integer programs", planning=True),
    Need("qdldl", "qdldl", "cvxpy imports it", planning=True),
    Need("pyscipopt", "pyscipopt", "the solver SCIP", planning=True),
    Need("highspy", "highspy", "the solver HiGHS", planning=True),
    Need("nvidia-cudnn-frontend", "cudnn", "cuDNN's plans"),
    Need("pytest", "pytest", "conformance"),
)
LEFT_OUT = "cvxpy's other requirements (scs, osqp, clarabel, sparsediffpy) are not needed; scs is large"


def present(module: str, folder: Path) -> bool:
    """Whether this interpreter or ``folder`` has the module."""
    found = importlib.util.find_spec(module) or importlib.machinery.PathFinder.find_spec(module, [str(folder)])
    return found is not None


def missing(folder: Path) -> list[Need]:
    """What neither this interpreter nor ``folder`` has."""
    importlib.invalidate_caches()  # packages may just have been installed
    return [need for need in NEEDS if not present(need.module, folder)]


def version(package: str) -> str:
    """The installed version; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def listing(folder: Path, python: str, machine: str) -> str:
    """What is needed, what is missing, and the command that downloads it where there is a network.

    Args:
        folder: where carried packages have been installed.
        python: version of the interpreter that the wheels are for, as "3.12".
        machine: its processor, as ``platform.machine()`` names it.
    """
    lines = []
    for need in NEEDS:
        state = version(need.package) or ("present" if present(need.module, folder) else "missing")
        lines.append(f"{need.package:22} {state:12} {need.purpose}")
    wanted = [need for need in NEEDS if need.planning or need.module == "cudnn" or not version(need.package)]
    names = [need.package + (f"=={version(need.package)}" if version(need.package) else "") for need in wanted]
    tags = [f"manylinux_2_{n}_{machine}" for n in GLIBC_MINORS] + [f"manylinux2014_{machine}"]
    command = ["python -m pip download --no-deps --only-binary=:all:", f"--python-version {python} --implementation cp"]
    command += [" ".join(f"--platform {tag}" for tag in tags), "-d WHEELS", " ".join(names)]
    return "\n".join(
        [
            *lines,
            "",
            f"for Python {python} on {machine}, with the versions installed here; {LEFT_OUT}:",
            "  " + " ".join(command),
            "then: python recipes/gpu_check.py --wheels WHEELS",
        ]
    )


def this_interpreter() -> tuple[str, str]:
    """Its version as "3.12", and the processor's name."""
    return f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine()


def install(wheels: Path, folder: Path) -> tuple[list[str], str]:
    """Install into ``folder``, from the wheels in another folder and nowhere else, what this interpreter lacks.

    Returns:
        The names of the installed wheels, and why pip failed (empty if it did not).
    """
    chosen = [path for need in missing(folder) if (path := _wheel(need.package, wheels)) is not None]
    if not chosen:
        return [], ""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--upgrade", "--target", str(folder)]
    done = subprocess.run([*command, *map(str, chosen)], capture_output=True, text=True, check=False)
    return [path.name for path in chosen], done.stderr.strip() if done.returncode else ""


def _wheel(package: str, wheels: Path) -> Path | None:
    """The newest wheel of a package in a folder."""
    name = re.sub(r"[-_.]+", "_", package).lower()
    found = [p for p in sorted(wheels.glob("*.whl")) if p.name.lower().split("-")[0].replace(".", "_") == name]
    return found[-1] if found else None


def register_checkout(root: Path, folder: Path) -> str:
    """Make the checkout an installed package for processes with ``folder`` on their path, unless one is installed.

    Torch finds monetrun's hook among the entry points of installed packages.

    Returns:
        Why that failed; empty if it did not.
    """
    if version("monetrun"):
        return ""
    shutil.rmtree(folder / "monetrun.egg-info", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    command: Sequence[str] = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""
