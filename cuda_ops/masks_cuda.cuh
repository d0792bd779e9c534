// One bit for each element, in the order of storage: a thread takes one byte of the mask.

#pragma once

#include "elements_cuda.cuh"
#include "masks.hpp"

namespace monet {

// --- masks from values

template <class A>
struct WithinRange {
  A low, high;
  __device__ bool operator()(A value) const { return !(value <= low) && !(value >= high); }
};

template <class A>
struct NotZero {
  __device__ bool operator()(A value) const { return value != 0; }
};

template <class T, class Keep>
struct PackBits {
  const T* from;
  uint8_t* bytes;
  int64_t count;
  bool whole;
  Keep keep;

  __device__ void operator()(int64_t p) const {
    const Pack<T> values = load(from, p, count, whole);
    unsigned bits = 0;
    for (int i = 0; i < kPack; ++i)
      bits |= static_cast<unsigned>(p * kPack + i < count && keep(static_cast<Arithmetic<T>>(values.values[i]))) << i;
    bytes[p] = static_cast<uint8_t>(bits);
  }
};

template <class T, class Keep>
void pack_bits(const Tensor& x, const Tensor& mask, Keep keep) {
  const T* from = read<T>(x);
  launch(x, packs(x.numel()), PackBits<T, Keep>{from, write<uint8_t>(mask), x.numel(), aligned(from), keep});
}

// A mask of one byte for each element, as ATen's dropout gives it; a thread takes eight.
struct PackBytes {
  const uint8_t* from;
  uint8_t* bytes;
  int64_t count;
  bool whole;

  __device__ void operator()(int64_t p) const {
    uint64_t values = 0;
    if (whole && (p + 1) * kPack <= count) {
      values = reinterpret_cast<const uint64_t*>(from)[p];
    } else {
      for (int i = 0; i < kPack && p * kPack + i < count; ++i)
        values |= static_cast<uint64_t>(from[p * kPack + i]) << (8 * i);
    }
    unsigned bits = 0;
    for (int i = 0; i < kPack; ++i) bits |= static_cast<unsigned>((values >> (8 * i) & 0xff) != 0) << i;
    bytes[p] = static_cast<uint8_t>(bits);
  }
};

inline Tensor range_mask(const Tensor& x, double low, double high) {
  check_dense(x, "x");
  Tensor mask = new_bytes(x, mask_bytes(x.numel()));
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    pack_bits<T>(x, mask, WithinRange<A>{static_cast<A>(low), static_cast<A>(high)});
  });
  return mask;
}

inline Tensor nonzero_mask(const Tensor& x) {
  check_dense(x, "x");
  Tensor mask = new_bytes(x, mask_bytes(x.numel()));
  if (x.scalar_type() == ScalarType::Bool) {
    const uint8_t* from = read<uint8_t>(x);
    launch(x, packs(x.numel()), PackBytes{from, write<uint8_t>(mask), x.numel(), aligned(from)});
    return mask;
  }
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    pack_bits<T>(x, mask, NotZero<Arithmetic<T>>{});
  });
  return mask;
}

MONET_KERNEL(range_mask);
MONET_KERNEL(nonzero_mask);

// --- values changed by bits

template <class T>
struct SlopeWhereUnset {
  Arithmetic<T> slope;
  __device__ T operator()(T value, bool bit) const {
    if (bit) return value;
    return slope == 0 ? T(0) : T(static_cast<Arithmetic<T>>(value) * slope);
  }
};

template <class T>
struct TimesFactorOrZero {
  Arithmetic<T> factor;
  __device__ T operator()(T value, bool bit) const {
    return T(static_cast<Arithmetic<T>>(value) * (bit ? factor : Arithmetic<T>(0)));
  }
};

template <class T, class Change>
struct ChangeByBits {
  const T* from;
  const uint8_t* bytes;
  T* to;
  int64_t count;
  bool whole;
  Change change;

  __device__ void operator()(int64_t p) const {
    Pack<T> values = load(from, p, count, whole);
    const unsigned bits = bytes[p];
#pragma unroll
    for (int i = 0; i < kPack; ++i) values.values[i] = change(values.values[i], (bits >> i & 1) != 0);
    store(values, to, p, count, whole);
  }
};

template <class T, class Change>
void change_by_bits(const Tensor& x, const Tensor& mask, const Tensor& out, Change change) {
  const T* from = read<T>(x);
  T* to = write<T>(out);
  const bool whole = aligned(from) && aligned(to);
  launch(x, packs(x.numel()), ChangeByBits<T, Change>{from, read<uint8_t>(mask), to, x.numel(), whole, change});
}

inline Tensor mask_backward_into(const Tensor& grad, const Tensor& mask, double slope, const Tensor& out) {
  check_dense(grad, "grad");
  check_mask(mask, grad.numel());
  for_dtype(grad, [&](auto typed) {
    using T = typename decltype(typed)::type;
    change_by_bits<T>(grad, mask, out, SlopeWhereUnset<T>{static_cast<Arithmetic<T>>(slope)});
  });
  return out;
}

// `rounded`: whether the factor is rounded to the dtype, as a tensor of noise would be.
inline Tensor scale_by_bits(const Tensor& x, const Tensor& mask, double scale, bool rounded, const Tensor& out) {
  check_dense(x, "x");
  check_mask(mask, x.numel());
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    using A = Arithmetic<T>;
    const A factor = rounded ? static_cast<A>(T(static_cast<A>(scale))) : static_cast<A>(scale);
    change_by_bits<T>(x, mask, out, TimesFactorOrZero<T>{factor});
  });
  return out;
}

inline Tensor mask_scale_into(const Tensor& x, const Tensor& mask, double scale, const Tensor& out) {
  return scale_by_bits(x, mask, scale, true, out);
}

inline Tensor dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  return scale_by_bits(grad, mask, scale, false, torch::stable::empty_like(grad));
}
inline Tensor dropout_backward_(const Tensor& grad, const Tensor& mask, double scale) {
  return scale_by_bits(grad, mask, scale, false, grad);
}

MONET_KERNEL(dropout_backward);
MONET_KERNEL(dropout_backward_);

}  // namespace monet
