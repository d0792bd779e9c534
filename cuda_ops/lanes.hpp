// Vectors as wide as this processor's registers, over GCC's and clang's vector extension, for the four float types.
//
// Reduced types are computed in float, as ATen does (its "opmath" type).

#pragma once

#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace monet {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define MONET_AVX512 1
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

template <class E, int bytes>
struct VectorOf {
  typedef E type __attribute__((vector_size(bytes)));
};
template <class E, int bytes = kRegisterBytes>
using Vector = typename VectorOf<E, bytes>::type;

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float widen(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline float widen(Half value) { return torch::headeronly::detail::fp16_ieee_to_fp32_value(value.bits); }
inline float widen(float value) { return value; }
inline double widen(double value) { return value; }

inline void narrow(float value, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float value, Half* to) {
  to->bits = torch::headeronly::detail::fp16_ieee_from_fp32_value(value);
}
inline void narrow(float value, float* to) { *to = value; }
inline void narrow(double value, double* to) { *to = value; }

// A value rounded to T and widened again.
template <class T, class A>
inline A rounded(A value) {
  T kept;
  narrow(value, &kept);
  return widen(kept);
}

// One register's worth of T, of its arithmetic type A and of unsigned integers of T's size: all of kLanes lanes.
template <class T, class A, class U>
struct LanesOf {
  using Arithmetic = A;
  using Bits = U;
  static constexpr int kLanes = kRegisterBytes / static_cast<int>(sizeof(A));
  using Values = Vector<A>;
  using Raw = Vector<U, kLanes * static_cast<int>(sizeof(U))>;
};
template <class T>
struct Lanes;
template <>
struct Lanes<float> : LanesOf<float, float, uint32_t> {};
template <>
struct Lanes<double> : LanesOf<double, double, uint64_t> {};
template <>
struct Lanes<BFloat16> : LanesOf<BFloat16, float, uint16_t> {};
template <>
struct Lanes<Half> : LanesOf<Half, float, uint16_t> {};

template <class T>
using Arithmetic = typename Lanes<T>::Arithmetic;
template <class T>
using Values = typename Lanes<T>::Values;
// Unsigned integers of the size of the arithmetic type.
template <class T>
using Unsigned = std::conditional_t<sizeof(Arithmetic<T>) == 8, uint64_t, uint32_t>;
template <class T>
using UnsignedLanes = Vector<Unsigned<T>>;

template <class V>
inline V load_as(const void* from) {
  V result;
  std::memcpy(&result, from, sizeof result);
  return result;
}
template <class V>
inline void store_as(void* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

inline Vector<float> load(const float* from) { return load_as<Vector<float>>(from); }
inline Vector<double> load(const double* from) { return load_as<Vector<double>>(from); }
inline Vector<float> load(const BFloat16* from) {
#if defined(MONET_AVX512)  // GCC converts vectors in halves
  const auto bits = (Vector<uint32_t>)_mm512_cvtepu16_epi32(load_as<__m256i>(from));
#else
  const auto bits = __builtin_convertvector(load_as<Lanes<BFloat16>::Raw>(from), Vector<uint32_t>);
#endif
  return reinterpret_cast<Vector<float>>(bits << 16);
}
inline Vector<float> load(const Half* from) {
#if defined(MONET_AVX512)
  return (Vector<float>)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vector<float>)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
  Vector<float> result;
  for (int i = 0; i < Lanes<Half>::kLanes; ++i) result[i] = widen(from[i]);
  return result;
#endif
}

inline void store(Vector<float> value, float* to) { store_as(to, value); }
inline void store(Vector<double> value, double* to) { store_as(to, value); }
// The 16 bits of each lane, rounded to nearest even.
inline Vector<uint32_t> bfloat16_bits(Vector<float> value) {
  const auto bits = reinterpret_cast<Vector<uint32_t>>(value);
  const Vector<uint32_t> kept = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return value != value ? kept - kept + 0x7fc0 : kept;
}
inline void store(Vector<float> value, BFloat16* to) {
#if defined(MONET_AVX512)
  store_as(to, _mm512_cvtepi32_epi16((__m512i)bfloat16_bits(value)));
#else
  store_as(to, __builtin_convertvector(bfloat16_bits(value), Lanes<BFloat16>::Raw));
#endif
}
inline void store(Vector<float> value, Half* to) {
#if defined(MONET_AVX512)
  store_as(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  store_as(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < Lanes<Half>::kLanes; ++i) narrow(value[i], to + i);
#endif
}

// Each lane, rounded to T.
template <class T>
inline Values<T> round_to(Values<T> value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return reinterpret_cast<Values<T>>(bfloat16_bits(value) << 16);
  } else if constexpr (std::is_same_v<T, Half>) {
    Half kept[Lanes<T>::kLanes];
    store(value, kept);
    return load(kept);
  } else {
    return value;
  }
}

inline Vector<float> square_root(Vector<float> value) {
#if defined(MONET_AVX512)
  return (Vector<float>)_mm512_sqrt_ps((__m512)value);
#elif defined(__AVX2__)
  return (Vector<float>)_mm256_sqrt_ps((__m256)value);
#else
  for (int i = 0; i < kRegisterBytes / 4; ++i) value[i] = std::sqrt(value[i]);
  return value;
#endif
}
inline Vector<double> square_root(Vector<double> value) {
#if defined(MONET_AVX512)
  return (Vector<double>)_mm512_sqrt_pd((__m512d)value);
#elif defined(__AVX2__)
  return (Vector<double>)_mm256_sqrt_pd((__m256d)value);
#else
  for (int i = 0; i < kRegisterBytes / 8; ++i) value[i] = std::sqrt(value[i]);
  return value;
#endif
}

template <class V, class E>
inline V broadcast(E value) {
  return value - V{};  // a sum with 0 would lose the sign of -0
}

// One bit for each lane in which a <= b, or in which a == b, the first lane's lowest.
#if defined(MONET_AVX512)  // GCC's own comparisons give vectors, not bits
inline uint64_t at_most_bits(Vector<float> a, Vector<float> b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ);
}
inline uint64_t at_most_bits(Vector<double> a, Vector<double> b) {
  return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_LE_OQ);
}
inline uint64_t equal_bits(Vector<float> a, Vector<float> b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ);
}
inline uint64_t equal_bits(Vector<double> a, Vector<double> b) {
  return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_EQ_OQ);
}
#else
inline uint64_t lane_bits(Vector<int32_t> lanes) {
#if defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)lanes));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)lanes));
#else
  uint64_t bits = 0;
  for (int i = 0; i < kRegisterBytes / 4; ++i) bits |= static_cast<uint64_t>(lanes[i] & 1) << i;
  return bits;
#endif
}
inline uint64_t lane_bits(Vector<int64_t> lanes) {
#if defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)lanes));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_pd((__m128d)lanes));
#else
  uint64_t bits = 0;
  for (int i = 0; i < kRegisterBytes / 8; ++i) bits |= static_cast<uint64_t>(lanes[i] & 1) << i;
  return bits;
#endif
}
template <class V>
inline uint64_t at_most_bits(V a, V b) {
  return lane_bits(a <= b);
}
template <class V>
inline uint64_t equal_bits(V a, V b) {
  return lane_bits(a == b);
}
#endif

// `set` in lane i where bit i of `bits` is set, else `clear`; for floats of any size and for unsigned integers.
template <class V>
inline V choose(uint64_t bits, V set, V clear) {
  using E = std::remove_cv_t<std::remove_reference_t<decltype(V{}[0])>>;
#if defined(MONET_AVX512)
  if constexpr (sizeof(E) == 8) {
    return (V)_mm512_mask_blend_epi64(static_cast<__mmask8>(bits), (__m512i)clear, (__m512i)set);
  } else if constexpr (sizeof(E) == 4) {
    return (V)_mm512_mask_blend_epi32(static_cast<__mmask16>(bits), (__m512i)clear, (__m512i)set);
  } else {
    return (V)_mm256_mask_blend_epi16(static_cast<__mmask16>(bits), (__m256i)clear, (__m256i)set);
  }
#else
  using U = std::conditional_t<sizeof(E) == 8, uint64_t, std::conditional_t<sizeof(E) == 4, uint32_t, uint16_t>>;
  constexpr int kCount = sizeof(V) / sizeof(E);
  Vector<U, sizeof(V)> place;
  for (int i = 0; i < kCount; ++i) place[i] = static_cast<U>(uint64_t{1} << i);
  return (broadcast<Vector<U, sizeof(V)>>(static_cast<U>(bits)) & place) != 0 ? set : clear;
#endif
}

}  // namespace monet
