// The kernels of torch.ops.monet on CUDA: each file registers its own (MONET_KERNEL). The operators are defined in
// monetrun/ops/families.

#include "channel_norm_backward_cuda.cuh"
#include "hardswish_cuda.cuh"
#include "masks_cuda.cuh"
#include "normalize_backward_cuda.cuh"
#include "normalize_cuda.cuh"
#include "pooling_cuda.cuh"
