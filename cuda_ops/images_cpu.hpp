// What the CPU's pooling operators check of their windows and images.

#pragma once

#include "tensors.hpp"
#include "window.hpp"

namespace monet {

// A window's geometry as torch's operators take it: each of two numbers, `strides` of none where they are the sizes.
inline Window window_of(const std::vector<int64_t>& kernel_size, const std::vector<int64_t>& strides,
                        const std::vector<int64_t>& paddings, const std::vector<int64_t>& dilations) {
  STD_TORCH_CHECK(kernel_size.size() == 2 && paddings.size() == 2 && dilations.size() == 2 &&
                      (strides.size() == 2 || strides.empty()),
                  "kernel_size, stride, padding and dilation must be of two numbers");
  Window w;
  for (int d = 0; d < 2; ++d) {
    w.size[d] = kernel_size[d];
    w.stride[d] = strides.empty() ? kernel_size[d] : strides[d];
    w.padding[d] = paddings[d];
    w.dilation[d] = dilations[d];
    STD_TORCH_CHECK(w.size[d] > 0 && w.stride[d] > 0 && w.dilation[d] > 0 && w.padding[d] >= 0,
                    "kernel_size, stride and dilation must be positive and padding not negative");
  }
  STD_TORCH_CHECK(w.size[0] * w.size[1] <= 255, "a window of ", w.size[0], " x ", w.size[1],
                  " has more places than one byte can name (255)");
  return w;
}

struct Images {
  int64_t count, channels, height, width;
  bool channels_last;

  Images(const Tensor& t, const char* name) : Images(t, name, !t.is_contiguous()) {}

  Images(const Tensor& t, const char* name, bool last) : channels_last(last) {
    const int64_t dims = t.dim();
    STD_TORCH_CHECK(dims == 3 || dims == 4, name, " must be [N, C, H, W] or [C, H, W], got ", dims, " dimensions");
    STD_TORCH_CHECK(last ? dims == 4 && is_channels_last(t) : t.is_contiguous(), name,
                    " is neither contiguous nor channels-last, or not as the input");
    count = dims == 4 ? t.size(0) : 1;
    channels = t.size(dims - 3);
    height = t.size(dims - 2);
    width = t.size(dims - 1);
  }

  int64_t plane() const { return height * width; }
  int64_t image() const { return channels * height * width; }
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
