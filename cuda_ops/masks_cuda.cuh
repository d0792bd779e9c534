// One bit for each element, in the order of storage: a thread takes one byte of the mask.

#pragma once

#include "elements_cuda.cuh"

namespace monet {

// --- masks from values

template <class Keep>
__device__ inline void pack_bits(const T* x, uint8_t* mask, int64_t count, bool whole, Keep keep) {
  for (int64_t p = first_index(); p < packs(count); p += index_step()) {
    const Pack values = load(x, p, count, whole);
    unsigned bits = 0;
    for (int i = 0; i < kPack; ++i)
      bits |= static_cast<unsigned>(p * kPack + i < count && keep(static_cast<A>(values.values[i]))) << i;
    mask[p] = static_cast<uint8_t>(bits);
  }
}

extern "C" __global__ void range_mask(const T* x, uint8_t* mask, int64_t count, int64_t whole, A low, A high) {
  pack_bits(x, mask, count, whole, [=](A value) { return !(value <= low) && !(value >= high); });
}

extern "C" __global__ void nonzero_mask(const T* x, uint8_t* mask, int64_t count, int64_t whole) {
  pack_bits(x, mask, count, whole, [](A value) { return value != 0; });
}

// From a mask of one byte for each element, as ATen's dropout gives it.
extern "C" __global__ void nonzero_bytes(const uint8_t* x, uint8_t* mask, int64_t count, int64_t whole) {
  for (int64_t p = first_index(); p < packs(count); p += index_step()) {
    uint64_t values = 0;
    if (whole && (p + 1) * kPack <= count) {
      values = reinterpret_cast<const uint64_t*>(x)[p];
    } else {
      for (int i = 0; i < kPack && p * kPack + i < count; ++i)
        values |= static_cast<uint64_t>(x[p * kPack + i]) << (8 * i);
    }
    unsigned bits = 0;
    for (int i = 0; i < kPack; ++i) bits |= static_cast<unsigned>((values >> (8 * i) & 0xff) != 0) << i;
    mask[p] = static_cast<uint8_t>(bits);
  }
}

// --- values changed by bits

template <class Change>
__device__ inline void change_by_bits(const T* x, const uint8_t* mask, T* to, int64_t count, bool whole,
                                      Change change) {
  for (int64_t p = first_index(); p < packs(count); p += index_step()) {
    Pack values = load(x, p, count, whole);
    const unsigned bits = mask[p];
#pragma unroll
    for (int i = 0; i < kPack; ++i) values.values[i] = change(values.values[i], (bits >> i & 1) != 0);
    store(values, to, p, count, whole);
  }
}

extern "C" __global__ void mask_backward(const T* grad, const uint8_t* mask, T* to, int64_t count, int64_t whole,
                                         A slope) {
  change_by_bits(grad, mask, to, count, whole, [=](T value, bool bit) {
    if (bit) return value;
    return slope == 0 ? T(0) : T(static_cast<A>(value) * slope);
  });
}

// `rounded`: whether the factor is rounded to T, as a tensor of noise would be.
extern "C" __global__ void mask_scale(const T* x, const uint8_t* mask, T* to, int64_t count, int64_t whole, A scale,
                                      int64_t rounded) {
  const A factor = rounded ? static_cast<A>(T(scale)) : scale;
  change_by_bits(x, mask, to, count, whole,
                 [=](T value, bool bit) { return T(static_cast<A>(value) * (bit ? factor : A(0))); });
}

}  // namespace monet
