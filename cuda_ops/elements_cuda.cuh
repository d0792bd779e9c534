// What the CUDA kernels share: the type of their elements, the indices of a thread, and eight elements at a time.
//
// All kernels are compiled once for each dtype, MONET_T. They include nothing of CUDA's or torch's: NVRTC needs no
// folder of headers. `monetrun/ops/cuda` checks the operands, makes the results and launches: in a kernel's list of
// parameters every integer is int64_t, every other number A, and everything else a pointer.

#pragma once

#include "both.hpp"

namespace monet {

#if !defined(__CUDACC__)  // compiled for the CPU by the tests, which define these
float half_to_float(uint16_t bits);
uint16_t half_from_float(float value);
#endif

struct Half {
  uint16_t bits;

  Half() = default;
  __device__ explicit Half(float value) {
#if defined(__CUDACC__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    bits = half_from_float(value);
#endif
  }
  __device__ operator float() const {
#if defined(__CUDACC__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return half_to_float(bits);
#endif
  }
};

union FloatBits {
  float value;
  uint32_t bits;
};

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  __device__ explicit BFloat16(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    FloatBits all;
    all.value = value;
    bits = value != value ? 0x7fc0 : static_cast<uint16_t>((all.bits + 0x7fff + ((all.bits >> 16) & 1)) >> 16);
#endif
  }
  __device__ operator float() const {
    FloatBits all;
    all.bits = static_cast<uint32_t>(bits) << 16;
    return all.value;
  }
};

template <class E>
struct ArithmeticOf {
  using type = float;
};
template <>
struct ArithmeticOf<double> {
  using type = double;
};

// Elements, and numbers in which is computed with them.
using T = MONET_T;
using A = ArithmeticOf<T>::type;

// A thread takes the indices first_index(), first_index() + index_step(), ...
__device__ inline int64_t first_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t index_step() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// Eight elements, in as few loads as possible where the address is aligned (`whole`).
constexpr int kPack = 8;
struct alignas(16) Pack {
  T values[kPack];
};
struct alignas(16) Words {
  uint32_t words[4];
};

__device__ inline int64_t packs(int64_t count) { return (count + kPack - 1) / kPack; }

__device__ inline Pack load(const T* from, int64_t pack, int64_t count, bool whole) {
  Pack result;
  if (whole && (pack + 1) * kPack <= count) {
    const Words* words = reinterpret_cast<const Words*>(from + pack * kPack);
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(Pack) / sizeof(Words)); ++w)
      reinterpret_cast<Words*>(&result)[w] = words[w];
  } else {
    for (int i = 0; i < kPack; ++i) {
      const int64_t at = pack * kPack + i;
      result.values[i] = at < count ? from[at] : T(0);
    }
  }
  return result;
}

__device__ inline void store(const Pack& values, T* to, int64_t pack, int64_t count, bool whole) {
  if (whole && (pack + 1) * kPack <= count) {
    Words* words = reinterpret_cast<Words*>(to + pack * kPack);
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(Pack) / sizeof(Words)); ++w)
      words[w] = reinterpret_cast<const Words*>(&values)[w];
  } else {
    for (int i = 0; i < kPack && pack * kPack + i < count; ++i) to[pack * kPack + i] = values.values[i];
  }
}

}  // namespace monet
