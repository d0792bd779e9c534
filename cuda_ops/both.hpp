// For what the CPU and CUDA kernels share.

#pragma once

#if defined(__CUDACC_RTC__)  // NVRTC has no standard library
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define MONET_BOTH __host__ __device__
#else
#define MONET_BOTH
#endif
