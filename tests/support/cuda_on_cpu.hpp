// What a CUDA kernel finds on a device, on a CPU. Threads run one after the other; the lanes of a warp that exchange
// values run in fibers, which change places at each exchange. There is no barrier of a whole block.

#pragma once

#include <torch/headeronly/util/Half.h>
#include <setjmp.h>
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
  jmp_buf scheduler, lanes[kLanes];
  bool done[kLanes];
  int current = 0;
  unsigned first = 0;  // its first thread in the block
  double given[2][kLanes];
  int turn[kLanes];  // which of the two rows of `given` the lane uses next
};
static Warp warp;
static void (*body)(void*);
static void* arguments;

// swapcontext would ask the kernel for the signal mask each time: it only starts fibers.
static void to_scheduler() {
  if (_setjmp(warp.lanes[warp.current]) == 0) _longjmp(warp.scheduler, 1);
}

static void lane_main() {
  for (;;) {
    to_scheduler();
    body(arguments);
    warp.done[warp.current] = true;
  }
}

// Of this library alone: a static variable of an inline function would be shared with the other dtypes' libraries.
static std::vector<char> stacks;
static ucontext_t contexts[kLanes], here;

static void start_fibers() {
  if (!stacks.empty()) return;
  stacks.resize(kLanes * kStackBytes);
  for (int lane = 0; lane < kLanes; ++lane) {
    warp.current = lane;
    getcontext(&contexts[lane]);
    contexts[lane].uc_stack.ss_sp = &stacks[lane * kStackBytes];
    contexts[lane].uc_stack.ss_size = kStackBytes;
    makecontext(&contexts[lane], lane_main, 0);
    if (_setjmp(warp.scheduler) == 0) swapcontext(&here, &contexts[lane]);
  }
}

// All lanes up to their next exchange, or to their end.
static bool round() {
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.done[lane]) continue;
    any = true;
    warp.current = lane;
    threadIdx.x = warp.first + lane;
    if (_setjmp(warp.scheduler) == 0) _longjmp(warp.lanes[lane], 1);
    lane = warp.current;
  }
  return any;
}

static const double* exchange(double value) {
  const int lane = warp.current, row = warp.turn[lane];
  warp.turn[lane] = 1 - row;
  warp.given[row][lane] = value;
  to_scheduler();
  return warp.given[row];
}

static void run(unsigned blocks, unsigned threads, bool exchanges, void (*kernel)(void*), void* values) {
  body = kernel;
  arguments = values;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    if (!exchanges) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(values);
      continue;
    }
    start_fibers();
    for (warp.first = 0; warp.first < threads; warp.first += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
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
static E __shfl_xor_sync(unsigned, E value, int mask) {
  const int lane = on_cpu::warp.current;
  return static_cast<E>(on_cpu::exchange(static_cast<double>(value))[lane ^ mask]);
}
static int __all_sync(unsigned, int holds) {
  const double* given = on_cpu::exchange(holds);
  for (int lane = 0; lane < on_cpu::kLanes; ++lane)
    if (given[lane] == 0) return 0;
  return 1;
}

namespace monet {

inline float half_to_float(uint16_t bits) { return torch::headeronly::detail::fp16_ieee_to_fp32_value(bits); }
inline uint16_t half_from_float(float value) { return torch::headeronly::detail::fp16_ieee_from_fp32_value(value); }

}  // namespace monet
