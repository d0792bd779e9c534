// What is done with a mask, into a new tensor or over the operand. The CPU and CUDA each define the `_into` functions.

#pragma once

#include "tensors.hpp"

namespace monet {

inline void mask_backward_into(const Tensor& grad, const Tensor& mask, double slope, const Tensor& out);
inline void mask_scale_into(const Tensor& x, const Tensor& mask, double scale, const Tensor& out);

inline Tensor mask_backward(const Tensor& grad, const Tensor& mask, double slope) {
  Tensor out = torch::stable::empty_like(grad);
  mask_backward_into(grad, mask, slope, out);
  return out;
}

inline Tensor mask_backward_(const Tensor& grad, const Tensor& mask, double slope) {
  mask_backward_into(grad, mask, slope, grad);
  return grad;
}

inline Tensor mask_scale(const Tensor& x, const Tensor& mask, double scale) {
  Tensor out = torch::stable::empty_like(x);
  mask_scale_into(x, mask, scale, out);
  return out;
}

inline Tensor mask_scale_(const Tensor& x, const Tensor& mask, double scale) {
  mask_scale_into(x, mask, scale, x);
  return x;
}

}  // namespace monet
