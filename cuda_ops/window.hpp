// The geometry of pooling: which elements of an image a window covers. For the CPU and for CUDA.

#pragma once

#include "both.hpp"

namespace monet {

struct Window {
  int64_t size[2], stride[2], padding[2], dilation[2];

  MONET_BOTH int64_t outputs(int64_t input, int d, bool ceil_mode) const {
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

}  // namespace monet
