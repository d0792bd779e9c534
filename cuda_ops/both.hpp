// For functions that the CPU and CUDA kernels share.

#pragma once

#if defined(__CUDACC__)
#define MONET_BOTH __host__ __device__
#else
#define MONET_BOTH
#endif
