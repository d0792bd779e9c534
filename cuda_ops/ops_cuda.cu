// The kernels of torch.ops.monet on CUDA, for elements of the type MONET_T. `monetrun/ops/cuda` launches them.

#include "channel_norm_backward_cuda.cuh"
#include "hardswish_cuda.cuh"
#include "masks_cuda.cuh"
#include "normalize_backward_cuda.cuh"
#include "normalize_cuda.cuh"
#include "pooling_cuda.cuh"
