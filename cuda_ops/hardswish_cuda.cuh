// Hardswish's backward from its output and one bit for each element: whether the input was to the right of the minimum.

#pragma once

#include "elements_cuda.cuh"
#include "hardswish.hpp"

namespace monet {

template <class T>
struct HardswishByOutput {
  const T *grad, *result;
  const uint8_t* bytes;
  T* to;
  int64_t count;
  bool whole;

  __device__ void operator()(int64_t p) const {
    using A = Arithmetic<T>;
    Pack<T> values = load(grad, p, count, whole);
    const Pack<T> results = load(result, p, count, whole);
    const unsigned bits = bytes[p];
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
};

inline Tensor hardswish_output_backward_into(const Tensor& grad, const Tensor& result, const Tensor& mask,
                                             const Tensor& out) {
  check_dense(grad, "grad");
  check_same_layout(grad, result, "grad and result");
  check_mask(mask, grad.numel());
  for_dtype(grad, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const T *from = read<T>(grad), *results = read<T>(result);
    T* to = write<T>(out);
    const bool whole = aligned(from) && aligned(results) && aligned(to);
    const uint8_t* bytes = read<uint8_t>(mask);
    launch(grad, packs(grad.numel()), HardswishByOutput<T>{from, results, bytes, to, grad.numel(), whole});
  });
  return out;
}

}  // namespace monet
