// Reads and resets the peaks of torch's allocator for CUDA, of which Python's own function makes dictionaries of 200
// numbers each time. monetrun/capture/device_peaks.py says for whom they are kept.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace {

// The most of each counter, by pool, before the resets by monetrun_device_reset; in the order of device_peaks.py.
std::mutex kept_mutex;
std::map<int64_t, std::vector<int64_t>> kept_peaks;  // by device

c10::DeviceAllocator* allocator() { return c10::getDeviceAllocator(c10::DeviceType::CUDA); }

auto device_stats(int64_t device) { return allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device)); }

// Whether work() has run to its end: not where torch knows no such device.
template <typename Work>
int32_t done(Work work) noexcept {
  try {
    work();
    return 1;
  } catch (...) {
    return 0;
  }
}

}  // namespace

extern "C" {

// Into ``bytes``: allocated now and at most, reserved now and at most; how often an allocation was tried again.
__attribute__((visibility("default"))) int32_t monetrun_device_read(int64_t device, int64_t* bytes) {
  return done([&] {
    const auto stats = device_stats(device);
    const auto &allocated = stats.allocated_bytes[0], &reserved = stats.reserved_bytes[0];
    bytes[0] = allocated.current;
    bytes[1] = allocated.peak;
    bytes[2] = reserved.current;
    bytes[3] = reserved.peak;
    bytes[4] = stats.num_alloc_retries;
  });
}

// All peaks start anew; what they were is kept.
__attribute__((visibility("default"))) int32_t monetrun_device_reset(int64_t device) {
  return done([&] {
    const auto stats = device_stats(device);
    const std::array arrays = {&stats.allocation,     &stats.segment,        &stats.active,
                               &stats.inactive_split, &stats.allocated_bytes, &stats.reserved_bytes,
                               &stats.active_bytes,   &stats.inactive_split_bytes, &stats.requested_bytes};
    const std::lock_guard lock(kept_mutex);  // a call from Python lets other threads run
    auto& most = kept_peaks[device];
    most.resize(arrays.size() * arrays[0]->size());
    auto to = most.begin();
    for (const auto* pools : arrays) {
      for (const auto& pool : *pools) {
        *to = std::max(*to, pool.peak);
        ++to;
      }
    }
    allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
}

// Into ``peaks`` what was kept since this was called last; gives how many these are, 0 if nothing was.
__attribute__((visibility("default"))) int32_t monetrun_device_take(int64_t device, int64_t* peaks) {
  const std::lock_guard lock(kept_mutex);
  const auto found = kept_peaks.extract(device);
  if (found.empty()) return 0;
  std::copy(found.mapped().begin(), found.mapped().end(), peaks);
  return static_cast<int32_t>(found.mapped().size());
}

}  // extern "C"
