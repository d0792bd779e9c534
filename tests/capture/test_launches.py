"""Launches that a program makes without Python: the same kernels with the same arguments, run on the CPU."""

from __future__ import annotations

import ctypes
import math
import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from monetrun.capture import program as programs
from monetrun.ops import cuda, definition, kernels, registry
from monetrun.ops.cuda import launch
from monetrun.ops.cuda.recorded import recorded
from support import cuda_on_cpu
from support.kernel_cases import DTYPES, assert_same, numbers

pytestmark = pytest.mark.skipif(programs.unavailable_reason() != "", reason="there is no compiler")

NO_CONTEXT = 201
WINDOW = ([3, 2], [2, 2], [1, 0], [1, 1])
_CALLED = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


def cases(dtype):
    """Operators' names and arguments; an image and its gradient do not lie at a multiple of 16 bytes everywhere."""
    x, grad = numbers((2, 6, 8, 8), dtype), numbers((2, 6, 8, 8), dtype, seed=1)
    last = x.contiguous(memory_format=torch.channels_last)
    odd = numbers((2 * 6 * 8 * 8 + 1,), dtype)[1:].view(2, 6, 8, 8)
    pooled = numbers((2, 6, 4, 4), dtype, seed=2)
    index = torch.ops.monet.max_pool2d_index(x, *WINDOW, False)
    mask, bits = torch.ops.monet.range_mask(x, 0.0, 6.0), torch.ops.monet.nonzero_mask(grad)
    c, rstd = numbers((6,), dtype, special=False), numbers((2, 3), dtype, special=False).abs()
    rows, of_rows = numbers((12, 64), dtype, special=False), numbers((12, 1), dtype, special=False).abs()
    w = numbers((64,), dtype, special=False)
    yield from (
        ("range_mask", (x, 0.0, math.inf)),
        ("range_mask", (odd, 0.0, 6.0)),
        ("nonzero_mask", (x > 0,)),
        ("mask_backward_", (grad, mask, 0.1)),
        ("mask_backward", (odd, mask, 0.0)),
        ("mask_scale", (last, bits, 1.5)),
        ("dropout_backward_", (odd, bits, 2.0)),
        ("hardswish_output_backward_", (grad, x, mask)),
        ("max_pool2d_index", (last, *WINDOW, True)),
        ("max_pool2d_index_backward", (pooled, index[:, :, :4, :4].contiguous(), [2, 6, 8, 8], *WINDOW, False)),
        ("max_pool2d_input_backward", (numbers((2, 6, 4, 4), dtype), x, [2, 2], [2, 2], [0, 0], [1, 1], False)),
        ("batch_norm_act", (x, c, None, c, c, grad, 0.0, 6.0)),
        ("layer_norm_output_backward", (rows, rows.roll(1), [64], of_rows, w, w, [True, True, False])),
        ("channel_norm_output_backward", (grad.abs(), x.nan_to_num(1, 1, 1), rstd, c, c, [True] * 3)),
        ("affine_invertible", (c, None, 0.5)),
    )


class Driver:
    """``cuLaunchKernel`` that runs the kernels on the CPU, and what torch would load."""

    def __init__(self):
        self.kernels, self.launches, self.error = [], 0, 0
        self.called = _CALLED(self.launch)

    def loaded(self, name, dtype, device):
        letters = launch.signatures()[name].replace("A", launch.DTYPES[dtype][1])
        self.kernels.append((name, dtype, letters))
        return len(self.kernels), letters

    def launch(self, handle, blocks, *rest):
        if self.error:
            error, self.error = self.error, 0
            return error
        name, dtype, letters = self.kernels[handle - 1]
        parameters = rest[7]
        types = [cuda_on_cpu._TYPES[letter] for letter in letters]
        given = [ctypes.cast(p, ctypes.POINTER(t))[0] for t, p in zip(types, parameters[: len(types)], strict=True)]
        run = getattr(cuda_on_cpu._library(dtype), f"run_{name}")
        run.argtypes, run.restype = [ctypes.c_uint, ctypes.c_uint, *types], None
        run(blocks, rest[2], *given)
        self.launches += 1
        return 0


@pytest.fixture
def driver(monkeypatch):
    registry.load()
    made = Driver()
    monkeypatch.setattr(launch, "loaded", made.loaded)
    monkeypatch.setattr(launch, "driver", lambda: ctypes.cast(made.called, ctypes.c_void_p).value)

    def of_cpu(target, arguments, device):
        return recorded(cuda.FUNCTIONS[target._schema.name.removeprefix("monet::")], arguments, 0)

    monkeypatch.setattr(kernels, "recorded", of_cpu)
    with cuda_on_cpu.running():
        yield made


def program_of(name, arguments):
    """A program of one call."""
    graph, mode = fx.Graph(), FakeTensorMode()
    given = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            node = graph.placeholder(f"a{len(given)}")
            node.meta["val"] = mode.from_tensor(argument)
            argument = node
        given.append(argument)
    called = graph.call_function(getattr(torch.ops.monet, name).default, tuple(given))
    returns = called.target._schema.returns
    graph.output(
        [graph.call_function(operator.getitem, (called, i)) for i in range(len(returns))]
        if len(returns) > 1
        else [called]
    )
    return programs.program(fx.GraphModule({}, graph))


def copies(arguments):
    """The same tensors, each in a storage of its own, at the same distance from a multiple of 16 bytes."""
    found = []
    for a in arguments:
        if isinstance(a, torch.Tensor):
            whole = torch.empty(a.untyped_storage().nbytes() // a.element_size(), dtype=a.dtype)
            a = whole.as_strided(a.shape, a.stride(), a.storage_offset()).copy_(a)
        found.append(a)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_recorded_launch_gives_what_the_operators_own_function_gives(driver, dtype):
    for name, arguments in cases(dtype):
        mine, theirs = copies(arguments), copies(arguments)
        run = program_of(name, mine)
        expected = cuda.FUNCTIONS[name](*theirs)
        before = driver.launches
        got = run([a for a in mine if isinstance(a, torch.Tensor)])
        assert driver.launches > before, name
        for one, other in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert_same(one, other)
        for one, other in zip(mine, theirs, strict=True):  # written in place, or as it was
            if isinstance(one, torch.Tensor):
                assert_same(one, other)


def test_tensors_of_other_sizes_and_a_thread_without_a_context_are_left_to_the_operator(driver):
    x = numbers((4, 10), torch.float32)
    run = program_of("range_mask", (x, 0.0, 6.0))
    expected = definition.REFERENCES["range_mask"]
    run([x])
    assert driver.launches == 1
    other = numbers((3, 9), torch.float32)
    assert_same(*run([other]), expected(other, 0.0, 6.0))
    assert_same(*run([x.t()]), expected(x.t(), 0.0, 6.0))
    driver.error = NO_CONTEXT
    assert_same(*run([x]), expected(x, 0.0, 6.0))
    assert driver.launches == 1
    driver.error = 700
    with pytest.raises(RuntimeError, match="CUDA driver error 700"):
        run([x])


def test_what_is_not_known_beforehand_is_left_to_the_operator(driver):
    x = torch.empty(2, 3)
    assert recorded(lambda x: x.new_empty(4)[1:], (x,), 0) is None
    assert recorded(lambda x: x.new_empty(int(x.sum())), (x,), 0) is None
    assert recorded(cuda.FUNCTIONS["max_pool2d_index"], (x, *WINDOW, False), 0) is None
