// Batch norm from saved statistics, the addition of a residual and clamping, in one pass.

#pragma once

#include "elements_cuda.cuh"

namespace monet {

// A vector of parameters, of T or (`wide`) of A; null: each is `otherwise`.
struct Parameters {
  const void* values;
  bool wide;
  A otherwise;

  __device__ Parameters(const void* values, int64_t wide, A otherwise)
      : values(values), wide(wide), otherwise(otherwise) {}
  __device__ A operator[](int64_t i) const {
    if (!values) return otherwise;
    return wide ? static_cast<const A*>(values)[i] : static_cast<A>(static_cast<const T*>(values)[i]);
  }
};

// The channel of element i is i / inner % channels.
extern "C" __global__ void batch_norm_act(const T* x, const T* residual, T* to, const void* weight_data,
                                          int64_t weight_wide, const void* bias_data, int64_t bias_wide,
                                          const void* mean_data, int64_t mean_wide, const void* invstd_data,
                                          int64_t invstd_wide, A low, A high, int64_t count, int64_t inner,
                                          int64_t channels, int64_t whole) {
  const Parameters weight(weight_data, weight_wide, 1), bias(bias_data, bias_wide, 0);
  const Parameters mean(mean_data, mean_wide, 0), invstd(invstd_data, invstd_wide, 1);
  for (int64_t p = first_index(); p < packs(count); p += index_step()) {
    Pack values = load(x, p, count, whole);
    Pack more;
    if (residual) more = load(residual, p, count, whole);
    int64_t channel = p * kPack / inner % channels, left = inner - p * kPack % inner;
    A scale = invstd[channel] * weight[channel], shift = bias[channel] - mean[channel] * scale;
    for (int i = 0; i < kPack && p * kPack + i < count; ++i) {
      T y = T(static_cast<A>(values.values[i]) * scale + shift);
      if (residual) y = T(static_cast<A>(y) + static_cast<A>(more.values[i]));
      A bounded = static_cast<A>(y);
      bounded = bounded < low ? low : bounded;
      bounded = bounded > high ? high : bounded;
      values.values[i] = T(bounded);
      if (--left == 0) {
        left = inner;
        channel = channel + 1 == channels ? 0 : channel + 1;
        scale = invstd[channel] * weight[channel];
        shift = bias[channel] - mean[channel] * scale;
      }
    }
    store(values, to, p, count, whole);
  }
}

}  // namespace monet
