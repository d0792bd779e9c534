// What the CUDA kernels share: types, launches, and eight elements at a time.

#pragma once

#include "both.hpp"

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace monet {

using BFloat16 = torch::headeronly::BFloat16;
using Half = torch::headeronly::Half;

}  // namespace monet

#include "dtypes.hpp"  // after BFloat16 and Half

namespace monet {

template <class T>
struct ArithmeticOf {
  using type = float;
};
template <>
struct ArithmeticOf<double> {
  using type = double;
};
template <class T>
using Arithmetic = typename ArithmeticOf<T>::type;

constexpr int kThreads = 256;
constexpr int kPack = 8;

// A kernel of body(i) for i below `count`, on the current stream of `like`'s device.
template <class Body>
__global__ void each(int64_t count, Body body) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) body(i);
}

template <class Body>
void launch(const Tensor& like, int64_t count, Body body) {
  if (count == 0) return;
  const auto device = like.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  // enough blocks to fill any device several times over; the loop does the rest
  const int64_t blocks = std::min<int64_t>((count + kThreads - 1) / kThreads, 1 << 16);
  each<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(count, body);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Eight elements, in as few loads as possible where the address is aligned.
template <class T>
struct alignas(16) Pack {
  T values[kPack];
};

inline bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

template <class T>
__device__ inline Pack<T> load(const T* from, int64_t pack, int64_t count, bool whole) {
  Pack<T> result;
  if (whole && (pack + 1) * kPack <= count) {
    const uint4* words = reinterpret_cast<const uint4*>(from + pack * kPack);
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(Pack<T>) / sizeof(uint4)); ++w)
      reinterpret_cast<uint4*>(&result)[w] = words[w];
  } else {
    for (int i = 0; i < kPack; ++i) {
      const int64_t at = pack * kPack + i;
      result.values[i] = at < count ? from[at] : T(0);
    }
  }
  return result;
}

template <class T>
__device__ inline void store(const Pack<T>& values, T* to, int64_t pack, int64_t count, bool whole) {
  if (whole && (pack + 1) * kPack <= count) {
    uint4* words = reinterpret_cast<uint4*>(to + pack * kPack);
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(Pack<T>) / sizeof(uint4)); ++w)
      words[w] = reinterpret_cast<const uint4*>(&values)[w];
  } else {
    for (int i = 0; i < kPack && pack * kPack + i < count; ++i) to[pack * kPack + i] = values.values[i];
  }
}

inline int64_t packs(int64_t count) { return (count + kPack - 1) / kPack; }

}  // namespace monet
