"""What made-up integers may be: indices, counts, permutations. An operator that trusts them may write anywhere.

CUDA's kernels check their indices by an assertion that ends all that the process does on the device, or not at all:
zeros are a valid index into anything, but no valid pivot, and no number of repeats that add up to a size. Where they
say how long groups are, a kernel that is given zeros has nothing to do, and seems to be free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from monetrun.ops.registry import Call

Fill = Callable[[torch.Tensor], None]
_INTEGERS = (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)  # bytes hold values


def may_be_made_up(call: Call, device_type: str) -> bool:
    """Whether ``call`` may run with integers that ``operands.make`` made up.

    On a CPU where no integers are known to be invalid: its kernels check them. On CUDA where each is known to be an
    index, a value (as in sums and copies), or is filled in with what is valid.
    """
    name, given = _name(call.target), _arguments(call)
    unknown = {argument for argument, _ in _integers(given)} - _SEEDS
    if not unknown:
        return True
    filled = fills(call)
    unknown -= {argument for argument, node in _integers(given) if node in filled}
    if name in _FILLS and name not in _INDICES:
        return not unknown
    if device_type != "cuda" or _takes_values(call.target):
        return True
    known = filled.keys() | index_bounds(call).keys()
    return name in _INDICES and all(a in _VALUE_ARGUMENTS or node in known for a, node in _integers(given))


def zeros_are_valid(target: Any, arguments: Any, device_type: str) -> bool:
    """Whether ``target`` may run with all integers among its ``arguments`` zero, on the device of this type."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.dtype in _INTEGERS for leaf in tree_leaves(arguments)):
        return True
    name = _name(target)
    if name in _NO_ZEROS:
        return False
    return device_type != "cuda" or _takes_values(target) or name in _INDICES or name in _FILLS or name in _SEEDED


def _takes_values(target: Any) -> bool:
    """Whether no value of an integer operand decides which memory is written."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return (
        torch.Tag.pointwise in target.tags
        or target.namespace in ("prims", "monet")
        or (target.namespace == "aten" and target.overloadpacket.__name__.rstrip("_") in _VALUES)
    )


def _integers(given: Mapping[str, Any]) -> Iterator[tuple[str, fx.Node]]:
    """The arguments with integers, by name."""
    for name, value in given.items():
        for node in tree_leaves(value):
            if isinstance(node, fx.Node) and any(
                isinstance(v, torch.Tensor) and v.dtype in _INTEGERS for v in tree_leaves(node.meta.get("val"))
            ):
                yield name, node


def _name(target: Any) -> str:
    return str(getattr(getattr(target, "_schema", None), "name", ""))


def _arguments(call: Call) -> dict[str, Any]:
    """By the names in the operator's schema; of what has none, by position."""
    schema = getattr(call.target, "_schema", None)
    names = [str(i) for i in range(len(call.args))] if schema is None else [a.name for a in schema.arguments]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _shape(node: Any) -> Sequence[int]:
    return node.meta["val"].shape  # type: ignore[no-any-return]


# ---- values

_SEEDS = {"philox_seed", "philox_offset", "rng_state", "unused"}  # any number is one
_VALUE_ARGUMENTS = {*_SEEDS, "self", "src", "source", "values", "value"}  # of operators with indices

# Operators of ATen, not elementwise, that move, compare or add integers.
# fmt: off
_VALUES = {
    "_chunk_cat", "_to_copy", "_trilinear", "_unsafe_view", "addbmm", "addmm", "addmv", "addr", "alias_copy", "all",
    "amax", "amin", "aminmax", "any", "argmax", "argmin", "argsort", "as_strided_copy", "as_strided_scatter",
    "avg_pool2d", "avg_pool3d", "baddbmm", "block_diag", "bmm", "bucketize", "cat", "channel_shuffle", "clone",
    "constant_pad_nd", "copy", "count_nonzero", "cummax", "cummin", "cumprod", "cumsum", "diag_embed", "diagonal_copy",
    "diagonal_scatter", "dot", "empty_like", "equal", "expand_copy", "fill", "flip", "floor_divide", "full_like",
    "isin", "kthvalue", "lift_fresh_copy", "linalg_cross", "linalg_vector_norm", "linspace", "logcumsumexp",
    "logspace", "logsumexp", "masked_fill", "masked_scatter", "max", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "mean", "median", "min", "mm", "mode", "mv", "nanmedian", "nansum", "narrow_copy",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "nonzero_static", "ones_like",
    "permute_copy", "pixel_shuffle", "pixel_unshuffle", "prod", "rand_like", "randint_like", "randn_like",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "roll", "rot90", "rsub", "searchsorted", "select_scatter", "slice_scatter", "sort",
    "split_with_sizes_copy", "squeeze_copy", "stack", "sum", "t_copy", "topk", "trace", "transpose_copy", "tril",
    "triu", "unbind_copy", "unfold_copy", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze_copy", "vdot",
    "view_copy", "where", "zeros_like", "_int_mm", "_softmax", "_log_softmax",
    "fake_quantize_per_channel_affine_cachemask", "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
}
# fmt: on
# Their integers are seeds, and offsets of which no memory is written beyond the longest sequence that they are told.
_SEEDED = {
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_flash_attention_backward",
}


# ---- what is filled in


def fills(call: Call) -> dict[fx.Node, Fill]:
    """For operands of ``call`` that zeros are no valid, or no usual value of: what writes such values."""
    find = _FILLS.get(_name(call.target))
    found = {} if find is None else find(_arguments(call))
    return {node: fill for node, fill in found.items() if isinstance(node, fx.Node)}


def _even(count: int, total: int, parts: int, device: torch.device) -> torch.Tensor:
    """Where the first ``count`` of as long parts of ``total`` begin: the next of all of them at its end."""
    return torch.arange(count, device=device).mul_(total).div_(max(1, parts), rounding_mode="floor")


def _pivots(argument: str) -> Callable[[dict[str, Any]], dict[Any, Fill]]:
    """Each row is exchanged with itself: they are counted from 1."""

    def fill(pivots: torch.Tensor) -> None:
        if pivots.dim():
            pivots.copy_(torch.arange(1, pivots.shape[-1] + 1, device=pivots.device))

    return lambda given: {given[argument]: fill}


def _repeats(given: dict[str, Any]) -> dict[Any, Fill]:
    """As many of each as of the others, ``output_size`` in all."""
    total = given.get("output_size")
    if not isinstance(total, int):
        return {}

    def fill(repeats: torch.Tensor) -> None:
        repeats.copy_(_even(len(repeats) + 1, total, len(repeats), repeats.device).diff())

    return {given["repeats"]: fill}


def _bags(given: dict[str, Any]) -> dict[Any, Fill]:
    """As many embeddings in each bag as in the others."""
    count = math.prod(_shape(given["indices"]))
    sizes = given["bag_size"] if "bag_size" in given else given["offsets"]
    bags = _shape(sizes)[0] - bool(given.get("include_last_offset"))

    def fill_offsets(offsets: torch.Tensor) -> None:
        offsets.copy_(_even(len(offsets), count, bags, offsets.device))

    def fill_bags(bag: torch.Tensor) -> None:
        bag.copy_(_even(len(bag), bags, count, bag.device))

    def fill_sizes(sizes: torch.Tensor) -> None:
        sizes.fill_(count // max(1, bags))

    fill_by_name = {"offsets": fill_offsets, "offset2bag": fill_bags, "bag_size": fill_sizes}
    return {given[name]: fill for name, fill in fill_by_name.items() if name in given}


_GRAIN = 16  # rows of a group: kernels ask that groups begin at multiples of bytes


def _groups(given: dict[str, Any]) -> dict[Any, Fill]:
    """Groups of the same size, of the dimension that the matrices without a dimension of groups have for them."""
    one, other = _shape(given["self"]), _shape(given["mat2"])
    if len(one) == 2:
        total = one[0] if len(other) == 3 else one[1]
    else:
        total = other[-1]

    def fill(ends: torch.Tensor) -> None:
        even = _even(len(ends) + 1, total, len(ends), ends.device)
        ends.copy_(even[1:].div_(_GRAIN, rounding_mode="floor").mul_(_GRAIN))
        ends[-1:].fill_(total)

    return {given.get("offs"): fill}


def _sequences(prefix: str, dimension: int, longest: str = "max") -> Callable[[dict[str, Any]], dict[Any, Fill]]:
    """Sequences of the same length, of the ``dimension`` of queries and keys, from the first place to behind the last.

    Args:
        prefix: of the arguments that say where they begin.
        dimension: in which they follow each other.
        longest: what the arguments begin with that say how long the longest is.
    """

    def find(given: dict[str, Any]) -> dict[Any, Fill]:
        found: dict[Any, Fill] = {}
        for side, of in (("q", "query"), ("k", "key")):
            starts, total, most = (
                given.get(f"{prefix}_{side}"),
                _shape(given[of])[dimension],
                given[f"{longest}_{side}"],
            )
            if isinstance(total, int) and isinstance(most, int):
                found.setdefault(starts, partial(_fill_starts, total=total, most=most))
        return found

    return find


def _fill_starts(starts: torch.Tensor, total: int, most: int) -> None:
    parts = max(1, len(starts) - 1)
    starts.copy_(_even(len(starts), min(total, parts * most), parts, starts.device))


_FILLS: dict[str, Callable[[dict[str, Any]], dict[Any, Fill]]] = {
    "aten::repeat_interleave": _repeats,
    "aten::linalg_lu_solve": _pivots("pivots"),
    "aten::linalg_ldl_solve": _pivots("pivots"),
    "aten::lu_unpack": _pivots("LU_pivots"),
    "aten::_embedding_bag": _bags,
    "aten::_embedding_bag_forward_only": _bags,
    "aten::_embedding_bag_backward": _bags,
    "aten::_embedding_bag_dense_backward": _bags,
    "aten::_embedding_bag_per_sample_weights_backward": _bags,
    "aten::_grouped_mm": _groups,
    "aten::_scaled_grouped_mm": _groups,
    "aten::_scaled_grouped_mm_v2": _groups,
    "aten::_flash_attention_forward": _sequences("cum_seq", 0),
    "aten::_flash_attention_backward": _sequences("cum_seq", 0),
    "aten::_cudnn_attention_forward": _sequences("cum_seq", 0),
    "aten::_cudnn_attention_backward": _sequences("cum_seq", 0),
    "aten::_efficient_attention_forward": _sequences("cu_seqlens", 1, "max_seqlen"),
    "aten::_efficient_attention_backward": _sequences("cu_seqlens", 1, "max_seqlen"),
    "torch_attn::_varlen_attn": _sequences("cu_seq", 0),
    "torch_attn::_varlen_attn_backward": _sequences("cu_seq", 0),
}
_NO_ZEROS = {"aten::repeat_interleave", "aten::linalg_lu_solve", "aten::linalg_ldl_solve", "aten::lu_unpack"}


# ---- indices


def index_bounds(call: Call) -> dict[fx.Node, int]:
    """For each operand of ``call`` that holds indices: one more than the largest valid index.

    Operands that are not known to hold indices, and those with an empty range, are left out.
    """
    find = _INDICES.get(_name(call.target))
    found: dict[fx.Node, int] = {}
    for node, bound in () if find is None else find(_arguments(call)):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64) or bound < 1:
            continue
        found[node] = min(bound, found.get(node, bound))
    return found


Bounds = list[tuple[Any, int]]


def _of_dimension(index: str) -> Callable[[dict[str, Any]], Bounds]:
    """Indices into the dimension ``dim`` of ``self``."""

    def find(given: dict[str, Any]) -> Bounds:
        shape = _shape(given["self"])
        return [(given[index], shape[given["dim"]] if shape else 1)]

    return find


def _of_each_dimension(given: dict[str, Any]) -> Bounds:
    """``self[indices]``: each index is into the next dimension; a mask stands for as many as it has itself."""
    shape, found, dimension = _shape(given["self"]), [], 0
    for index in given["indices"]:
        value = None if index is None else index.meta["val"]
        if value is not None and value.dtype in (torch.bool, torch.uint8):
            dimension += value.dim()
            continue
        found.append((index, shape[dimension]))
        dimension += 1
    return found


def _of_classes(scores: str) -> Callable[[dict[str, Any]], Bounds]:
    """``target`` names a class of each row of ``scores``, [N, C, ...] or [C]."""

    def find(given: dict[str, Any]) -> Bounds:
        shape = _shape(given[scores])
        return [(given["target"], shape[min(1, len(shape) - 1)])]

    return find


def _of_pixels(dimensions: int) -> Callable[[dict[str, Any]], Bounds]:
    """``indices`` into an image of ``self``, flat."""
    return lambda given: [(given["indices"], math.prod(_shape(given["self"])[-dimensions:]))]


def _of_all_elements(given: dict[str, Any]) -> Bounds:
    """``index`` into ``self``, flat."""
    return [(given["index"], math.prod(_shape(given["self"])))]


def _of_output(given: dict[str, Any]) -> Bounds:
    """``indices`` into an image of the result, flat."""
    return [(given["indices"], math.prod(given["output_size"]))]


def _of_table(given: dict[str, Any]) -> Bounds:
    """``indices`` of rows of ``weight``."""
    return [(given["indices"], _shape(given["weight"])[0])]


def _of_bags(given: dict[str, Any]) -> Bounds:
    """Indices of the rows of a table, for its gradient."""
    return [(given[name], given["num_weights"]) for name in ("indices", "maximum_indices")]


_POOLS = (("", "_with_indices"), ("adaptive_", ""), ("fractional_", ""))

# operator -> its operands that hold indices, and their bounds
_INDICES: dict[str, Callable[[dict[str, Any]], Bounds]] = {
    "aten::embedding": _of_table,
    "aten::embedding_dense_backward": lambda given: [(given["indices"], given["num_weights"])],
    "aten::_embedding_bag": _of_table,
    "aten::_embedding_bag_forward_only": _of_table,
    "aten::_embedding_bag_backward": _of_bags,
    "aten::_embedding_bag_dense_backward": _of_bags,
    "aten::_embedding_bag_per_sample_weights_backward": _of_table,
    "aten::_ctc_loss": lambda given: [(given["targets"], _shape(given["log_probs"])[-1])],
    "aten::_ctc_loss_backward": lambda given: [(given["targets"], _shape(given["log_probs"])[-1])],
    "aten::take": _of_all_elements,
    "aten::put": _of_all_elements,
    **dict.fromkeys(("aten::max_unpool2d", "aten::max_unpool3d"), _of_output),
    **dict.fromkeys((f"aten::{kind}max_pool2d{with_indices}_backward" for kind, with_indices in _POOLS), _of_pixels(2)),
    **dict.fromkeys((f"aten::{kind}max_pool3d{with_indices}_backward" for kind, with_indices in _POOLS), _of_pixels(3)),
    **dict.fromkeys(
        (
            *("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_unsafe_index_put"),
            *("aten::_unsafe_masked_index", "aten::_unsafe_masked_index_put_accumulate"),
        ),
        _of_each_dimension,
    ),
    **dict.fromkeys(
        (
            *("aten::gather", "aten::scatter", "aten::scatter_add", "aten::scatter_reduce"),
            *("aten::index_select", "aten::index_add", "aten::index_copy", "aten::index_fill", "aten::index_reduce"),
        ),
        _of_dimension("index"),
    ),
    **dict.fromkeys(
        (
            *("aten::nll_loss_forward", "aten::nll_loss_backward"),
            *("aten::nll_loss2d_forward", "aten::nll_loss2d_backward"),
            *("aten::multi_margin_loss", "aten::multi_margin_loss_backward"),
            *("aten::multilabel_margin_loss_forward", "aten::multilabel_margin_loss_backward"),
        ),
        _of_classes("self"),
    ),
    **dict.fromkeys(
        ("monet::log_softmax_nll_backward", "monet::log_softmax_nll_backward_"), _of_classes("log_probabilities")
    ),
}
