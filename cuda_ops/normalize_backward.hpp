// What a normalization's backward from its output has in common on the CPU and on CUDA.

#pragma once

#include "tensors.hpp"

#include <tuple>

namespace monet {

// A layer norm's rows, and the gradients of input, weight and bias: empty where `output_mask` leaves them out.
struct LayerNormGradients {
  int64_t length = 1, rows = 0;
  Tensor of_input, of_weight, of_bias;

  LayerNormGradients(const Tensor& grad, const Tensor& result, const std::vector<int64_t>& normalized_shape,
                     const std::vector<bool>& output_mask)
      : of_input(like(result, {result.sizes().begin(), result.sizes().end()}, output_mask[0])),
        of_weight(like(result, normalized_shape, output_mask[1])),
        of_bias(like(result, normalized_shape, output_mask[2])) {
    STD_TORCH_CHECK(result.is_contiguous() && grad.is_contiguous(), "grad and result must be contiguous");
    check_same_layout(grad, result, "grad and result");
    for (const int64_t size : normalized_shape) length *= size;
    if (length) rows = result.numel() / length;
  }

  static Tensor like(const Tensor& result, const std::vector<int64_t>& shape, bool wanted) {
    return torch::stable::new_empty(result, wanted ? shape : std::vector<int64_t>{0});
  }
  std::tuple<Tensor, Tensor, Tensor> all() const { return {of_input, of_weight, of_bias}; }
};

}  // namespace monet
