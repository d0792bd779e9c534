// The geometry of pooling: which elements of an image a window covers. For the CPU and for CUDA.

#pragma once

#include "both.hpp"

namespace monet {

// I: of the numbers. Where a kernel is bound by arithmetic, 32 bits do.
template <class I>
struct WindowOf {
  I size[2], stride[2], padding[2], dilation[2];

  MONET_BOTH I outputs(I input, int d, bool ceil_mode) const {
    const I span = input + 2 * padding[d] - dilation[d] * (size[d] - 1) - 1;
    I count = (span + (ceil_mode ? stride[d] - 1 : 0)) / stride[d] + 1;
    // torch drops a window that would start in the padding behind the input
    if (ceil_mode && (count - 1) * stride[d] >= input + padding[d]) --count;
    return count;
  }

  MONET_BOTH I start(I output, int d) const { return output * stride[d] - padding[d]; }
  // So many steps of the dilation reach as far as length.
  MONET_BOTH I steps(I length, int d) const {
    return dilation[d] == 1 ? length : (length + dilation[d] - 1) / dilation[d];
  }
  // The first place k of the window for which start + k * dilation is within the input, and the one after the last.
  MONET_BOTH I first(I start, int d) const { return start >= 0 ? 0 : steps(-start, d); }
  MONET_BOTH I last(I start, int d, I input) const {
    if (start >= input) return 0;
    const I within = steps(input - start, d);
    return within < size[d] ? within : size[d];
  }
  // The place that an element has in the window that starts `after` elements before it; -1 where it has none.
  MONET_BOTH I place(I after, int d) const {
    if (dilation[d] == 1) return after;
    return after % dilation[d] == 0 ? after / dilation[d] : -1;
  }
};
using Window = WindowOf<int64_t>;

}  // namespace monet
