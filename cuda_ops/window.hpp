// The geometry of pooling: which elements of an image a window covers. For the CPU and for CUDA.

#pragma once

#include "both.hpp"
#include "tensors.hpp"

namespace monet {

struct Window {
  int64_t size[2], stride[2], padding[2], dilation[2];

  Window(const std::vector<int64_t>& kernel_size, const std::vector<int64_t>& strides,
         const std::vector<int64_t>& paddings, const std::vector<int64_t>& dilations) {
    STD_TORCH_CHECK(kernel_size.size() == 2 && paddings.size() == 2 && dilations.size() == 2 &&
                        (strides.size() == 2 || strides.empty()),
                    "kernel_size, stride, padding and dilation must be of two numbers");
    for (int d = 0; d < 2; ++d) {
      size[d] = kernel_size[d];
      stride[d] = strides.empty() ? kernel_size[d] : strides[d];
      padding[d] = paddings[d];
      dilation[d] = dilations[d];
      STD_TORCH_CHECK(size[d] > 0 && stride[d] > 0 && dilation[d] > 0 && padding[d] >= 0,
                      "kernel_size, stride and dilation must be positive and padding not negative");
    }
    STD_TORCH_CHECK(size[0] * size[1] <= 255, "a window of ", size[0], " x ", size[1],
                    " has more places than one byte can name (255)");
  }

  int64_t outputs(int64_t input, int d, bool ceil_mode) const {
    const int64_t span = input + 2 * padding[d] - dilation[d] * (size[d] - 1) - 1;
    int64_t count = (span + (ceil_mode ? stride[d] - 1 : 0)) / stride[d] + 1;
    // torch drops a window that would start in the padding behind the input
    if (ceil_mode && (count - 1) * stride[d] >= input + padding[d]) --count;
    return count;
  }

  MONET_BOTH int64_t start(int64_t output, int d) const { return output * stride[d] - padding[d]; }
  // The first place k of the window for which start + k * dilation is within the input.
  MONET_BOTH int64_t first(int64_t start, int d) const {
    return start >= 0 ? 0 : (-start + dilation[d] - 1) / dilation[d];
  }
  MONET_BOTH static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
  MONET_BOTH int64_t last(int64_t start, int d, int64_t input) const {
    return start >= input ? 0 : at_most(size[d], (input - start + dilation[d] - 1) / dilation[d]);
  }
};

struct Images {
  int64_t count, channels, height, width;
  bool channels_last;

  Images(const Tensor& t, const char* name) {
    const int64_t dims = t.dim();
    STD_TORCH_CHECK(dims == 3 || dims == 4, name, " must be [N, C, H, W] or [C, H, W], got ", dims, " dimensions");
    channels_last = !t.is_contiguous();
    STD_TORCH_CHECK(!channels_last || (dims == 4 && is_channels_last(t)), name,
                    " is neither contiguous nor channels-last");
    count = dims == 4 ? t.size(0) : 1;
    channels = t.size(dims - 3);
    height = t.size(dims - 2);
    width = t.size(dims - 1);
  }

  MONET_BOTH int64_t plane() const { return height * width; }
  MONET_BOTH int64_t image() const { return channels * height * width; }
};

inline std::vector<int64_t> sizes_of(const Tensor& t, int64_t height, int64_t width) {
  std::vector<int64_t> size;
  for (int64_t d = 0; d < t.dim(); ++d) size.push_back(t.size(d));
  size[size.size() - 2] = height;
  size[size.size() - 1] = width;
  return size;
}

inline void check_index(const Tensor& grad, const Tensor& index, const Images& out,
                        const std::vector<int64_t>& input_size) {
  bool same = index.dim() == grad.dim() && index.scalar_type() == ScalarType::Byte &&
              (out.channels_last ? is_channels_last(index) : index.is_contiguous());
  for (int64_t d = 0; same && d < grad.dim(); ++d) same = index.size(d) == grad.size(d);
  STD_TORCH_CHECK(same, "index is not of grad's shape and layout, in bytes");
  STD_TORCH_CHECK(static_cast<int64_t>(input_size.size()) == grad.dim(), "input_size and grad differ in dimensions");
}

inline void check_pooled(const Tensor& grad, const Tensor& x, const Images& in, const Images& out, const Window& w,
                         bool ceil_mode) {
  STD_TORCH_CHECK(grad.scalar_type() == x.scalar_type() && out.height == w.outputs(in.height, 0, ceil_mode) &&
                      out.width == w.outputs(in.width, 1, ceil_mode),
                  "grad is not of the output's shape and the input's dtype");
  STD_TORCH_CHECK(in.channels_last ? is_channels_last(grad) : grad.is_contiguous(), "grad and x differ in layout");
}

}  // namespace monet
