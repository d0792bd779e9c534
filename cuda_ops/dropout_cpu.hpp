// Dropout whose mask is drawn again from a counter.

#pragma once

#include "masks_cpu.hpp"
#include "philox.hpp"

namespace monet {

// Bit i of the low 16 bits to place 4 * i.
inline uint64_t spread(uint64_t bits) {
  bits = (bits | bits << 24) & 0x000000ff000000ffu;
  bits = (bits | bits << 12) & 0x000f000f000f000fu;
  bits = (bits | bits << 6) & 0x0303030303030303u;
  return (bits | bits << 3) & 0x1111111111111111u;
}

// A generator with its keys laid out for all lanes. A lane holds 32 bits, and above them what no product reads.
class Philox {
  using V = Vector<uint64_t>;
  static constexpr int kLanes = sizeof(V) / 8, kVectors = 16 / kLanes;

 public:
  explicit Philox(uint64_t seed) {
    uint32_t keys[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (auto& round : keys_) {
      for (int k = 0; k < 2; ++k) round[k] = broadcast<V>(uint64_t{keys[k]});
      keys[0] += kPhiloxStep0;
      keys[1] += kPhiloxStep1;
    }
    for (int i = 0; i < kLanes; ++i) places_[i] = i;
  }

  // For the 16 counters from `counter` on: whether each of their 64 words is above `last`.
  uint64_t above(uint64_t counter, uint32_t last) const {
    V words[4][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      words[0][v] = places_ + (counter + v * kLanes);
      words[1][v] = words[0][v] >> 32;
      words[2][v] = words[3][v] = V{};
    }
    for (const auto& keys : keys_) {
      for (int v = 0; v < kVectors; ++v) {
        const V first = multiply_low(words[0][v], broadcast<V>(uint64_t{kPhiloxFactor0}));
        const V second = multiply_low(words[2][v], broadcast<V>(uint64_t{kPhiloxFactor1}));
        words[0][v] = (second >> 32) ^ words[1][v] ^ keys[0];
        words[1][v] = second;
        words[2][v] = (first >> 32) ^ words[3][v] ^ keys[1];
        words[3][v] = first;
      }
    }
    uint64_t above = 0;
    for (int w = 0; w < 4; ++w) {
      uint64_t bits = 0;
      for (int v = 0; v < kVectors; ++v)
        bits |= lane_bits((words[w][v] & 0xffffffffu) > uint64_t{last}) << (v * kLanes);
      above |= spread(bits) << w;
    }
    return above;
  }

 private:
  V keys_[kPhiloxRounds][2], places_;
};

inline Tensor philox_dropout(const Tensor& x, double p, int64_t seed, int64_t offset) {
  check_dense(x, "x");
  STD_TORCH_CHECK(p >= 0 && p <= 1, "p must be between 0 and 1, got ", p);
  const uint64_t threshold = philox_threshold(p);
  const Philox generator(static_cast<uint64_t>(seed));
  Tensor out = torch::stable::empty_like(x);
  for_dtype(x, [&](auto typed) {
    using T = typename decltype(typed)::type;
    const auto factor = broadcast<Values<T>>(rounded<T>(static_cast<Arithmetic<T>>(philox_scale(p))));
    map_blocks(read<T>(x), write<T>(out), x.numel(), [&](const T* in, T* to, int64_t block, int64_t) {
      const auto counter = static_cast<uint64_t>(offset + block * (kBlock / 4));
      const uint64_t keep = threshold == 0 ? ~uint64_t{0} : generator.above(counter, threshold - 1);
      scale_block(in, to, keep, factor);
    });
  });
  return out;
}

}  // namespace monet
