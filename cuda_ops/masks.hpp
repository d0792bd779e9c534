// Operators that read a mask, each into a new tensor or over its operand. The CPU and CUDA each define the `_into`
// functions, which return `out`.

#pragma once

#include "tensors.hpp"

namespace monet {

inline Tensor mask_backward_into(const Tensor& grad, const Tensor& mask, double slope, const Tensor& out);
inline Tensor mask_scale_into(const Tensor& x, const Tensor& mask, double scale, const Tensor& out);

inline Tensor mask_backward(const Tensor& grad, const Tensor& mask, double slope) {
  return mask_backward_into(grad, mask, slope, torch::stable::empty_like(grad));
}
inline Tensor mask_backward_(const Tensor& grad, const Tensor& mask, double slope) {
  return mask_backward_into(grad, mask, slope, grad);
}

inline Tensor mask_scale(const Tensor& x, const Tensor& mask, double scale) {
  return mask_scale_into(x, mask, scale, torch::stable::empty_like(x));
}
inline Tensor mask_scale_(const Tensor& x, const Tensor& mask, double scale) {
  return mask_scale_into(x, mask, scale, x);
}

MONET_KERNEL(mask_backward);
MONET_KERNEL(mask_backward_);
MONET_KERNEL(mask_scale);
MONET_KERNEL(mask_scale_);

}  // namespace monet
