// Operands and results of a normalization's backward from its output.

#pragma once

#include "tensors.hpp"

#include <tuple>

namespace monet {

inline Tensor new_parameters(const Tensor& like, const std::vector<int64_t>& shape, bool wanted) {
  return torch::stable::new_empty(like, wanted ? shape : std::vector<int64_t>{0});
}

// A layer norm's rows, and the gradients of input, weight and bias: empty where `output_mask` leaves them out.
struct LayerNormGradients {
  int64_t length = 1, rows = 0;
  Tensor of_input, of_weight, of_bias;

  LayerNormGradients(const Tensor& grad, const Tensor& result, const std::vector<int64_t>& normalized_shape,
                     const std::vector<bool>& output_mask)
      : of_input(new_parameters(result, {result.sizes().begin(), result.sizes().end()}, output_mask[0])),
        of_weight(new_parameters(result, normalized_shape, output_mask[1])),
        of_bias(new_parameters(result, normalized_shape, output_mask[2])) {
    STD_TORCH_CHECK(result.is_contiguous() && grad.is_contiguous(), "grad and result must be contiguous");
    check_same_layout(grad, result, "grad and result");
    for (const int64_t size : normalized_shape) length *= size;
    if (length) rows = result.numel() / length;
  }

  std::tuple<Tensor, Tensor, Tensor> all() const { return {of_input, of_weight, of_bias}; }
};

// What the statistics of a group norm ([N, groups]) or a batch norm ([C]) are over, and the gradients.
//
// A unit is what parameters are summed over beside its own elements: an image of a group norm, the batch of a batch
// norm. A statistic is over `depth` channels of the images of its unit.
struct ChannelNormGradients {
  bool channels_last, of_batch;
  int64_t images, channels, pixels = 0;
  int64_t units = 1, unit_images = 1, groups, depth = 1;
  Tensor of_input, of_weight, of_bias;

  ChannelNormGradients(const Tensor& grad, const Tensor& result, const Tensor& rstd,
                       const std::vector<bool>& output_mask)
      : channels_last(!result.is_contiguous()),
        of_batch(rstd.dim() == 1),
        images(size_of(result, 0)),
        channels(size_of(result, 1)),
        groups(of_batch ? channels : size_of(rstd, 1)),
        of_input(output_mask[0] ? torch::stable::empty_like(result) : new_parameters(result, {0}, true)),
        of_weight(new_parameters(result, {channels}, output_mask[1])),
        of_bias(new_parameters(result, {channels}, output_mask[2])) {
    STD_TORCH_CHECK(!channels_last || is_channels_last(result),
                    "grad and result must be [N, C, ...], contiguous or channels-last");
    check_same_layout(grad, result, "grad and result");
    const bool fits = of_batch ? rstd.size(0) == channels
                               : rstd.dim() == 2 && rstd.size(0) == images && groups > 0 && channels % groups == 0;
    STD_TORCH_CHECK(fits, "rstd must be [", channels, "], or [", images, ", groups]");
    if (result.numel()) pixels = result.numel() / (images * channels);
    if (of_batch) {
      unit_images = images;
    } else {
      units = images;
      depth = channels / groups;
    }
  }

  static int64_t size_of(const Tensor& t, int64_t dim) {
    STD_TORCH_CHECK(t.dim() > dim, "expected result [N, C, ...] and rstd [N, groups] or [C]");
    return t.size(dim);
  }
  // Elements that a statistic is over.
  int64_t count() const { return unit_images * depth * pixels; }
  std::tuple<Tensor, Tensor, Tensor> all() const { return {of_input, of_weight, of_bias}; }
};

}  // namespace monet
