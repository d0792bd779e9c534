// Reads and resets the peaks of torch's allocator for CUDA, of which Python's own function makes dictionaries of 200
// numbers each time. monetrun/capture/device_peaks.py says for whom they are kept.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace {

struct DevicePeaks : torch::CustomClassHolder {
  // Bytes allocated now and at most, reserved now and at most; how often an allocation was tried again.
  std::vector<int64_t> read(int64_t device) const {
    const auto stats = allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto &allocated = stats.allocated_bytes[0], &reserved = stats.reserved_bytes[0];
    return {allocated.current, allocated.peak, reserved.current, reserved.peak, stats.num_alloc_retries};
  }

  // All peaks start anew; what they were is kept.
  void reset(int64_t device) {
    const auto stats = allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const std::array arrays = {&stats.allocation,     &stats.segment,        &stats.active,
                               &stats.inactive_split, &stats.allocated_bytes, &stats.reserved_bytes,
                               &stats.active_bytes,   &stats.inactive_split_bytes, &stats.requested_bytes};
    const std::lock_guard lock(mutex_);  // a call from Python lets other threads run
    auto& most = kept_[device];
    most.resize(arrays.size() * arrays[0]->size());
    auto to = most.begin();
    for (const auto* pools : arrays) {
      for (const auto& pool : *pools) {
        *to = std::max(*to, pool.peak);
        ++to;
      }
    }
    allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device));
  }

  // What was kept since this was called last, by counter and pool; empty if nothing was.
  std::vector<int64_t> take(int64_t device) {
    const std::lock_guard lock(mutex_);
    auto most = std::move(kept_[device]);
    kept_.erase(device);
    return most;
  }

 private:
  static c10::DeviceAllocator* allocator() { return c10::getDeviceAllocator(c10::DeviceType::CUDA); }

  std::mutex mutex_;
  std::map<int64_t, std::vector<int64_t>> kept_;
};

}  // namespace
