// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the bits are a function of a
// key and a counter, so that a mask is drawn again instead of kept. The same on the CPU and on CUDA.

#pragma once

#include <cmath>
#include <cstdint>

namespace monet {

constexpr int kPhiloxRounds = 10;

constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;

// An element is dropped where its word is below this.
inline uint64_t philox_threshold(double p) { return static_cast<uint64_t>(std::nearbyint(std::ldexp(p, 32))); }

// What is kept is multiplied by this; 0 where nothing is kept.
inline double philox_scale(double p) { return p == 1 ? 0.0 : 1.0 / (1.0 - p); }

}  // namespace monet
