// What a CUDA kernel finds on a device, on a CPU: threads are run one after the other, in fibers that change places where
// the lanes of a warp exchange values. Kernels with a barrier of a whole block are not provided for.

#pragma once

#include <torch/headeronly/util/Half.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <vector>

#define __global__
#define __device__
#define __host__

struct Three {
  unsigned x = 0, y = 0, z = 0;
};
static Three blockIdx, threadIdx, blockDim, gridDim;
using std::sqrt;

namespace on_cpu {

constexpr int kLanes = 32, kStackBytes = 64 << 10;

struct Warp {
  ucontext_t scheduler, lanes[kLanes];
  std::vector<char> stacks = std::vector<char>(kLanes * kStackBytes);
  bool done[kLanes];
  int current = 0;
  unsigned first = 0;  // its first thread in the block
  double given[2][kLanes];
  int turn[kLanes];  // which of the two rows of `given` the lane uses next
};
static Warp warp;
static void (*body)(void*);
static void* arguments;

inline void lane_main() {
  body(arguments);
  warp.done[warp.current] = true;
  swapcontext(&warp.lanes[warp.current], &warp.scheduler);
}

// All lanes up to their next exchange, or to their end.
inline bool round() {
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.done[lane]) continue;
    any = true;
    warp.current = lane;
    threadIdx.x = warp.first + lane;
    swapcontext(&warp.scheduler, &warp.lanes[lane]);
  }
  return any;
}

inline const double* exchange(double value) {
  const int lane = warp.current, row = warp.turn[lane];
  warp.turn[lane] = 1 - row;
  warp.given[row][lane] = value;
  swapcontext(&warp.lanes[lane], &warp.scheduler);
  return warp.given[row];
}

inline void run(unsigned blocks, unsigned threads, void (*kernel)(void*), void* values) {
  body = kernel;
  arguments = values;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (warp.first = 0; warp.first < threads; warp.first += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        ucontext_t& context = warp.lanes[lane];
        getcontext(&context);
        context.uc_stack.ss_sp = &warp.stacks[lane * kStackBytes];
        context.uc_stack.ss_size = kStackBytes;
        context.uc_link = nullptr;
        makecontext(&context, lane_main, 0);
        warp.done[lane] = false;
        warp.turn[lane] = 0;
      }
      while (round()) {
      }
    }
  }
}

}  // namespace on_cpu

template <class E>
inline E __shfl_xor_sync(unsigned, E value, int mask) {
  const int lane = on_cpu::warp.current;
  return static_cast<E>(on_cpu::exchange(static_cast<double>(value))[lane ^ mask]);
}
inline int __all_sync(unsigned, int holds) {
  const double* given = on_cpu::exchange(holds);
  for (int lane = 0; lane < on_cpu::kLanes; ++lane)
    if (given[lane] == 0) return 0;
  return 1;
}

namespace monet {

inline float half_to_float(uint16_t bits) { return torch::headeronly::detail::fp16_ieee_to_fp32_value(bits); }
inline uint16_t half_from_float(float value) { return torch::headeronly::detail::fp16_ieee_from_fp32_value(value); }

}  // namespace monet
