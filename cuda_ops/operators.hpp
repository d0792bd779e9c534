// The operators that the CPU and CUDA both have. To be included behind their definitions.

#pragma once

template <class Library>
void register_operators(Library& library) {
  library.impl("range_mask", TORCH_BOX(&monet::range_mask));
  library.impl("nonzero_mask", TORCH_BOX(&monet::nonzero_mask));
  library.impl("mask_backward", TORCH_BOX(&monet::mask_backward));
  library.impl("mask_backward_", TORCH_BOX(&monet::mask_backward_));
  library.impl("mask_scale", TORCH_BOX(&monet::mask_scale));
  library.impl("mask_scale_", TORCH_BOX(&monet::mask_scale_));
  library.impl("hardswish_output_backward", TORCH_BOX(&monet::hardswish_output_backward));
  library.impl("hardswish_output_backward_", TORCH_BOX(&monet::hardswish_output_backward_));
  library.impl("max_pool2d_index", TORCH_BOX(&monet::max_pool2d_index));
  library.impl("max_pool2d_index_backward", TORCH_BOX(&monet::max_pool2d_index_backward));
  library.impl("max_pool2d_input_backward", TORCH_BOX(&monet::max_pool2d_input_backward));
  library.impl("batch_norm_act", TORCH_BOX(&monet::batch_norm_act));
  library.impl("layer_norm_output_backward", TORCH_BOX(&monet::layer_norm_output_backward));
  library.impl("affine_invertible", TORCH_BOX(&monet::affine_invertible));
  library.impl("channel_norm_output_backward", TORCH_BOX(&monet::channel_norm_output_backward));
}
