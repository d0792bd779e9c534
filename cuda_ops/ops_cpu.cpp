// The kernels of torch.ops.monet on the CPU: each file registers its own (MONET_KERNEL). The operators are defined in
// monetrun/ops/families.

#include "channel_norm_backward_cpu.hpp"
#include "hardswish_cpu.hpp"
#include "masks_cpu.hpp"
#include "normalize_backward_cpu.hpp"
#include "normalize_cpu.hpp"
#include "pooling_cpu.hpp"
