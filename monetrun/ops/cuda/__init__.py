"""``torch.ops.monet`` on CUDA: what is done on the host around each kernel of ``cuda_ops/ops_cuda.cu``.

A module for each family checks operands, makes results and launches. All of it is Python, so that a machine without
any compiler has the kernels too; ``monetrun.ops.kernels`` registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monetrun.ops.cuda import masks, normalization, pooling

# The operators that have a kernel for CUDA; the others run their references.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        masks.range_mask,
        masks.nonzero_mask,
        masks.mask_backward,
        masks.mask_backward_,
        masks.mask_scale,
        masks.mask_scale_,
        masks.dropout_backward,
        masks.dropout_backward_,
        masks.hardswish_output_backward,
        masks.hardswish_output_backward_,
        pooling.max_pool2d_index,
        pooling.max_pool2d_index_backward,
        pooling.max_pool2d_input_backward,
        normalization.batch_norm_act,
        normalization.layer_norm_output_backward,
        normalization.channel_norm_output_backward,
        normalization.affine_invertible,
    )
}
