"""The sections of gpu_check.py, in the order of their importance, and what their outputs say."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lib.child import Ended
from lib.sections import ROOT, Check, Found, Section, json_lines

RECIPES = ROOT / "recipes"
NETWORKS = ("resnet50", "googlenet", "mobilenet_v2", "vgg16", "unet", "gpt")
FILL = 1.25  # of the device's memory would be the plain peak of auto:large
SHARE = "0.5x"  # the budget beside which the others are seen
GROUPS = {
    "product": "doctor, and launches as users make them: a share, auto, a batch that is too large, NCCL, GradScaler",
    "networks": f"each network in eager mode and within {SHARE} of its plain peak",
    "compile": "each network under torch.compile, without and with its activation_memory_budget",
    "kernels": "CUDA kernels beside a copy of the same bytes",
    "cudnn": "cuDNN's plans beside the convolution that torch chooses",
    "shares": "ResNet-50 with cudnn.benchmark; each network within other shares of its plain peak",
    "conformance": "the tests of operators and kernels on the device; only where asked for",
}
PEAK_TOLERANCE = 0.005  # of the planned peak
RESERVED_TOLERANCE, RESERVED_BYTES = 0.02, 32 << 20  # of the planned reserved bytes, or so many bytes


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the commands of the sections.

    Attributes:
        networks: of ``NETWORKS``.
        shares: budgets of the group ``shares``.
        small: small inputs.
        stand_in: a GPU whose kernels compute nothing, without NCCL and Triton.
        cudnn: whether convolutions run in cuDNN.
        solver_seconds: for each plan.
        algorithm: of the plans.
        compile_backend: of torch.compile.
    """

    networks: tuple[str, ...] = NETWORKS
    shares: tuple[str, ...] = ("0.65x", "0.8x", "0.4x")
    small: bool = False
    stand_in: bool = False
    cudnn: bool = True
    solver_seconds: float = 5.0
    algorithm: str = "hierarchical"
    compile_backend: str = "inductor"


# ---- the commands


def sections(settings: Settings) -> list[Section]:
    """All sections."""
    found = list(product(settings))
    for network in settings.networks:
        found.append(Section(f"{network}:eager", "networks", plain(settings, network), 90, read_training))
        if network != settings.networks[0]:  # whose launch is the product's first
            found.append(half(settings, network, "networks", 150))
    for network in settings.networks:
        words = ("--compile", settings.compile_backend)
        budget = (*words, "--memory-budget", SHARE.rstrip("x"))
        found.append(Section(f"{network}:compile", "compile", plain(settings, network, *words), 150, read_training))
        found.append(
            Section(f"{network}:compile-budget", "compile", plain(settings, network, *budget), 150, read_training)
        )
    found += [kernels(settings), cudnn(settings)]
    command = planned(settings, SHARE, "resnet50", "--cudnn-benchmark")
    needs = "" if settings.cudnn else "--no-cudnn"
    found.append(Section("cudnn-benchmark", "shares", command, 150, read_launch, needs))
    for share in settings.shares:
        for network in settings.networks:
            command = planned(settings, share, network)
            found.append(Section(f"{network}:{share}", "shares", command, 150, read_launch))
    return [*found, conformance(settings)]


def product(settings: Settings) -> Iterable[Section]:
    """Monetrun as it is first used. The first launch also builds the kernels."""
    yield Section("doctor", "product", (*monetrun(), "doctor", "--json"), 60, read_doctor)
    yield half(settings, settings.networks[0], "product", 300)
    yield Section("auto", "product", planned(settings, "auto", settings.networks[0]), 150, read_launch)
    command = planned(settings, "auto", settings.networks[0], "--fill", str(FILL))
    yield Section("auto:large", "product", command, 300, read_launch, "--small" if settings.small else "")
    group = "gloo" if settings.stand_in else "nccl"
    words = ("--process-group", group) if settings.small else ("--process-group", group, "--batch", "64")
    network = "gpt" if settings.small else "resnet50"
    yield Section("nccl", "product", planned(settings, "0.7x", network, *words), 150, read_launch)
    yield Section("scaler", "product", planned(settings, "0.7x", "gpt", "--precision", "fp16"), 200, read_launch)


def half(settings: Settings, network: str, group: str, limit_seconds: float) -> Section:
    """A network within half of its plain peak."""
    return Section(f"{network}:{SHARE}", group, planned(settings, SHARE, network), limit_seconds, read_launch)


def monetrun() -> tuple[str, ...]:
    """The command."""
    return sys.executable, "-m", "monetrun"


def planned(settings: Settings, budget: str, network: str, *words: str) -> tuple[str, ...]:
    """A launch of the training script under a budget."""
    options = ("--solver-seconds", f"{settings.solver_seconds:g}", "--algorithm", settings.algorithm, "--json")
    return *monetrun(), "--budget", budget, *options, *script(settings, network), *words


def plain(settings: Settings, network: str, *words: str) -> tuple[str, ...]:
    """The training script by itself."""
    return sys.executable, *script(settings, network), *words


def script(settings: Settings, network: str) -> tuple[str, ...]:
    """The training script and the words that all its runs have: a plan is kept for them."""
    small = ("--small", "--warm-up", "6", "--steps", "4") if settings.small else ()
    cudnn = () if settings.cudnn else ("--no-cudnn",)
    return str(RECIPES / "gpu_training.py"), network, *small, *cudnn


def kernels(settings: Settings) -> Section:
    """Rates of the CUDA kernels."""
    size = ("--mib", "1", "--rounds", "1") if settings.small else ("--mib", "512", "--rounds", "9")
    command = (sys.executable, str(RECIPES / "bench_kernels.py"), "--device", "cuda", "--json", *size)
    return Section("kernels", "kernels", command, 120, read_rows)


def cudnn(settings: Settings) -> Section:
    """CuDNN's plans of the networks' convolutions."""
    names = [n for n in settings.networks if n != "gpt"]
    small = ("--small", "--most", "3") if settings.small else ()
    command = (sys.executable, str(RECIPES / "bench_cudnn.py"), *small, *names)
    needs = "a stand-in's plans compute nothing" if settings.stand_in else "" if settings.cudnn else "--no-cudnn"
    return Section("cudnn", "cudnn", command, 120, read_rows, needs)


def conformance(settings: Settings) -> Section:
    """The tests that run on ``MONETRUN_TEST_DEVICE``, and those that need a GPU."""
    wanted = re.compile(r"kernel_cases import|mark\.gpu")
    files = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if wanted.search(p.read_text(encoding="utf-8"))]
    options = ("-o", "addopts=", "-p", "no:cacheprovider", "--import-mode=importlib", "-v", "-rfE", "--tb=short")
    parallel = ("-n", "8") if (os.cpu_count() or 1) >= 8 else ()
    command = (sys.executable, "-m", "pytest", *options, *parallel, *(str(p) for p in files))
    needs = "a stand-in's kernels compute nothing" if settings.stand_in else ""
    return Section("conformance", "conformance", command, 540, read_tests, needs)


# ---- what they print


_FOLDER = re.compile(r" at /[^\s,]+")


def read_doctor(ended: Ended) -> Found:
    """The checks of ``monetrun doctor``, without this machine's folders; one that is missing is a failure."""
    found = json.loads(ended.stdout)
    rows = [{**row, "found": _FOLDER.sub("", row["found"].replace(f"{ROOT}{os.sep}", ""))} for row in found]
    missing = [{"what": f"{row['name']}: {row['found']}"} for row in rows if row["state"] == "missing"]
    return Found(figures={"checks": rows}, failures=tuple(missing))


def read_training(ended: Ended) -> Found:
    """What the training script printed."""
    training = _training(ended.stdout)
    return Found(figures={"training": training}, failures=_untrained(ended, training))


def read_launch(ended: Ended) -> Found:
    """What monetrun reported, what the script itself measured, and whether they are within the budget."""
    report: Mapping[str, Any] = next((v for v in json_lines(ended.stdout) if "planned_peak_bytes" in v), {})
    training = _training(ended.stdout)
    failures = _untrained(ended, training)
    if ended.exit_code == 0 and not report:
        failures = (*failures, {"what": "monetrun printed no report"})
    return Found({"report": report, "training": training}, launch_checks(report, training), failures)


def launch_checks(report: Mapping[str, Any], training: Mapping[str, Any]) -> tuple[Check, ...]:
    """Measured <= planned <= budget, reserved <= budget, no retries; a figure that is not reported is not checked."""
    budget, planned_bytes = report.get("budget_bytes"), report.get("planned_peak_bytes")
    planned_reserved = report.get("planned_reserved_bytes")
    least, most = (
        None if planned_bytes is None else int(planned_bytes * (1 + t)) for t in (-PEAK_TOLERANCE, PEAK_TOLERANCE)
    )
    most_reserved = None
    if planned_reserved is not None:
        most_reserved = planned_reserved + max(int(planned_reserved * RESERVED_TOLERANCE), RESERVED_BYTES)
    measured, reserved = report.get("measured_peak_bytes"), report.get("measured_reserved_bytes")
    return (
        Check("planned peak <= budget", planned_bytes, budget),
        Check("measured peak <= planned peak + 0.5%", measured, most),
        Check("planned peak - 0.5% <= measured peak", least, measured),
        Check("planned reserved <= budget", planned_reserved, budget),
        Check("measured reserved <= planned reserved + 2% or 32 MiB", reserved, most_reserved),
        Check("measured reserved <= budget", reserved, budget),
        Check("reserved, as the script reads it, <= budget", training.get("whole_run_reserved_bytes"), budget),
        Check("allocation retries <= 0", report.get("allocation_retries"), 0),
        Check("allocation retries in settled steps <= 0", training.get("settled_allocation_retries"), 0),
    )


def _training(stdout: str) -> dict[str, Any]:
    return next((v["training"] for v in json_lines(stdout) if "training" in v), {})


def _untrained(ended: Ended, training: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    return ({"what": "the script printed no figures"},) if ended.exit_code == 0 and not training else ()


def read_rows(ended: Ended) -> Found:
    """A row for each line of JSON; a row with ``error`` is a failure, a line with ``skipped`` the reason for none."""
    rows = list(json_lines(ended.stdout))
    skipped = next((str(row["skipped"]) for row in rows if "skipped" in row), "")
    errors = [{"what": str(row["error"]), "traceback": str(row.get("traceback", ""))} for row in rows if "error" in row]
    measured = [row for row in rows if "skipped" not in row and "error" not in row]
    return Found({"rows": measured}, failures=tuple(errors), skipped=skipped)


_RESULT = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:(\S+::.*?) )?(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b(?: (\S+::.*))?")


def read_tests(ended: Ended) -> Found:
    """How many tests passed, failed and were skipped, as far as they came; each failed one is a failure."""
    results: dict[str, str] = {}
    for line in ended.stdout.splitlines():
        if found := _RESULT.match(line):
            before, result, after = found.groups()
            results.setdefault((before or after or "").partition(" - ")[0].strip(), result)
    counts = Counter(results.values())
    bad = [name for name, result in results.items() if result in ("FAILED", "ERROR")]
    failures = tuple({"what": f"failed: {name}", "traceback": _section_of(ended.stdout, name)} for name in bad)
    return Found({"tests": dict(counts), "summary": (ended.stdout.strip().splitlines() or [""])[-1]}, failures=failures)


def _section_of(output: str, name: str) -> str:
    """What pytest prints of a failed test, if it came so far."""
    title = name.partition("::")[2].replace("::", ".")
    start = re.search(rf"^_+ (?:ERROR at \w+ of )?{re.escape(title)} _+$", output, re.MULTILINE)
    if start is None:
        return ""
    rest = output[start.end() :]
    end = re.search(r"^(_{3,} .* _{3,}|={3,} .* ={3,})$", rest, re.MULTILINE)
    return rest[: end.start() if end else None].strip()[:3000]
