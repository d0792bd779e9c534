// Hardswish's backward from its output and one bit for each element: whether the input was to the right of the minimum.

#pragma once

#include "elements_cuda.cuh"

namespace monet {

extern "C" __global__ void hardswish_output_backward(const T* grad, const T* result, const uint8_t* mask, T* to,
                                                     int64_t count, int64_t whole) {
  for (int64_t p = first_index(); p < packs(count); p += index_step()) {
    Pack values = load(grad, p, count, whole);
    const Pack results = load(result, p, count, whole);
    const unsigned bits = mask[p];
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const A g = static_cast<A>(values.values[i]), y = static_cast<A>(results.values[i]);
      const A inside = y * A(24) + A(9);
      const A slope = sqrt(inside < 0 ? A(0) : inside) / A(6);
      const A right = g * (y < 3 ? slope : A(1)), left = y < 0 ? g * -slope : A(0);
      values.values[i] = T((bits >> i & 1) != 0 ? right : left);
    }
    store(values, to, p, count, whole);
  }
}

}  // namespace monet
