"""The roofline model of a named device: a call takes bytes over bandwidth or flops over rate, whichever is longer.

It is the deterministic alternative to measuring, and the device need not be present. Peaks are from data sheets, and
each class of operator reaches one fixed share of them. Against TensorFlow's published benchmarks of training on one
P100 (DGX-1, fp32, batch 64, synthetic data), the model gives 1.06 times the measured images per second for ResNet-50
(219), 1.02 times for ResNet-152 (91.8), 0.90 for VGG-16 (154) and 1.28 for Inception v3 (142). It leaves out FFT
convolutions (faster than their flops), depthwise kernels (slower than their bytes), workspaces and caches.

ATen's operators are listed here; those of ``torch.ops.monet`` declare their cost where they are defined
(``monetrun.ops.definition.Cost``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from monetrun.core.errors import UsageError
from monetrun.ops.definition import cost_of

aten = torch.ops.aten

MEASURED = "measured"
PREFIX = "roofline:"

# Shares of the peaks that well-tuned kernels reach, over the shapes of a network rather than at the best one: cuBLAS
# and cuDNN on ordinary units, the same on tensor cores (whose tiles small shapes do not fill), and STREAM-like kernels.
DENSE_SHARE = 0.6
TENSOR_CORE_SHARE = 0.4
MEMORY_SHARE = 0.75

# cuDNN runs fp32 convolutions of 3 x 3 at stride 1 by Winograd's algorithm F(2 x 2, 3 x 3), which needs this many
# times fewer multiplications (Lavin and Gray, arXiv 1509.09308, section 4.1).
WINOGRAD_SAVING = 2.25


@dataclass(frozen=True, slots=True)
class Device:
    """One device's data sheet.

    Attributes:
        name: as in ``roofline:<name>``.
        memory_bytes: as its driver reports it.
        bytes_per_second: peak of its memory.
        flops_per_second: peak (multiply and add are two) without sparsity, by ``"fp64"``, ``"fp32"``, ``"tf32"``,
            ``"fp16"``, ``"bf16"``; a missing one runs at the rate of fp32.
        tensor_cores: the entries of ``flops_per_second`` that are tensor cores' rates.
        launch_seconds: what the smallest call takes.
        source: where these values are from.
        winograd: whether its convolutions use Winograd's algorithm.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    tensor_cores: frozenset[str]
    launch_seconds: float
    source: str
    winograd: bool = True

    def dense_seconds(self, flops: float, kind: str) -> float:
        """Seconds of ``flops`` in matrix products of ``kind`` (``"fp32"``, ...)."""
        if kind not in self.flops_per_second:
            kind = "fp32"
        share = TENSOR_CORE_SHARE if kind in self.tensor_cores else DENSE_SHARE
        return flops / (share * self.flops_per_second[kind])

    def memory_seconds(self, nbytes: int) -> float:
        """Seconds to read or write ``nbytes``."""
        return nbytes / (MEMORY_SHARE * self.bytes_per_second)


_TENSOR_CORES = frozenset({"tf32", "fp16", "bf16"})

DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device(
            "p100",
            16280 << 20,
            732e9,
            {"fp64": 5.3e12, "fp32": 10.6e12, "fp16": 21.2e12},
            frozenset(),
            5e-6,
            "NVIDIA Tesla P100 data sheet (SXM2, 16 GB), October 2017",
        ),
        Device(
            "v100",
            16160 << 20,
            900e9,
            {"fp64": 7.8e12, "fp32": 15.7e12, "fp16": 125e12},
            frozenset({"fp16"}),
            5e-6,
            "NVIDIA V100 data sheet (SXM2, 16 GB), January 2020",
        ),
        Device(
            "a100",
            81920 << 20,
            2039e9,
            {"fp64": 9.7e12, "fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
            _TENSOR_CORES,
            5e-6,
            "NVIDIA A100 data sheet (SXM4, 80 GB), June 2021",
        ),
        Device(
            "h100",
            81559 << 20,
            3.35e12,
            {"fp64": 34e12, "fp32": 67e12, "tf32": 494.5e12, "fp16": 989.5e12, "bf16": 989.5e12},
            _TENSOR_CORES,
            5e-6,
            "NVIDIA H100 data sheet (SXM5, 80 GB), 2023; tensor cores at half of its rates with sparsity",
        ),
        Device(
            "h200",
            143771 << 20,
            4.8e12,
            {"fp64": 34e12, "fp32": 67e12, "tf32": 494.5e12, "fp16": 989.5e12, "bf16": 989.5e12},
            _TENSOR_CORES,
            5e-6,
            "NVIDIA H200 data sheet (SXM, 141 GB), 2024; tensor cores at half of its rates with sparsity",
        ),
        Device(
            "cpu",
            16 << 30,
            21.3e9,
            {"fp64": 96e9, "fp32": 192e9},
            frozenset(),
            2e-6,
            "no device in particular: two x86 cores at 3 GHz with two AVX2 FMA units each, one channel of DDR4-2666",
            winograd=False,
        ),
    )
}


def names() -> list[str]:
    """The cost models that ``parse`` accepts."""
    return [MEASURED, *(PREFIX + name for name in DEVICES)]


def parse(text: str) -> Device | None:
    """The device that ``text`` (``"roofline:p100"``) names; None for ``"measured"``.

    Raises:
        UsageError: there is no such cost model; the hint lists the names.
    """
    if text == MEASURED:
        return None
    device = DEVICES.get(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else None
    if device is None:
        raise UsageError(f"{text!r} is none of the cost models", f"there are: {', '.join(names())}")
    return device


def estimate(target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any, model: Device) -> float:
    """Seconds that one call takes on ``model``.

    Args:
        target: an operator overload (``aten``'s or another library's).
        arguments: its positional arguments; tensors may be fake or on ``meta``.
        keywords: its keyword arguments.
        result: what the call gave.
        model: the device.
    """
    inputs, outputs = _tensors((list(arguments), dict(keywords))), _tensors(result)
    if _is_view(target, inputs, outputs):
        return 0.0
    cost = cost_of(target)
    if cost.like is not None:
        target, arguments, keywords = cost.like, arguments[: len(cost.like._schema.arguments)], {}
    name = str(getattr(target, "overloadpacket", target)).rpartition(".")[2]
    convolution = _CONVOLUTIONS[target](*arguments) if target in _CONVOLUTIONS else None
    if convolution is not None:
        inputs = convolution.reads
    elif name in _SHAPE_OF_SECOND:
        inputs = _tensors((arguments[0], list(arguments[2:]), dict(keywords)))
    read, written = _bytes_moved(name, inputs, outputs)
    memory = model.memory_seconds(cost.reads * read + cost.writes * written)
    kind = _kind(inputs, convolution is not None, model)
    if convolution is None:
        flops = float(_flops(target, arguments, keywords, result))
    else:
        flops = convolution.flops
        if model.winograd and kind == "fp32" and convolution.winograd:
            flops /= WINOGRAD_SAVING
    return max(model.launch_seconds, model.dense_seconds(flops, kind), memory)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_view(target: Any, inputs: Iterable[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    schema = getattr(target, "_schema", None)
    if not outputs or (schema is not None and schema.is_mutable):
        return False
    storages = {t.untyped_storage()._cdata for t in inputs}
    return all(t.untyped_storage()._cdata in storages for t in outputs)


# The statistics of a normalization over a batch take a pass of their own, in both directions.
_TWO_PASSES = ("native_batch_norm", "cudnn_batch_norm", "native_group_norm")
# They read only the shape of their second argument.
_SHAPE_OF_SECOND = frozenset(
    {
        "max_pool2d_with_indices_backward",
        "max_pool3d_with_indices_backward",
        "avg_pool2d_backward",
        "avg_pool3d_backward",
        "_adaptive_avg_pool2d_backward",
        "_adaptive_avg_pool3d_backward",
    }
)
# They read as many bytes of their first argument as they write, whatever its size.
_GATHERS = frozenset({"embedding", "index", "index_select", "gather"})


def _bytes_moved(name: str, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Bytes that an operator of ATen reads and writes."""
    written = sum(_touched(t) for t in outputs)
    if name.endswith("_like") or name.startswith("new_"):
        return 0, written  # only the argument's shape is read
    sizes = [_touched(t) for t in {(t.untyped_storage()._cdata, t.storage_offset()): t for t in inputs}.values()]
    if name in _GATHERS and sizes:
        sizes[0] = min(sizes[0], written)
    passes = 2 if any(part in name for part in _TWO_PASSES) else 1
    return passes * sum(sizes), written


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's distinct elements: a broadcast dimension counts as one element."""
    if tensor.layout is not torch.strided:
        return int(tensor.numel() * tensor.element_size())
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


@dataclass(frozen=True, slots=True)
class _Convolution:
    """One call of a convolution or its backward: flops, whether Winograd's algorithm applies, and tensors read."""

    flops: float
    winograd: bool
    reads: list[torch.Tensor]


def _forward(x: Any, weight: Any, bias: Any, *window: Any) -> _Convolution:
    stride, padding, dilation, transposed, _, groups = window
    if transposed:
        spatial = x.shape[2:]
    else:
        sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        spatial = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
    reads = [t for t in (x, weight, bias) if t is not None]
    return _convolution(x.shape[0], spatial, weight, stride, dilation, groups, reads)


def _backward(grad: Any, x: Any, weight: Any, bias_sizes: Any, *window: Any) -> _Convolution:
    stride, _, dilation, transposed, _, groups, (of_input, of_weight, _) = window
    spatial = (x if transposed else grad).shape[2:]
    reads = [grad, *([weight] if of_input else []), *([x] if of_weight else [])]
    once = _convolution(grad.shape[0], spatial, weight, stride, dilation, groups, reads)
    return replace(once, flops=once.flops * (bool(of_input) + bool(of_weight)))


def _convolution(
    batch: int, spatial: Iterable[int], weight: Any, stride: Any, dilation: Any, groups: int, reads: list[torch.Tensor]
) -> _Convolution:
    """One direction: each weight is used once for each position of the output (of the input where transposed)."""
    winograd = tuple(weight.shape[2:]) == (3, 3) and {*stride, *dilation, groups} == {1}
    return _Convolution(2.0 * batch * math.prod(spatial) * weight.numel(), winograd, reads)


# torch's own formula counts a grouped weight's gradient once for each group.
_CONVOLUTIONS: dict[Any, Callable[..., _Convolution]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}

# torch 2.11 has no formula for the CPU's kernels, whose first arguments are the same tensors
_COUNTED_AS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def _flops(target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> int:
    """Flops by torch's own formulas; 0 for an operator without one."""
    from torch.utils.flop_counter import flop_registry  # here, since it imports triton

    packet = getattr(target, "overloadpacket", None)
    packet = _COUNTED_AS.get(packet, packet)
    if packet not in flop_registry:
        return 0
    try:
        flops: int = flop_registry[packet](*arguments, **keywords, out_val=result)
    except AssertionError:  # torch 2.11's of attention does not know that several queries may share keys
        return 0
    return flops


def _kind(inputs: Iterable[torch.Tensor], convolution: bool, model: Device) -> str:
    """The entry of ``flops_per_second`` that applies to the operands' dtype."""
    dtype = next((t.dtype for t in inputs if t.dtype.is_floating_point), torch.float32)
    if dtype is torch.float32:
        # torch's defaults: TensorFloat-32 in convolutions, and in matrix products where the script allows it
        allowed = convolution or torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "tf32" if allowed and "tf32" in model.flops_per_second else "fp32"
    return {torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32")
