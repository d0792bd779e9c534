// What every kernel of the CPU uses of torch: types, checks, and its registration.
//
// Only torch's stable ABI, so that one build serves every torch from 2.11 on.

#pragma once

#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#endif

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

// Registers monet::name, defined above it, as the kernel of torch.ops.monet.name on the CPU.
#define MONET_KERNEL(name)                         \
  STABLE_TORCH_LIBRARY_IMPL(monet, CPU, library) { \
    library.impl(#name, TORCH_BOX(&monet::name));  \
  }                                                \
  static_assert(true)

namespace monet {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = torch::headeronly::HeaderOnlyArrayRef<int64_t>;

// Whether the elements fill one stretch of memory in the order of dimensions `order` (outermost first).
inline bool is_dense_in(const Tensor& t, const std::vector<int64_t>& order) {
  if (t.numel() == 0) return true;
  int64_t expected = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (t.size(*d) == 1) continue;
    if (t.stride(*d) != expected) return false;
    expected *= t.size(*d);
  }
  return true;
}

inline bool is_channels_last(const Tensor& t) {
  if (t.dim() < 3) return false;
  std::vector<int64_t> order{0};
  for (int64_t d = 2; d < t.dim(); ++d) order.push_back(d);
  order.push_back(1);
  return is_dense_in(t, order);
}

// Whether the elements fill one stretch of memory in any order of the dimensions.
inline bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  std::vector<int64_t> order(t.dim());
  for (int64_t d = 0; d < t.dim(); ++d) order[d] = d;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return t.stride(a) > t.stride(b); });
  return is_dense_in(t, order);
}

inline void check_dense(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(is_dense(t), name, " is not dense; make it contiguous (in any memory format) before");
}

inline void check_same_layout(const Tensor& a, const Tensor& b, const char* names) {
  bool same = a.scalar_type() == b.scalar_type() && a.dim() == b.dim();
  for (int64_t d = 0; same && d < a.dim(); ++d)
    same = a.size(d) == b.size(d) && (a.size(d) == 1 || a.stride(d) == b.stride(d));
  STD_TORCH_CHECK(same || (a.numel() == 0 && b.numel() == 0), names, " differ in shape, strides or dtype");
}

inline int64_t mask_bytes(int64_t elements) { return (elements + 7) / 8; }

inline void check_mask(const Tensor& mask, int64_t elements) {
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Byte && mask.is_contiguous() && mask.numel() == mask_bytes(elements),
                  "the mask must be ", mask_bytes(elements), " contiguous bytes for ", elements, " elements, got ",
                  mask.numel());
}

inline Tensor new_bytes(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, std::vector<int64_t>{bytes}, ScalarType::Byte);
}

inline Tensor new_images(const Tensor& like, const std::vector<int64_t>& size, ScalarType dtype, bool channels_last) {
  const auto format = channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous;
  return torch::stable::empty(size, dtype, std::nullopt, like.device(), std::nullopt, format);
}

}  // namespace monet
