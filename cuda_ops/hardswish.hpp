// Hardswish's backward from its output and a mask, into a new tensor or over the gradient. The CPU and CUDA each define
// the `_into` function, which returns `out`.

#pragma once

#include "tensors.hpp"

namespace monet {

inline Tensor hardswish_output_backward_into(const Tensor& grad, const Tensor& result, const Tensor& mask,
                                             const Tensor& out);

inline Tensor hardswish_output_backward(const Tensor& grad, const Tensor& result, const Tensor& mask) {
  return hardswish_output_backward_into(grad, result, mask, torch::stable::empty_like(grad));
}
inline Tensor hardswish_output_backward_(const Tensor& grad, const Tensor& result, const Tensor& mask) {
  return hardswish_output_backward_into(grad, result, mask, grad);
}

MONET_KERNEL(hardswish_output_backward);
MONET_KERNEL(hardswish_output_backward_);

}  // namespace monet
