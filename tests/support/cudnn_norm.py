"""A BatchNorm that calls cuDNN's operator on any device, as eager does on CUDA."""

from __future__ import annotations

import torch
from torch import nn

aten = torch.ops.aten

_library = torch.library.Library("aten", "IMPL")


@torch.library.impl(_library, "cudnn_batch_norm_backward", "CPU")
def _backward_on_cpu(x, grad, weight, running_mean, running_var, mean, invstd, eps, reserve):
    assert reserve.dtype == torch.uint8
    return aten.native_batch_norm_backward(grad, x, weight, None, None, mean, invstd, True, eps, [True] * 3)


class CudnnBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        statistics = self.running_mean, self.running_var
        return aten.cudnn_batch_norm(x, self.weight, self.bias, *statistics, self.training, self.momentum, self.eps)[0]
