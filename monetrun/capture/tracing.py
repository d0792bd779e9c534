"""Makes the traced graph call the kernels that eager calls, and splits convolutions' backwards (MONeT, section 4)."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch.fx.experimental import proxy_tensor
from torch.fx.node import _side_effectful_functions

from monetrun.capture.filled_strides import kept_where_eager_fills_in_place
from monetrun.capture.kernel_strides import as_kernels_give_them
from monetrun.capture.marks import ONE_CALL_WITH_NEXT
from monetrun.capture.python_entries import replace_entry
from monetrun.core.patched import patched
from monetrun.ops.families import cudnn_batch_norm
from monetrun.ops.registry import call_of

aten = torch.ops.aten

# AOTAutograd replaces these with Python decompositions that launch other kernels than eager does (a bilinear
# upsampling: 118% of eager's peak and twice its time; dropout at p = 0.15: results that differ from eager's). Without
# the Python entries, tracing keeps the C++ operator and its own derivative.
_KEPT_WHOLE = re.compile(r"aten\.(_?upsample_\w+|dropout|hardshrink|softshrink|matmul|multi\w*_margin_loss\w*)\.")
_CUDNN_BATCH_NORM = aten.cudnn_batch_norm.default  # eager's on CUDA; AOTAutograd would run ATen's own in its place
_PYTHON_ENTRIES = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def operators_kept_whole() -> Iterator[None]:
    """While tracing: keep as one call the operators that eager runs as one call and AOTAutograd would decompose."""
    removed = []
    for overload in _overloads_to_keep():
        for key in _PYTHON_ENTRIES:
            if key in overload.py_kernels:
                removed.append((overload, key, replace_entry(overload, key, None)))
    replaced = replace_entry(_CUDNN_BATCH_NORM, DispatchKey.Autograd, cudnn_batch_norm.traced)
    random = _random_operators() - _side_effectful_functions
    _side_effectful_functions.update(random)
    try:
        with kept_where_eager_fills_in_place(), as_kernels_give_them(), _functions_called_as_in_eager():
            yield
    finally:
        _side_effectful_functions.difference_update(random)
        replace_entry(_CUDNN_BATCH_NORM, DispatchKey.Autograd, replaced)
        for overload, key, kernel in removed:
            replace_entry(overload, key, kernel)


def _functions_called_as_in_eager() -> contextlib.AbstractContextManager[None]:
    """Have no mode of torch's see functions of tensors while tracing; AOTAutograd's notes their names, for messages.

    Under a mode a function of ``torch.nn.functional`` calls the one of its name once more: where the script has put
    another in its place, that one, which eager does not call there.
    """
    return patched(proxy_tensor, "TorchFunctionMetadataMode", lambda tracer: contextlib.nullcontext())


@functools.cache
def _random_operators() -> frozenset[Any]:
    """What moves a generator on: eager runs it also where nothing reads its result (an auxiliary head's dropout)."""
    packets = (torch.ops.monet.bernoulli, *_packets(lambda name: True))
    overloads = (getattr(packet, name) for packet in packets for name in packet.overloads())
    return frozenset(o for o in overloads if torch.Tag.nondeterministic_seeded in o.tags)


def _overloads_to_keep() -> list[Any]:
    packets = _packets(lambda name: _KEPT_WHOLE.match(f"aten.{name}."))
    return [getattr(packet, o) for packet in packets for o in packet.overloads()]


def _packets(wanted: Callable[[str], object]) -> list[Any]:
    """ATen's operators with wanted names."""
    packets = [getattr(aten, name) for name in dir(aten) if wanted(name)]
    return [p for p in packets if isinstance(p, torch._ops.OpOverloadPacket)]


def split_convolution_backward(module: fx.GraphModule) -> None:
    """Split each convolution's backward into two operators: the input's gradient, and the weight's (and bias's)."""
    for node in list(module.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)):
        *rest, (of_input, of_weight, of_bias) = node.args
        if not (of_input and (of_weight or of_bias)):
            continue
        value = node.meta["val"]
        with module.graph.inserting_before(node):
            weight_part = module.graph.call_function(node.target, (*rest, [False, of_weight, of_bias]))
            input_part = module.graph.call_function(node.target, (*rest, [True, False, False]))
        for part, present in ((weight_part, (1, 2)), (input_part, (0,))):
            part.meta = dict(node.meta)
            part.meta["val"] = tuple(v if i in present else None for i, v in enumerate(value))
        weight_part.meta[ONE_CALL_WITH_NEXT] = True
        for user in list(node.users):
            user.replace_input_with(node, input_part if user.args[1] == 0 else weight_part)
        module.graph.erase_node(node)


def take_new_statistics(module: fx.GraphModule) -> None:
    """Leave out the copies that functionalization makes of a BatchNorm's new running statistics before it stores them.

    ATen's own batch norm is functionalized without them.
    """
    for node in list(module.graph.find_nodes(op="call_function", target=aten.copy.default)):
        updated: Any = node.args[1]
        if any(call_of(updated, torch.ops.monet.cudnn_batch_norm.default, result) is not None for result in (4, 5)):
            node.replace_all_uses_with(updated)
            module.graph.erase_node(node)
