"""Compiles the CUDA kernels of ``cuda_ops/`` to device code at first use, and keeps it with the native libraries.

NVRTC compiles them: torch's wheels for CUDA depend on it and on its bindings, so that neither the CUDA toolkit, nor a
C++ compiler, nor headers are needed, and no GPU either. Where it is missing, nvcc compiles the same source.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from monetrun.core import native
from monetrun.core.native import NativeBuildFailed

_FLAGS = ("-std=c++17",)


@dataclass(frozen=True, slots=True)
class CudaCompiler:
    """What compiles CUDA kernels.

    Attributes:
        name: "NVRTC 13.2", or nvcc's path.
        nvrtc: the module of NVRTC's bindings; None for nvcc.
    """

    name: str
    nvrtc: ModuleType | None = None


@functools.cache
def compiler() -> CudaCompiler:
    """NVRTC, else nvcc: that of ``$CUDA_HOME``, or on the path.

    Raises:
        NativeBuildFailed: there is neither.
    """
    try:
        from cuda.bindings import nvrtc

        error, *version = nvrtc.nvrtcVersion()
        if error == nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return CudaCompiler(f"NVRTC {version[0]}.{version[1]}", nvrtc)
        reason = f"NVRTC does not work ({error.name})"
    except (ImportError, RuntimeError) as error:  # no package, or no library that it can load
        reason = f"there is no NVRTC ({str(error).strip().partition(chr(10))[0]})"
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else shutil.which("nvcc")
    if found:
        return CudaCompiler(found)
    where = f"in CUDA_HOME, {home}" if home else "on the path"
    raise NativeBuildFailed(
        f"{reason}, and no nvcc {where}", "pip install cuda-bindings nvidia-cuda-nvrtc, in the versions of torch's CUDA"
    )


def build(source: str, architecture: str, flags: Sequence[str] = ()) -> Path:
    """Compile ``source`` (a file name in ``native.source_folder()``) for a device, unless that was done before.

    Args:
        source: file name; what it includes with quotes lies in the same folder.
        architecture: of the device, such as "sm_90". None need be present.
        flags: such as "-DNAME=VALUE".

    Returns:
        The path of a file for ``cuModuleLoad``: a cubin; PTX where the compiler is older than the architecture.

    Raises:
        NativeBuildFailed: there is no compiler, or its log.
    """
    path = native.source_folder() / source
    found = compiler()
    options = [*_FLAGS, *flags]
    if found.nvrtc is None:
        command = [found.name, "-cubin", f"-arch={architecture}", *options, str(path)]
        parts = [native.identity(found.name), architecture, *options]
        return native.cached(path, ".cubin", parts, lambda out: native.compile_by([*command, "-o", str(out)]))
    nvrtc = found.nvrtc
    target = _target(architecture, _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs()))
    options += [f"--gpu-architecture={target}", f"-I{path.parent}"]
    suffix = ".cubin" if target.startswith("sm_") else ".ptx"
    parts = [found.name, target, *options[:-1]]  # the folder changes nothing
    return native.cached(path, suffix, parts, lambda out: _compile(nvrtc, path, options, out))


def _target(architecture: str, known: Sequence[int]) -> str:
    """The architecture itself, or the newest that the compiler knows: as PTX, unless the device runs its code."""
    wanted = int(re.sub(r"\D", "", architecture))
    older = [number for number in known if number <= wanted]
    if not older:
        raise NativeBuildFailed(
            f"NVRTC compiles for sm_{min(known)} and newer, not for {architecture}", "use a newer GPU"
        )
    return f"sm_{max(older)}" if max(older) // 10 == wanted // 10 else f"compute_{max(older)}"


def _checked(nvrtc: ModuleType, answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise NativeBuildFailed(f"NVRTC failed: {error.name}", "see monetrun doctor")
    return values[0] if values else None


def _compile(nvrtc: ModuleType, path: Path, options: Sequence[str], out: Path) -> None:
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, None, None))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            tail = "\n".join(log.decode(errors="replace").strip("\0\n ").splitlines()[-12:])
            raise NativeBuildFailed(f"NVRTC cannot compile {path.name} ({error.name}):\n{tail}", " ".join(options))
        binary = out.suffix == ".cubin"
        code = bytearray(_checked(nvrtc, (nvrtc.nvrtcGetCUBINSize if binary else nvrtc.nvrtcGetPTXSize)(program)))
        _checked(nvrtc, (nvrtc.nvrtcGetCUBIN if binary else nvrtc.nvrtcGetPTX)(program, code))
        out.write_bytes(code if binary else code.rstrip(b"\0"))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
