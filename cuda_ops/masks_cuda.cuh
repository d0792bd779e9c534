// One bit for each element, in the order of storage, and dropout: a thread takes one byte of the mask.

#pragma once

#include "elements_cuda.cuh"
#include "masks.hpp"
#include "philox.hpp"

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
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    pack_bits<T>(x, mask, NotZero<Arithmetic<T>>{});
  });
  return mask;
}

// --- values changed by bits

struct KeptBits {
  const uint8_t* bytes;
  __device__ unsigned operator()(int64_t p) const { return bytes[p]; }
};

// The eight bits of two counters: whether each of their words is at least `threshold`.
struct PhiloxBits {
  uint64_t seed, offset, threshold;

  __device__ unsigned of(uint64_t counter) const {
    uint32_t words[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
    uint32_t keys[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const uint32_t first = words[0], second = words[2];
      words[0] = __umulhi(second, kPhiloxFactor1) ^ words[1] ^ keys[0];
      words[1] = second * kPhiloxFactor1;
      words[2] = __umulhi(first, kPhiloxFactor0) ^ words[3] ^ keys[1];
      words[3] = first * kPhiloxFactor0;
      keys[0] += kPhiloxStep0;
      keys[1] += kPhiloxStep1;
    }
    unsigned bits = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) bits |= static_cast<unsigned>(words[w] >= threshold) << w;
    return bits;
  }
  __device__ unsigned operator()(int64_t p) const {
    const uint64_t counter = offset + static_cast<uint64_t>(p) * 2;
    return of(counter) | of(counter + 1) << 4;
  }
};

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

template <class T, class BitsOf, class Change>
struct ChangeByBits {
  const T* from;
  T* to;
  int64_t count;
  bool whole;
  BitsOf bits_of;
  Change change;

  __device__ void operator()(int64_t p) const {
    Pack<T> values = load(from, p, count, whole);
    const unsigned bits = bits_of(p);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values.values[i] = change(values.values[i], (bits >> i & 1) != 0);
    store(values, to, p, count, whole);
  }
};

template <class T, class BitsOf, class Change>
void change_by_bits(const Tensor& x, const Tensor& out, BitsOf bits_of, Change change) {
  const T* from = read<T>(x);
  T* to = write<T>(out);
  const bool whole = aligned(from) && aligned(to);
  launch(x, packs(x.numel()), ChangeByBits<T, BitsOf, Change>{from, to, x.numel(), whole, bits_of, change});
}

// The factor is rounded to T, as a tensor of noise would be.
template <class T>
TimesFactorOrZero<T> factor_or_zero(double scale) {
  using A = Arithmetic<T>;
  return {static_cast<A>(T(static_cast<A>(scale)))};
}

inline void mask_backward_into(const Tensor& grad, const Tensor& mask, double slope, const Tensor& out) {
  check_dense(grad, "grad");
  check_mask(mask, grad.numel());
  for_dtype(grad, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const KeptBits bits{read<uint8_t>(mask)};
    change_by_bits<T>(grad, out, bits, SlopeWhereUnset<T>{static_cast<Arithmetic<T>>(slope)});
  });
}

inline void mask_scale_into(const Tensor& x, const Tensor& mask, double scale, const Tensor& out) {
  check_dense(x, "x");
  check_mask(mask, x.numel());
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    change_by_bits<T>(x, out, KeptBits{read<uint8_t>(mask)}, factor_or_zero<T>(scale));
  });
}

inline Tensor philox_dropout(const Tensor& x, double p, int64_t seed, int64_t offset) {
  check_dense(x, "x");
  STD_TORCH_CHECK(p >= 0 && p <= 1, "p must be between 0 and 1, got ", p);
  const PhiloxBits bits{static_cast<uint64_t>(seed), static_cast<uint64_t>(offset), philox_threshold(p)};
  Tensor out = torch::stable::empty_like(x);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    change_by_bits<T>(x, out, bits, factor_or_zero<T>(philox_scale(p)));
  });
  return out;
}

}  // namespace monet
