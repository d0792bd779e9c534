// The operators of torch.ops.monet on the CPU. What each means is said where it is defined (monetrun/ops/definitions.py).

#include "channel_norm_backward_cpu.hpp"
#include "masks_cpu.hpp"
#include "normalize_backward_cpu.hpp"
#include "normalize_cpu.hpp"
#include "pooling_cpu.hpp"

#include "operators.hpp"

STABLE_TORCH_LIBRARY_IMPL(monet, CPU, library) {
  register_operators(library);
}
