// The operators of torch.ops.monet on CUDA. What each means is said where it is defined (monetrun/ops/definitions.py).

#include "channel_norm_backward_cuda.cuh"
#include "masks_cuda.cuh"
#include "normalize_backward_cuda.cuh"
#include "normalize_cuda.cuh"
#include "pooling_cuda.cuh"

#include "operators.hpp"

STABLE_TORCH_LIBRARY_IMPL(monet, CUDA, library) {
  register_operators(library);
}
