// From a tensor's dtype to a kernel's type, and loops over a dense tensor's storage in blocks of 64 elements.

#pragma once

#include "lanes.hpp"
#include "dtypes.hpp"  // after lanes.hpp, which defines BFloat16 and Half

namespace monet {

constexpr int64_t kBlock = 64;
// torch's own grain of 32768 elements
constexpr int64_t kBlocksPerTask = 512;

// The elements of a vector of parameters, in the type of the arithmetic.
template <class A>
std::vector<A> parameters(const Tensor& t, int64_t count, const char* name) {
  STD_TORCH_CHECK(t.numel() == count && t.is_contiguous(), name, " must be ", count, " contiguous elements, got ",
                  t.numel());
  std::vector<A> values(count);
  for_dtype(t, [&](auto typed) {
    using P = typename decltype(typed)::type;
    const P* from = read<P>(t);
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<A>(widen(from[i]));
  });
  return values;
}
template <class A>
std::vector<A> parameters(const std::optional<Tensor>& t, int64_t count, A otherwise, const char* name) {
  return t ? parameters<A>(*t, count, name) : std::vector<A>(count, otherwise);
}

// The 64 bits of block `block` of a packed mask.
inline uint64_t read_bits(const uint8_t* mask, int64_t block, int64_t elements) {
  uint64_t bits = 0;
  std::memcpy(&bits, mask + block * 8, static_cast<size_t>(mask_bytes(std::min(kBlock, elements))));
  return bits;
}

// body(const T* in, int64_t block, int64_t elements) over all blocks; `in` always has 64 readable elements.
template <class T, class Body>
void read_blocks(const T* in, int64_t count, Body body) {
  torch::stable::parallel_for(0, (count + kBlock - 1) / kBlock, kBlocksPerTask, [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t elements = std::min(kBlock, count - block * kBlock);
      if (elements == kBlock) {
        const char* ahead = reinterpret_cast<const char*>(in + block * kBlock) + 2048;
        for (size_t line = 0; line < kBlock * sizeof(T); line += 64) __builtin_prefetch(ahead + line);
        body(in + block * kBlock, block, kBlock);
      } else {
        T padded[kBlock] = {};
        std::memcpy(padded, in + block * kBlock, elements * sizeof(T));
        body(padded, block, elements);
      }
    }
  });
}

// body(const T* in, T* out, int64_t block, int64_t elements) over all blocks; both always have 64 elements. `out` may
// be `in`.
template <class T, class Body>
void map_blocks(const T* in, T* out, int64_t count, Body body) {
  read_blocks(in, count, [=](const T* from, int64_t block, int64_t elements) {
    if (elements == kBlock) {
      body(from, out + block * kBlock, block, kBlock);
    } else {
      T padded[kBlock];
      body(from, padded, block, elements);
      std::memcpy(out + block * kBlock, padded, elements * sizeof(T));
    }
  });
}

}  // namespace monet
