// One bit for each element, in the order of storage, and dropout: a thread takes one byte of the mask.

#pragma once

#include "elements_cuda.cuh"
#include "philox.hpp"

namespace monet {

template <class T, class Keep>
void pack(const Tensor& x, const Tensor& mask, Keep keep) {
  const T* from = read<T>(x);
  uint8_t* bytes = write<uint8_t>(mask);
  const int64_t count = x.numel();
  const bool whole = aligned(from);
  launch(x, packs(count), [=] __device__(int64_t p) {
    const Pack<T> values = load(from, p, count, whole);
    unsigned bits = 0;
    for (int i = 0; i < kPack; ++i)
      bits |= static_cast<unsigned>(p * kPack + i < count && keep(static_cast<Arithmetic<T>>(values.values[i]))) << i;
    bytes[p] = static_cast<uint8_t>(bits);
  });
}

inline Tensor range_mask(const Tensor& x, double low, double high) {
  check_dense(x, "x");
  Tensor mask = new_bytes(x, mask_bytes(x.numel()));
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const auto lowest = static_cast<Arithmetic<T>>(low), highest = static_cast<Arithmetic<T>>(high);
    pack<T>(x, mask, [=] __device__(Arithmetic<T> v) { return !(v <= lowest) && !(v >= highest); });
  });
  return mask;
}

inline Tensor nonzero_mask(const Tensor& x) {
  check_dense(x, "x");
  Tensor mask = new_bytes(x, mask_bytes(x.numel()));
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    pack<T>(x, mask, [] __device__(Arithmetic<T> v) { return v != 0; });
  });
  return mask;
}

// out = change(x, bit) with bits_of(pack) giving the eight bits of a pack.
template <class T, class BitsOf, class Change>
void change(const Tensor& x, const Tensor& out, BitsOf bits_of, Change with) {
  const T* from = read<T>(x);
  T* to = write<T>(out);
  const int64_t count = x.numel();
  const bool whole = aligned(from) && aligned(to);
  launch(x, packs(count), [=] __device__(int64_t p) {
    Pack<T> values = load(from, p, count, whole);
    const unsigned bits = bits_of(p);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values.values[i] = with(values.values[i], (bits >> i & 1) != 0);
    store(values, to, p, count, whole);
  });
}

inline void mask_backward_into(const Tensor& grad, const Tensor& mask, double slope, const Tensor& out) {
  check_dense(grad, "grad");
  check_mask(mask, grad.numel());
  const uint8_t* bytes = read<uint8_t>(mask);
  const auto bits_of = [=] __device__(int64_t p) -> unsigned { return bytes[p]; };
  for_dtype(grad, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const auto factor = static_cast<Arithmetic<T>>(slope);
    change<T>(grad, out, bits_of, [=] __device__(T g, bool bit) {
      if (bit) return g;
      return factor == 0 ? T(0) : T(static_cast<Arithmetic<T>>(g) * factor);
    });
  });
}

inline Tensor mask_backward(const Tensor& grad, const Tensor& mask, double slope) {
  Tensor out = torch::stable::empty_like(grad);
  mask_backward_into(grad, mask, slope, out);
  return out;
}

inline Tensor mask_backward_(const Tensor& grad, const Tensor& mask, double slope) {
  mask_backward_into(grad, mask, slope, grad);
  return grad;
}

// x * (bit ? scale : 0), the factor rounded to T.
template <class T, class BitsOf>
void scale_by(const Tensor& x, double scale, const Tensor& out, BitsOf bits_of) {
  using A = Arithmetic<T>;
  const A factor = static_cast<A>(T(static_cast<A>(scale)));
  change<T>(x, out, bits_of,
            [=] __device__(T v, bool bit) { return T(static_cast<A>(v) * (bit ? factor : A(0))); });
}

inline void mask_scale_into(const Tensor& x, const Tensor& mask, double scale, const Tensor& out) {
  check_dense(x, "x");
  check_mask(mask, x.numel());
  const uint8_t* bytes = read<uint8_t>(mask);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    scale_by<T>(x, scale, out, [=] __device__(int64_t p) -> unsigned { return bytes[p]; });
  });
}

inline Tensor mask_scale(const Tensor& x, const Tensor& mask, double scale) {
  Tensor out = torch::stable::empty_like(x);
  mask_scale_into(x, mask, scale, out);
  return out;
}

inline Tensor mask_scale_(const Tensor& x, const Tensor& mask, double scale) {
  mask_scale_into(x, mask, scale, x);
  return x;
}

// Whether each of the four words of a counter is at least `threshold`, as bits.
__device__ inline unsigned philox_bits(uint64_t seed, uint64_t counter, uint64_t threshold) {
  uint32_t words[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t keys[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint32_t high[2] = {__umulhi(words[0], kPhiloxFactor0), __umulhi(words[2], kPhiloxFactor1)};
    const uint32_t low[2] = {words[0] * kPhiloxFactor0, words[2] * kPhiloxFactor1};
    words[0] = high[1] ^ words[1] ^ keys[0];
    words[1] = low[1];
    words[2] = high[0] ^ words[3] ^ keys[1];
    words[3] = low[0];
    keys[0] += kPhiloxStep0;
    keys[1] += kPhiloxStep1;
  }
  unsigned bits = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) bits |= static_cast<unsigned>(words[w] >= threshold) << w;
  return bits;
}

inline Tensor philox_dropout(const Tensor& x, double p, int64_t seed, int64_t offset) {
  check_dense(x, "x");
  STD_TORCH_CHECK(p >= 0 && p <= 1, "p must be between 0 and 1, got ", p);
  const uint64_t key = static_cast<uint64_t>(seed), first = static_cast<uint64_t>(offset);
  const uint64_t threshold = philox_threshold(p);
  Tensor out = torch::stable::empty_like(x);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    scale_by<T>(x, philox_scale(p), out, [=] __device__(int64_t pack) -> unsigned {
      const uint64_t counter = first + static_cast<uint64_t>(pack) * 2;
      return philox_bits(key, counter, threshold) | philox_bits(key, counter + 1, threshold) << 4;
    });
  });
  return out;
}

}  // namespace monet
