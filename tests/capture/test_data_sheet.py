"""The roofline of a GPU that is present, from what its driver says."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from monetrun.capture import data_sheet, roofline


@dataclass
class Properties:
    name: str
    major: int
    minor: int
    multi_processor_count: int
    clock_rate: int = 0
    memory_clock_rate: int = 0
    memory_bus_width: int = 0
    total_memory: int = 80 << 30


# what drivers give for boards whose data sheets are known
BOARDS = {
    "p100": Properties("Tesla P100-SXM2-16GB", 6, 0, 56, 1_480_500, 715_000, 4096),
    "v100": Properties("Tesla V100-SXM2-16GB", 7, 0, 80, 1_530_000, 877_000, 4096),
    "a100": Properties("NVIDIA A100-SXM4-80GB", 8, 0, 108, 1_410_000, 1_593_000, 5120),
    "h100": Properties("NVIDIA H100 80GB HBM3", 9, 0, 132, 1_980_000, 2_619_000, 5120),
}


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_clocks_and_units_give_the_peaks_of_the_data_sheet(name):
    found, sheet = data_sheet.of_gpu(BOARDS[name]), roofline.DEVICES[name]
    assert found.bytes_per_second == pytest.approx(sheet.bytes_per_second, rel=0.01)
    # tensor cores of an H100 are listed at a lower clock than its driver's
    assert found.flops_per_second == pytest.approx(sheet.flops_per_second, rel=0.09)
    assert found.tensor_cores & found.flops_per_second.keys() == sheet.tensor_cores
    assert found.name == BOARDS[name].name


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_without_clocks_the_data_sheet_of_its_name_stands_in(name):
    board = BOARDS[name]
    unclocked = Properties(board.name, board.major, board.minor, board.multi_processor_count, 1, 1)
    found = data_sheet.of_gpu(unclocked)
    assert found.bytes_per_second == roofline.DEVICES[name].bytes_per_second
    assert found.flops_per_second == roofline.DEVICES[name].flops_per_second


def test_an_unknown_name_is_scaled_from_its_architectures_board_by_its_multiprocessors():
    found = data_sheet.of_gpu(Properties("Some GPU", 9, 0, 66))
    assert found.bytes_per_second == roofline.DEVICES["h100"].bytes_per_second / 2
    assert found.flops_per_second["fp32"] == roofline.DEVICES["h100"].flops_per_second["fp32"] / 2
    assert data_sheet.of_gpu(Properties("Newer", 13, 0, 132)).flops_per_second["bf16"] == 989.5e12


def test_a_cpu_is_of_no_particular_make():
    assert data_sheet.present(torch.device("cpu")) is roofline.DEVICES["cpu"]


def test_a_gpu_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: asked.append(d) or BOARDS["a100"])
    assert data_sheet.present(torch.device("cuda", 1)).name == "NVIDIA A100-SXM4-80GB"
    assert asked == [torch.device("cuda", 1)]
