// One bit for each element, in the order of storage: element i is bit i % 8 of byte i / 8.

#pragma once

#include "dispatch_cpu.hpp"

namespace monet {

// `dropped` gives one bit for each lane: set where the mask's bit is to be 0.
template <class T, class Dropped>
void pack(const Tensor& x, const Tensor& mask, Dropped dropped) {
  constexpr int kLanes = Lanes<T>::kLanes;
  uint8_t* bytes = write<uint8_t>(mask);
  read_blocks(read<T>(x), x.numel(), [=](const T* in, int64_t block, int64_t elements) {
    uint64_t bits = 0;
    for (int i = 0; i < kBlock; i += kLanes) bits |= dropped(load(in + i)) << i;
    bits = ~bits;
    if (elements < kBlock) bits &= (uint64_t{1} << elements) - 1;
    std::memcpy(bytes + block * 8, &bits, static_cast<size_t>(mask_bytes(elements)));
  });
}

// From a mask of one byte for each element, as ATen's dropout gives it.
inline void pack_bytes(const uint8_t* from, int64_t count, uint8_t* bytes) {
  for (int64_t p = 0; p < mask_bytes(count); ++p) {
    unsigned bits = 0;
    for (int64_t i = 0; i < 8 && p * 8 + i < count; ++i) bits |= static_cast<unsigned>(from[p * 8 + i] != 0) << i;
    bytes[p] = static_cast<uint8_t>(bits);
  }
}

inline Tensor range_mask(const Tensor& x, double low, double high) {
  check_dense(x, "x");
  Tensor mask = new_bytes(x, mask_bytes(x.numel()));
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const auto lowest = broadcast<Values<T>>(static_cast<Arithmetic<T>>(low));
    const auto highest = broadcast<Values<T>>(static_cast<Arithmetic<T>>(high));
    pack<T>(x, mask, [=](Values<T> v) { return at_most_bits(v, lowest) | at_most_bits(highest, v); });
  });
  return mask;
}

inline Tensor nonzero_mask(const Tensor& x) {
  check_dense(x, "x");
  Tensor mask = new_bytes(x, mask_bytes(x.numel()));
  if (x.scalar_type() == ScalarType::Bool) {
    pack_bytes(read<uint8_t>(x), x.numel(), write<uint8_t>(mask));
    return mask;
  }
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    pack<T>(x, mask, [](Values<T> v) { return equal_bits(v, Values<T>{}); });
  });
  return mask;
}

MONET_KERNEL(range_mask);
MONET_KERNEL(nonzero_mask);

inline Tensor mask_backward_into(const Tensor& grad, const Tensor& mask, double slope, const Tensor& out) {
  check_dense(grad, "grad");
  check_mask(mask, grad.numel());
  const uint8_t* bytes = read<uint8_t>(mask);
  for_dtype(grad, [&](auto typed) {
    using T = typename decltype(typed)::type;
    constexpr int kLanes = Lanes<T>::kLanes;
    if (slope == 0) {
      using Raw = typename Lanes<T>::Raw;
      map_blocks(read<T>(grad), write<T>(out), grad.numel(), [=](const T* in, T* to, int64_t block, int64_t elements) {
        const uint64_t bits = read_bits(bytes, block, elements);
        for (int i = 0; i < kBlock; i += kLanes)
          store_as(to + i, choose(bits >> i, load_as<Raw>(in + i), Raw{}));
      });
      return;
    }
    const auto factor = broadcast<Values<T>>(static_cast<Arithmetic<T>>(slope));
    map_blocks(read<T>(grad), write<T>(out), grad.numel(), [=](const T* in, T* to, int64_t block, int64_t elements) {
      const uint64_t bits = read_bits(bytes, block, elements);
      for (int i = 0; i < kBlock; i += kLanes) {
        const auto value = load(in + i);
        store(choose(bits >> i, value, value * factor), to + i);
      }
    });
  });
  return out;
}

inline Tensor mask_scale_into(const Tensor& x, const Tensor& mask, double scale, const Tensor& out) {
  check_dense(x, "x");
  check_mask(mask, x.numel());
  const uint8_t* bytes = read<uint8_t>(mask);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const auto factor = broadcast<Values<T>>(rounded<T>(static_cast<Arithmetic<T>>(scale)));
    map_blocks(read<T>(x), write<T>(out), x.numel(), [=](const T* in, T* to, int64_t block, int64_t elements) {
      const uint64_t bits = read_bits(bytes, block, elements);
      for (int i = 0; i < kBlock; i += Lanes<T>::kLanes)
        store(load(in + i) * choose(bits >> i, factor, Values<T>{}), to + i);
    });
  });
  return out;
}

inline Tensor mask_backward(const Tensor& grad, const Tensor& mask, double slope) {
  return mask_backward_into(grad, mask, slope, torch::stable::empty_like(grad));
}
inline Tensor mask_backward_(const Tensor& grad, const Tensor& mask, double slope) {
  return mask_backward_into(grad, mask, slope, grad);
}

inline Tensor mask_scale(const Tensor& x, const Tensor& mask, double scale) {
  return mask_scale_into(x, mask, scale, torch::stable::empty_like(x));
}
inline Tensor mask_scale_(const Tensor& x, const Tensor& mask, double scale) {
  return mask_scale_into(x, mask, scale, x);
}

MONET_KERNEL(mask_backward);
MONET_KERNEL(mask_backward_);
MONET_KERNEL(mask_scale);
MONET_KERNEL(mask_scale_);

}  // namespace monet
