"""Convolutions of several shapes, and the error allowed between two ways to compute one."""

import torch

from monetrun.ops.memory_format import memory_format
from support.kernel_cases import DEVICE

aten = torch.ops.aten


# sizes of input and weight, stride, padding, dilation, transposed, output padding, groups
CONVOLUTIONS = {
    "2d": ((2, 4, 9, 7), (6, 4, 3, 3), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    "1x1": ((2, 4, 5, 6), (6, 4, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "depthwise": ((3, 4, 6, 6), (4, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    "empty": ((0, 4, 6, 6), (4, 4, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "transposed": ((2, 4, 5, 6), (4, 3, 2, 2), [2, 2], [0, 0], [1, 1], True, [1, 0], 2),
    "3d": ((2, 3, 4, 5, 6), (4, 3, 3, 3, 3), [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
}


def operands(case, dtype, last):
    """Input, weight and output gradient in one format, and the rest of the arguments."""
    x_size, weight_size, *window = CONVOLUTIONS[case]
    form = memory_format(len(x_size), last)
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE, dtype).contiguous(memory_format=form)
        for size in (x_size, weight_size)
    )
    y = aten.convolution(x, weight, None, *window)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y).contiguous(memory_format=form)
    return x, weight, grad, window


def assert_within_rounding(given, expected, wide, form=None):
    """At most twice eager's distance from float64, and in the memory format ``form``."""
    assert given.dtype == expected.dtype
    assert form is None or given.is_contiguous(memory_format=form)
    error, eager = ((value.double() - wide).norm() for value in (given, expected))
    assert error <= 2 * eager + 1e-6 * wide.norm()
