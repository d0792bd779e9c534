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
from torch._decomp import decomposition_table
from torch.fx.node import _side_effectful_functions

from monetrun.capture.filled_strides import kept_where_eager_fills_in_place
from monetrun.capture.python_entries import replace_entry
from monetrun.ops.families import cudnn_batch_norm
from monetrun.ops.registry import call_of

aten = torch.ops.aten

# AOTAutograd replaces these with Python decompositions that launch other kernels than eager does (a bilinear
# upsampling: 118% of eager's peak and twice its time; dropout at p = 0.15: results that differ from eager's). Without
# the Python entries, tracing keeps the C++ operator and its own derivative.
_KEPT_WHOLE = re.compile(r"aten\.(_?upsample_\w+|dropout|hardshrink|softshrink|matmul|multi\w*_margin_loss\w*)\.")
_CUDNN_BATCH_NORM = aten.cudnn_batch_norm.default  # eager's on CUDA; AOTAutograd would run ATen's own in its place
_BATCH_NORM_BACKWARDS = (aten.native_batch_norm_backward.default,)
_BATCH_NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    *_BATCH_NORM_BACKWARDS,
)
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
    fakes: dict[Any, Any] = {norm: decomposition_table[norm] for norm in _BATCH_NORMS if norm in decomposition_table}
    dense: dict[Any, Any] = {norm: _with_dense_result(norm, fake) for norm, fake in fakes.items()}
    decomposition_table.update(dense)
    try:
        with kept_where_eager_fills_in_place():
            yield
    finally:
        decomposition_table.update(fakes)
        _side_effectful_functions.difference_update(random)
        replace_entry(_CUDNN_BATCH_NORM, DispatchKey.Autograd, replaced)
        for overload, key, kernel in removed:
            replace_entry(overload, key, kernel)


@functools.cache
def _random_operators() -> frozenset[Any]:
    """What moves a generator on: eager runs it also where nothing reads its result (an auxiliary head's dropout)."""
    packets = (torch.ops.monet.bernoulli, *_packets(lambda name: True))
    overloads = (getattr(packet, name) for packet in packets for name in packet.overloads())
    return frozenset(o for o in overloads if torch.Tag.nondeterministic_seeded in o.tags)


def _with_dense_result(norm: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake kernel of a batch norm, whose result on a CPU is dense in a format also where its input is not.

    torch's gives the result the input's strides: views of it would be traced that do not exist. What it checks of a
    fake kernel is its name and module.
    """
    count = 2 if norm in _BATCH_NORM_BACKWARDS else 1

    @functools.wraps(fake)
    def dense(*args: Any, **kwargs: Any) -> Any:
        given = args[:count]  # of a backward: the result's gradient, and the input
        if given[-1].device.type == "cpu":
            form = torch._prims_common.suggest_memory_format(given[-1])
            given = tuple(x.contiguous(memory_format=form) for x in given)
        return fake(*given, *args[count:], **kwargs)

    return dense


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
        weight_part.meta["monetrun_one_call_with_next"] = True
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
