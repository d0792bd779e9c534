"""Free memory per rank of CUDA devices: the real pynvml against a libnvidia-ml.so.1 compiled here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from monetrun.machine import device
from monetrun.machine.device import parse_visible, query, smallest
from support.paths import ROOT

GIB = 1 << 30

SOURCE = ROOT / "tests" / "support" / "fake_nvml.c"
COMPILER = shutil.which("gcc") or shutil.which("cc")

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-aaaabbbb-0000-0000-0000-000000000002"
C = "GPU-cccccccc-0000-0000-0000-000000000003"
M1 = "MIG-11111111-0000-0000-0000-00000000000a"
M2 = "MIG-22222222-0000-0000-0000-00000000000b"

TWO_ALIKE = f"""
board {A} H200 0:1:0 {140 * GIB} {100 * GIB}
board {B} H200 0:2:0 {140 * GIB} {30 * GIB}
"""
UNLIKE = f"""
board {A} T4 0:1:0 {16 * GIB} {15 * GIB}
board {B} H200 0:2:0 {140 * GIB} {30 * GIB}
"""
ONE_IN_MIG_MODE = f"""
board {A} H200 0:1:0 {140 * GIB} {100 * GIB}
emptyslot
mig {M1} {18 * GIB} {17 * GIB}
mig {M2} {71 * GIB} {70 * GIB}
"""
NO_DRIVER = "fail cuInit 999"

RUN = """
import json
from dataclasses import asdict
from monetrun.machine import device
from monetrun.core.errors import DeviceQueryFailed
answer = {"kind": device.default_kind()}
try:
    answer["infos"] = [asdict(info) for info in device.query("cuda", %d)]
except DeviceQueryFailed as failure:
    answer |= {"message": failure.message, "hint": failure.hint}
import sys
answer["torch"] = "torch" in sys.modules
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Answer:
    kind: str
    uuids: list[str]
    free_gib: list[float]
    source: str
    note: str
    message: str
    hint: str
    calls: list[str]


Ask = Callable[..., Answer]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler")
    root = tmp_path_factory.mktemp("fake")
    for name, flags in (("new", []), ("old", ["-DOLD_DRIVER"])):
        (root / name).mkdir()
        for library, more in (("libnvidia-ml.so.1", flags), ("libcuda.so.1", [*flags, "-DFAKE_CUDA"])):
            target = root / name / library
            command = [COMPILER, "-shared", "-fPIC", "-Wall", *more, str(SOURCE), "-o", str(target)]
            subprocess.run(command, check=True)
    (root / "broken").mkdir()
    (root / "broken" / "libnvidia-ml.so.1").write_text("")
    shutil.copy(root / "new" / "libcuda.so.1", root / "broken")
    return root


@pytest.fixture
def ask(libraries: Path, tmp_path: Path) -> Ask:
    def ask(
        gpus: str, ranks: int = 1, *, visible: str | None = None, order: str | None = None, library: str = "new"
    ) -> Answer:
        (tmp_path / "gpus").write_text(gpus)
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
        environ |= {"FAKE_GPUS": str(tmp_path / "gpus"), "FAKE_GPUS_LOG": str(log)}
        environ["LD_LIBRARY_PATH"] = str(libraries / library)
        environ["PYTHONPATH"] = str(SOURCE.parents[1])
        if visible is not None:
            environ["CUDA_VISIBLE_DEVICES"] = visible
        if order is not None:
            environ["CUDA_DEVICE_ORDER"] = order
        command = [sys.executable, "-c", RUN % ranks]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["torch"] is False
        infos = answer.get("infos", [])
        devices = [info["device"] for info in infos]
        assert devices == [f"cuda:{i % len(set(devices))}" for i in range(len(infos))]
        return Answer(
            kind=answer["kind"],
            uuids=[info["uuid"] for info in infos],
            free_gib=[info["free_bytes"] / GIB for info in infos],
            source=infos[0]["source"] if infos else "",
            note=infos[0]["note"] if infos else "",
            message=answer.get("message", ""),
            hint=answer.get("hint", ""),
            calls=log.read_text().splitlines() if log.exists() else [],
        )

    return ask


def test_every_rank_gets_its_own_board_and_the_fullest_one_counts(ask: Ask) -> None:
    answer = ask(TWO_ALIKE, 2)
    assert answer.uuids == [A, B]
    assert answer.free_gib == [100, 30]
    assert (answer.kind, answer.source, answer.note) == ("cuda", "nvml", "in PCI order")
    infos = tuple(
        device.MemoryInfo("cuda", u, 1, int(f), "nvml") for u, f in zip(answer.uuids, answer.free_gib, strict=True)
    )
    assert smallest(infos).uuid == B


def test_memory_is_read_by_uuid_with_the_second_version_of_the_query_and_without_a_context(ask: Ask) -> None:
    calls = ask(TWO_ALIKE, 2).calls
    assert f"nvmlDeviceGetHandleByUUID {B}" in calls
    assert f"nvmlDeviceGetMemoryInfo_v2 {B}" in calls
    assert not [call for call in calls if call.startswith("cu")]
    assert calls[-1].split() == ["nvmlShutdown"]


def test_boards_are_numbered_by_pci_address_whatever_order_nvml_lists_them_in(ask: Ask) -> None:
    lines = TWO_ALIKE.strip().splitlines()
    assert ask("\n".join(reversed(lines)), 2).uuids == [A, B]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("1", [B]),
        ("1,0", [B, A]),
        ("+1", [B]),
        (" 1 , 0", [B, A]),
        ("1gpu", [B]),
        ("1,-1,0", [B]),
        ("1,7,0", [B]),
        (B, [B]),
        (f"{B},{A}", [B, A]),
        ("GPU-aaaab", [B]),
        (f"{B},GPU-ffff,{A}", [B]),
        (f"{B},0", [B]),
        (f"1,{A}", [B]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("0,0", []),
        ("GPU-aaaa", []),  # fits both boards
        ("GPU-ffff", []),
        ("9", []),
    ],
)
def test_cuda_visible_devices_is_honoured(ask: Ask, visible: str, uuids: list[str]) -> None:
    answer = ask(TWO_ALIKE, max(1, len(uuids)), visible=visible)
    assert answer.uuids == uuids
    assert answer.kind == ("cuda" if uuids else "cpu")
    if not uuids:
        assert f"CUDA_VISIBLE_DEVICES is {visible!r}" in answer.message
        assert "no CUDA device is visible" in answer.message


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (None, None),
        ("", ()),
        ("2,0", (2, 0)),
        ("0,0", ()),
        ("-1", ()),
        ("0,,1", (0,)),
        ("NoDevFiles", ()),
        ("GPU-1,GPU-1", ()),
        ("GPU-1,MIG-2", ("GPU-1",)),
        ("MIG-GPU-1/2/0", ("MIG-GPU-1/2/0",)),
    ],
)
def test_visible_devices_are_parsed_as_torch_does(text: str | None, entries: tuple[int | str, ...] | None) -> None:
    assert parse_visible(text) == entries


def test_ranks_that_are_more_than_the_devices_share_them(ask: Ask) -> None:
    answer = ask(TWO_ALIKE, 3)
    assert (answer.uuids, answer.free_gib) == ([A, B, A], [50, 30, 50])
    assert answer.note == "in PCI order; divided by 2 local ranks"
    driver = f"fail nvmlInitWithFlags 9\ncuda {A} {16 * GIB} {12 * GIB} 0\n"
    answer = ask(driver, 3)
    assert (answer.source, answer.free_gib) == ("cuda driver", [4, 4, 4])


def test_unlike_boards_are_in_the_drivers_order(ask: Ask) -> None:
    driver = f"cuda {B} 1 1 0\ncuda {A} 1 1 0\n"  # fastest first
    answer = ask(UNLIKE + driver, 2)
    assert answer.uuids == [B, A]
    assert answer.free_gib == [30, 15]
    assert answer.source == "nvml"
    assert answer.note == (
        "in the CUDA driver's order: the boards are not alike and CUDA_DEVICE_ORDER is not PCI_BUS_ID"
    )
    assert not [call for call in answer.calls if "Ctx" in call]  # the order is known without a context


def test_pci_order_is_used_without_the_driver_if_the_user_sets_it(ask: Ask) -> None:
    answer = ask(UNLIKE + f"cuda {B} 1 1 0\n", 2, order="PCI_BUS_ID")
    assert (answer.uuids, answer.note) == ([A, B], "in PCI order")
    assert not [call for call in answer.calls if call.startswith("cu")]


def test_uuids_need_no_order(ask: Ask) -> None:
    answer = ask(UNLIKE + NO_DRIVER, 2, visible=f"{B},{A}")
    assert (answer.uuids, answer.note) == ([B, A], "by UUID")


def test_an_order_that_could_not_be_verified_is_noted(ask: Ask) -> None:
    answer = ask(UNLIKE + NO_DRIVER, 2)
    assert answer.uuids == [A, B]
    assert answer.note == (
        "in PCI order; CUDA's order could not be read (cuInit: CUDA_ERROR_UNKNOWN (999)) and may differ: "
        "the boards are not alike and CUDA_DEVICE_ORDER is not PCI_BUS_ID"
    )


def test_a_mig_instance_is_read_by_its_own_uuid(ask: Ask) -> None:
    answer = ask(ONE_IN_MIG_MODE + f"cuda {M2} 1 1 0\n", visible=M2)
    assert (answer.uuids, answer.free_gib, answer.source) == ([M2], [70], "nvml")
    assert f"nvmlDeviceGetMemoryInfo_v2 {A}" not in answer.calls


def test_a_board_in_mig_mode_shows_its_first_instance(ask: Ask) -> None:
    answer = ask(ONE_IN_MIG_MODE + f"cuda {M1} 1 1 0\n")
    assert (answer.uuids, answer.free_gib) == ([M1], [17])
    answer = ask(ONE_IN_MIG_MODE + NO_DRIVER, visible="0")
    assert (answer.uuids, answer.free_gib) == ([M1], [17])
    assert "MIG mode" in answer.note


def test_only_as_many_mig_instances_count_as_cuda_shows(ask: Ask) -> None:
    answer = ask(ONE_IN_MIG_MODE + f"cuda {M1} 1 1 0\n", 2, visible=f"{M1},{M2}")
    assert answer.uuids == [M1, M1]
    assert "MIG mode" in answer.note


def test_a_mig_instance_is_read_in_a_container_that_may_not_query_its_parent(ask: Ask) -> None:
    refused = "".join(
        f"fail {function} 4 {A}\n"
        for function in (
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetMaxMigDeviceCount",
            "nvmlDeviceGetMigDeviceHandleByIndex",
        )
    )
    answer = ask(ONE_IN_MIG_MODE + refused + NO_DRIVER, visible=M2)
    assert (answer.uuids, answer.free_gib) == ([M2], [70])
    # without CUDA_VISIBLE_DEVICES only the driver knows which instance it is
    answer = ask(ONE_IN_MIG_MODE + refused + f"cuda {M2} 1 1 0\n")
    assert (answer.uuids, answer.free_gib) == ([M2], [70])


def test_another_containers_board_is_not_counted(ask: Ask) -> None:
    answer = ask(TWO_ALIKE + f"fail nvmlDeviceGetHandleByIndex_v2 4 {A}\n", visible="0")
    assert answer.uuids == [B]


@pytest.mark.parametrize("library", ["new", "old"])
def test_an_old_driver_is_queried_with_the_first_version(ask: Ask, library: str) -> None:
    mismatch = "" if library == "old" else "fail nvmlDeviceGetMemoryInfo_v2 25\n"
    answer = ask(TWO_ALIKE + mismatch, 2, library=library)
    assert (answer.uuids, answer.free_gib, answer.source) == ([A, B], [100, 30], "nvml")
    reason = "Function Not Found" if library == "old" else "Argument version mismatch"
    assert answer.note == f"in PCI order; first version of the memory query: {reason}"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (9, "NVML: Driver Not Loaded"),
        (18, "NVML: RM has detected an NVML/RM version mismatch."),
        (999, "NVML: Unknown Error"),
    ],
)
def test_without_nvml_the_driver_is_read_in_a_process_of_its_own(ask: Ask, code: int, reason: str) -> None:
    driver = f"cuda {A} {140 * GIB} {99 * GIB} 0\ncuda {B} {140 * GIB} {29 * GIB} 0\n"
    answer = ask(TWO_ALIKE + f"fail nvmlInitWithFlags {code}\n" + driver, 2)
    assert (answer.uuids, answer.free_gib, answer.source, answer.note) == ([A, B], [99, 29], "cuda driver", reason)
    assert answer.kind == "cuda"


def test_a_missing_nvml_library_falls_back_to_the_driver(ask: Ask) -> None:
    answer = ask(f"cuda {M1} {18 * GIB} {16 * GIB} 0\n", visible=M1, library="broken")
    assert (answer.uuids, answer.free_gib) == ([M1], [16])
    assert answer.note == "NVML: NVML Shared Library Not Found"


def test_if_neither_can_be_read_both_reasons_and_a_way_out_are_given(ask: Ask) -> None:
    answer = ask(NO_DRIVER, library="broken")
    assert answer.message == (
        "the free memory of the CUDA devices could not be read. NVML: NVML Shared Library Not Found. "
        "CUDA driver: cuInit: CUDA_ERROR_UNKNOWN (999)."
    )
    assert "--budget 12GiB" in answer.hint
    assert answer.kind == "cpu"


def test_a_machine_whose_driver_sees_no_device_is_a_cpu(ask: Ask) -> None:
    answer = ask("", library="broken")
    assert answer.kind == "cpu"
    assert "no CUDA device is visible" in answer.message


def test_a_board_that_shares_the_hosts_memory_counts_what_the_host_has_available(ask: Ask) -> None:
    import psutil

    total_bytes = psutil.virtual_memory().total
    unified = f"board {A} GB10 f:1:0 0 0\nfail nvmlDeviceGetMemoryInfo_v2 3\nfail nvmlDeviceGetMemoryInfo 3\n"
    answer = ask(unified + f"cuda {A} {total_bytes} 12345 1\n")
    assert answer.source == "cuda driver"
    assert answer.note == "NVML: Not Supported; the board shares the host's memory"
    assert answer.free_gib[0] == pytest.approx(psutil.virtual_memory().available / GIB, rel=0.5)


@pytest.mark.parametrize("memory", [f"{10 * GIB} {11 * GIB}", "0 0"])
def test_impossible_figures_of_nvml_are_not_used(ask: Ask, memory: str) -> None:
    answer = ask(f"board {A} H200 0:1:0 {memory}\ncuda {A} {10 * GIB} {8 * GIB} 0\n")
    assert (answer.free_gib, answer.source) == ([8], "cuda driver")
    assert f"{A} has" in answer.note
    assert "which is impossible" in answer.note


@pytest.mark.parametrize("code", [15, 16])
def test_a_lost_board_is_an_error_that_says_reset(ask: Ask, code: int) -> None:
    answer = ask(TWO_ALIKE + f"fail nvmlDeviceGetMemoryInfo_v2 {code} {B}\n", 2)
    assert answer.message.startswith("NVML: GPU ")
    assert "nvidia-smi --gpu-reset" in answer.hint


def test_a_lost_board_that_is_not_used_is_only_noted(ask: Ask) -> None:
    lost = TWO_ALIKE + f"fail nvmlDeviceGetHandleByIndex_v2 15 {A}\n"
    answer = ask(lost, visible=B)
    assert (answer.uuids, answer.note) == ([B], "by UUID; board 0: GPU is lost")
    answer = ask(lost + f"cuda {B} 1 1 0\n")
    assert (answer.uuids, answer.note) == (
        [B],
        "in the CUDA driver's order: a board does not answer; board 0: GPU is lost",
    )
    answer = ask(lost, visible=A)
    assert "board 0: GPU is lost" in answer.message


def test_a_driver_that_fails_midway_gives_a_reason_without_a_traceback(ask: Ask) -> None:
    answer = ask(f"cuda {A} 1 1 0\nfail cuMemGetInfo_v2 2\n", library="broken")
    assert answer.message.endswith("CUDA driver: cuMemGetInfo_v2: CUDA_ERROR_FAKE (2).")


def test_a_kind_of_device_that_does_not_exist_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="device kind is 'tpu'"):
        query("tpu")
    with pytest.raises(ValueError, match="local_world_size is 0"):
        query("cpu", 0)
