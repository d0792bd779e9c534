// Hardswish's backward from its output and one bit for each element: whether the input was to the right of the minimum.

#pragma once

#include "dispatch_cpu.hpp"

namespace monet {

inline Tensor hardswish_output_backward_into(const Tensor& grad, const Tensor& result, const Tensor& mask,
                                             const Tensor& out) {
  check_dense(grad, "grad");
  check_same_layout(grad, result, "grad and result");
  check_mask(mask, grad.numel());
  const uint8_t* bytes = read<uint8_t>(mask);
  for_dtype(grad, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    using V = Values<T>;
    const T* results = read<T>(result);
    map_blocks(read<T>(grad), write<T>(out), grad.numel(), [=](const T* in, T* to, int64_t block, int64_t elements) {
      const uint64_t bits = read_bits(bytes, block, elements);
      const T* value = results + block * kBlock;
      T padded[kBlock];
      if (elements < kBlock) {
        std::fill(std::copy_n(value, elements, padded), padded + kBlock, T{});
        value = padded;
      }
      for (int i = 0; i < kBlock; i += Lanes<T>::kLanes) {
        const V y = load(value + i), inside = y * A(24) + A(9);
        const V slope = square_root(inside < 0 ? V{} : inside) / A(6);
        const V right = load(in + i) * (y < 3 ? slope : broadcast<V>(A(1)));
        const V left = y < 0 ? load(in + i) * -slope : V{};
        store(choose(bits >> i, right, left), to + i);
      }
    });
  });
  return out;
}

inline Tensor hardswish_output_backward(const Tensor& grad, const Tensor& result, const Tensor& mask) {
  return hardswish_output_backward_into(grad, result, mask, torch::stable::empty_like(grad));
}
inline Tensor hardswish_output_backward_(const Tensor& grad, const Tensor& result, const Tensor& mask) {
  return hardswish_output_backward_into(grad, result, mask, grad);
}

MONET_KERNEL(hardswish_output_backward);
MONET_KERNEL(hardswish_output_backward_);

}  // namespace monet
