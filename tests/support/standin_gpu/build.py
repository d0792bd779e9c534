"""Builds the stand-in's libraries, once per torch and per version of their sources."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOT_SUPPORTED = {"cuda": 801, "cublas": 15, "cudnn": 3000, "cusolver": 9, "cusparse": 10, "cufft": 16}
LIBRARIES = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "torch_nvshmem")
# The real libraries answer these without a device.
REAL = re.compile(r"(GetVersion|GetProperty|ErrorString|StatusString|GetStatusName|GetCudartVersion|GetErrorName)$")
SETTERS = re.compile(r"^(cublas|cudnn|cusolver|cusparse|cufft)\w*?(Set|Destroy|destroy)")
GIVES_BACK = re.compile(r"Get|Create|create|bufferSize|BufferSize|Size|Plan|Heuristic|Find|RNN|CTC")


class Unavailable(Exception):
    """The stand-in cannot be built here; the text says why."""


@functools.cache
def build() -> Path:
    """Folder with the three libraries for this interpreter's torch.

    Raises:
        Unavailable: no C compiler, no CUDA build of torch, or no CUDA headers.
    """
    compiler = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("cc")
    if compiler is None:
        raise Unavailable("there is no C compiler (gcc or cc)")
    version, libraries = _torch()
    headers = _headers(libraries)
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.[ch]"), Path(__file__)]):
        digest.update(path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / f"standin-gpu-{os.getuid()}"
    folder = root / f"{version}-{digest.hexdigest()[:12]}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=root) as work:
                made = Path(work) / "made"
                made.mkdir()
                _compile(compiler, headers, libraries, made)
                made.rename(folder)
    return folder


def _torch() -> tuple[str, Path]:
    # Found without importing it, which takes seconds.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unavailable("torch is not installed")
    libraries = Path(spec.origin).parent / "lib"
    version = importlib.metadata.version("torch")
    if not (libraries / "libtorch_cuda.so").exists():
        raise Unavailable(f"torch {version} was built without CUDA")
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^__version__ *= *['\"]([^'\"]+)", text, re.MULTILINE)
    return (found[1] if found else version), libraries


def _headers(libraries: Path) -> list[Path]:
    """Folders for the compiler, the one with the runtime of torch's own CUDA first."""
    dynamic = subprocess.run(
        ["objdump", "-p", str(libraries / "libc10_cuda.so")], capture_output=True, text=True, check=True
    )
    found = re.search(r"NEEDED\s+libcudart\.so\.(\d+)", dynamic.stdout)
    major = int(found[1]) if found else 0
    site = libraries.parent.parent
    folders = [*sorted(site.glob("nvidia/*/include")), site / "triton" / "backends" / "nvidia" / "include"]
    if os.environ.get("CUDA_HOME"):
        folders.append(Path(os.environ["CUDA_HOME"]) / "include")
    folders += sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
    runtimes = [folder for folder in folders if _runtime_major(folder) == major and (folder / "cuda.h").exists()]
    if not runtimes:
        raise Unavailable(
            f"there are no headers of CUDA {major} (cuda.h, cuda_runtime_api.h): looked in {site}/nvidia/*/include, "
            f"{site}/triton, CUDA_HOME and /usr/local/cuda*"
        )
    # nvidia-cuda-runtime's wheel has its crt/ in another wheel, which few have; Triton's has one.
    hosts = [folder for folder in folders if (folder / "crt" / "host_defines.h").exists()]
    if not hosts:
        raise Unavailable(f"{runtimes[0]} has no crt/host_defines.h, and no other folder of CUDA headers has")
    return [runtimes[0], *(hosts[:1] if runtimes[0] not in hosts else [])]


def _runtime_major(folder: Path) -> int | None:
    try:
        text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) // 1000 if found else None


def _compile(compiler: str, headers: list[Path], libraries: Path, out: Path) -> None:
    base = [compiler, "-std=gnu11", "-O1", "-w", "-fPIC", "-pthread", f"-I{HERE}", *(f"-I{path}" for path in headers)]

    def objects(*names: str) -> list[str]:
        for name in names:
            _run([*base, "-c", str(HERE / f"{name}.c"), "-o", str(out / f"{name}.o")])
        return [str(out / f"{name}.o") for name in names]

    def link(target: str, inputs: list[str], *flags: str) -> None:
        _run([*base, "-shared", *inputs, "-o", str(out / target), *flags, "-ldl"])

    driver = objects("board", "memory", "streams", "driver")
    (out / "rest_driver.c").write_text("\n".join(_driver_rest(libraries, set(_symbols(driver, defined=True)))))
    link("libcuda.so.1", [*driver, str(out / "rest_driver.c")], "-Wl,-soname,libcuda.so.1")

    runtime = objects("runtime", "libraries", "cudnn")
    (out / "rest_runtime.c").write_text("\n".join(_runtime_rest(libraries, set(_symbols(runtime, defined=True)))))
    inputs = [*runtime, str(out / "rest_runtime.c"), str(out / "libcuda.so.1")]
    link("libstandin_runtime.so", inputs, "-Wl,-rpath,$ORIGIN")

    inputs = objects("nvml", "board")
    link("libnvidia-ml.so.1", inputs, "-Wl,-soname,libnvidia-ml.so.1")
    for path in out.glob("*.o"):
        path.unlink()


def _driver_rest(libraries: Path, defined: set[str]) -> Iterator[str]:
    """Every call of the driver that torch names and the stand-in does not define."""
    names = set(_symbols([str(libraries / "libcaffe2_nvrtc.so")], defined=False))
    names |= {
        text.decode() for text in re.findall(rb"\0(cu[A-Z]\w{3,60})(?=\0)", (libraries / "libc10_cuda.so").read_bytes())
    }
    yield "#include <stdio.h>"
    for name in sorted(names - defined):
        if re.match(r"cu[A-Z]", name):
            yield (
                f'int {name}() {{ static int said; if (!said++) fputs("stand-in GPU: it has no {name}\\n", stderr); '
                "return 801; }"
            )


def _runtime_rest(libraries: Path, defined: set[str]) -> Iterator[str]:
    """Every call of CUDA's libraries that torch makes and the stand-in does not define."""
    paths = [str(path) for name in LIBRARIES if (path := libraries / f"lib{name}.so").exists()]
    yield "int standin_lacks(const char *name, int *said, int code); int standin_compute(void);"
    for name in sorted(set(_symbols(paths, defined=False)) - defined):
        found = re.match(r"_*(cuda|cublas|cudnn|cusolver|cusparse|cufft)[A-Z]", name) or re.match(r"(cublas)Lt", name)
        if found is None or REAL.search(name):
            continue
        if SETTERS.match(name):
            yield f"int {name}() {{ return 0; }}"
        elif found[1] in ("cublas", "cudnn") and not GIVES_BACK.search(name):
            yield f"int {name}() {{ return standin_compute(); }}"
        else:
            code = NOT_SUPPORTED[found[1]]
            yield f'int {name}() {{ static int said; return standin_lacks("{name}", &said, {code}); }}'


def _symbols(paths: Iterable[str], *, defined: bool) -> Iterator[str]:
    dynamic = [] if defined else ["-D"]
    which = "--defined-only" if defined else "--undefined-only"
    for path in paths:
        for line in _run(["nm", *dynamic, which, path]).splitlines():
            fields = line.split()
            if len(fields) >= 2:
                yield fields[-1].partition("@")[0]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout
