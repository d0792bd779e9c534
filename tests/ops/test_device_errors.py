"""Which errors end the run: those of the device itself, not of one call."""

from __future__ import annotations

import pytest
import torch

from monetrun.ops import device_errors

ILLEGAL = "CUDA error: an illegal memory access was encountered"


def works():
    pass


def fails():
    raise RuntimeError(ILLEGAL)


@pytest.mark.parametrize(
    ("error", "synchronize", "sticky"),
    [
        (torch.AcceleratorError(ILLEGAL), fails, True),
        (RuntimeError(ILLEGAL), fails, True),
        (RuntimeError(f"Exception raised from here: {ILLEGAL}"), fails, True),
        (RuntimeError("CUDA error: invalid configuration argument"), works, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx"), works, False),
    ],
)
def test_an_error_is_the_devices_if_waiting_for_it_fails_too(error, synchronize, sticky):
    assert device_errors.is_sticky(error, synchronize) is sticky


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("expected a matrix"), ValueError(ILLEGAL)]
)
def test_other_errors_do_not_wait_for_the_device(error):
    assert not device_errors.is_sticky(error, lambda: pytest.fail("waits"))
