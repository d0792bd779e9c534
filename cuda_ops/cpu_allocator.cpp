// Counts, to the byte, what torch allocates on the CPU, and refuses what would pass a limit.
//
// A c10::Allocator that forwards to the one it finds. It is reached through plain C functions (ctypes), so that
// nothing but c10's headers is needed and a build takes seconds. c10's allocator interface is not part of torch's
// stable ABI: the library is built against the torch that loads it.

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kNoLimit = -1;
constexpr auto kRelaxed = std::memory_order_relaxed;

// Relaxed order is enough: each counter's own modification order is total, and nothing else is published by them.
std::atomic<int64_t> allocated{0};
std::atomic<int64_t> peak{0};
std::atomic<int64_t> limit{kNoLimit};
std::atomic<int64_t> last_refused{0};

// The limit holds for the thread that sets it, which trains. What other threads have allocated since then (loading the
// next batch, say) and still hold is no part of its step: it counts from the next limit on.
std::atomic<uint64_t> limits{0};  // so many were set
std::atomic<uint64_t> limited_thread{0};
std::atomic<int64_t> elsewhere{0};  // allocated by other threads under the present limit

uint64_t this_thread() {
  static std::atomic<uint64_t> threads{0};
  thread_local const uint64_t number = ++threads;
  return number;
}

void raise_peak(int64_t value) {
  int64_t seen = peak.load(kRelaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value, kRelaxed)) {
  }
}

// The size of each block, by its address. A header inside the block would change its alignment and what the
// profiler sees; a context of our own would make the pointer useless to raw_allocate and to lazy clones.
struct Block {
  int64_t nbytes = 0;
  uint64_t elsewhere_under = 0;  // the number of the limit under which another thread has allocated it; 0: none
};
struct Shard {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
};
constexpr size_t kShards = 64;  // threads rarely meet; blocks are 64-byte aligned, so the low bits say nothing
using Shards = std::array<Shard, kShards>;

Shards& shards() {
  static Shards* table = new Shards;  // never destroyed: tensors are freed during and after static destruction
  return *table;
}

Shard& shard_of(void* block) {
  const auto bits = reinterpret_cast<uintptr_t>(block) >> 6;
  return shards()[(bits ^ (bits >> 8)) % kShards];
}

// Of no bytes if it is not counted: allocated before the wrapper was installed, and not counted since.
Block forget(void* address) {
  Shard& shard = shard_of(address);
  const std::lock_guard<std::mutex> guard(shard.mutex);
  const auto found = shard.blocks.find(address);
  if (found == shard.blocks.end()) {
    return {};
  }
  const Block block = found->second;
  shard.blocks.erase(found);
  return block;
}

c10::Allocator* wrapped = nullptr;
c10::DeleterFnPtr wrapped_deleter = nullptr;

// While it is watched what is allocated and freed is noted, in order: what stays can be left out only afterwards.
struct Watch {
  std::mutex mutex;
  std::vector<std::pair<void*, int64_t>> changes;
};

std::atomic<bool> watching{false};
constexpr size_t kMostChanges = 1 << 22;  // of a watch that is never ended, since an optimizer's step has failed

Watch& watch() {
  static Watch* const only = new Watch;  // as for shards: never destroyed
  return *only;
}

void note(void* block, int64_t change) {
  if (watching.load(kRelaxed) && change != 0) {
    const std::lock_guard<std::mutex> guard(watch().mutex);
    watch().changes.emplace_back(block, change);
    if (watch().changes.size() >= kMostChanges) {
      watching.store(false, kRelaxed);
    }
  }
}

void counted_delete(void* address) {
  const Block block = forget(address);  // before the free: the address may be another thread's a moment later
  note(address, -block.nbytes);
  wrapped_deleter(address);
  allocated.fetch_sub(block.nbytes, kRelaxed);
  if (block.elsewhere_under != 0 && block.elsewhere_under == limits.load(kRelaxed)) {
    elsewhere.fetch_sub(block.nbytes, kRelaxed);
  }
}

std::string readable(int64_t nbytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f MiB (%lld bytes)", static_cast<double>(nbytes) / (1 << 20),
                static_cast<long long>(nbytes));
  return text;
}

[[noreturn]] void refuse(int64_t nbytes, int64_t held, int64_t cap) {
  last_refused.store(nbytes, kRelaxed);
  c10::reportOutOfMemoryToProfiler(nbytes, held, cap, c10::Device(c10::DeviceType::CPU));
  const int64_t free_bytes = cap > held ? cap - held : 0;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CPU out of memory. Under monetrun's limit: wanted ", readable(nbytes),
                   ", free ", readable(free_bytes), ", limit ", readable(cap),
                   " (DefaultCPUAllocator: can't allocate memory).");  // by which libraries know it
  std::abort();  // not reached; TORCH_CHECK_WITH is not declared noreturn
}

// What a thread that has run a collective still holds is freed once it gets a core.
constexpr auto kPatience = std::chrono::milliseconds(100);
constexpr auto kPause = std::chrono::microseconds(200);

// What the present thread may have allocated by now, with what other threads have; kNoLimit: all.
int64_t limit_here() {
  const int64_t cap = limit.load(kRelaxed);
  return cap == kNoLimit || limited_thread.load(kRelaxed) != this_thread() ? kNoLimit : cap + elsewhere.load(kRelaxed);
}

// Whether there is room for nbytes within the limit, or others make it before long; held: what is allocated by then.
bool has_room(int64_t nbytes, int64_t& held) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    const int64_t cap = limit_here();
    if (cap == kNoLimit || nbytes <= cap - held) {
      return true;
    }
    if (nbytes > limit.load(kRelaxed) || std::chrono::steady_clock::now() >= until) {
      return false;
    }
    std::this_thread::sleep_for(kPause);
    held = allocated.load(kRelaxed);
  }
}

// Adds nbytes if the sum stays within the limit, in one atomic step, and gives the sum.
int64_t reserve(int64_t nbytes) {
  int64_t held = allocated.load(kRelaxed);
  do {
    const int64_t cap = limit_here();
    if (cap != kNoLimit && nbytes > cap - held && !has_room(nbytes, held)) {
      refuse(nbytes, held, cap);
    }
  } while (!allocated.compare_exchange_weak(held, held + nbytes, kRelaxed));
  return held + nbytes;
}

// The number of the present limit, if that is another thread's; 0: there is none.
uint64_t under_another_threads_limit() {
  const bool is_anothers = limit.load(kRelaxed) != kNoLimit && limited_thread.load(kRelaxed) != this_thread();
  return is_anothers ? limits.load(kRelaxed) : 0;
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0 || n > static_cast<size_t>(std::numeric_limits<int64_t>::max())) {
      return own(wrapped->allocate(n));  // nothing to count; or an absurd size, which the wrapped one refuses
    }
    const auto nbytes = static_cast<int64_t>(n);
    const int64_t sum = reserve(nbytes);
    try {
      c10::DataPtr data = own(wrapped->allocate(n));
      Shard& shard = shard_of(data.get());
      const Block block{nbytes, under_another_threads_limit()};
      {
        const std::lock_guard<std::mutex> guard(shard.mutex);
        shard.blocks[data.get()] = block;
      }
      elsewhere.fetch_add(block.elsewhere_under != 0 ? nbytes : 0, kRelaxed);
      raise_peak(sum);
      note(data.get(), nbytes);
      return data;
    } catch (...) {
      allocated.fetch_sub(nbytes, kRelaxed);
      throw;
    }
  }

  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return wrapped->is_simple_data_ptr(data);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &counted_delete;
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    wrapped->copy_data(dest, src, count);
  }

 private:
  // raw_deleter's contract (c10/core/Allocator.h): every pointer of that allocator carries exactly that deleter.
  static c10::DataPtr own(c10::DataPtr data) {
    TORCH_CHECK(data.compare_exchange_deleter(wrapped_deleter, &counted_delete),
                "the wrapped CPU allocator gave a pointer without its own deleter");
    return data;
  }
};

// A forked child (a DataLoader's worker) must not inherit a locked shard, nor a limit that is not its own.
void before_fork() {
  for (Shard& shard : shards()) {
    shard.mutex.lock();
  }
}

void after_fork() {
  for (Shard& shard : shards()) {
    shard.mutex.unlock();
  }
}

void after_fork_in_child() {
  after_fork();
  limit.store(kNoLimit, kRelaxed);
  watching.store(false, kRelaxed);
}

}  // namespace

#define MONETRUN_API extern "C" __attribute__((visibility("default")))

// 0: installed (now or before); 1: the present allocator has no raw deleter; 2: one of higher priority stays.
MONETRUN_API int monetrun_cpu_allocator_install() noexcept {
  static std::mutex once;
  const std::lock_guard<std::mutex> guard(once);
  static CountingAllocator* const counting = new CountingAllocator;  // torch keeps the address for good
  c10::Allocator* const present = c10::GetCPUAllocator();
  if (present == counting) {
    return 0;
  }
  if (wrapped == nullptr) {
    const c10::DeleterFnPtr deleter = present->raw_deleter();
    if (deleter == nullptr) {
      return 1;
    }
    wrapped = present;
    wrapped_deleter = deleter;
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
  }
  c10::SetCPUAllocator(counting, std::numeric_limits<uint8_t>::max());
  return c10::GetCPUAllocator() == counting ? 0 : 2;
}

// Counts a storage that torch's allocator gave before the wrapper was installed, until it is freed. One of other memory
// (NumPy's, a mapped file) and one that is counted already have other deleters: they stay as they are. The caller holds
// the storage meanwhile.
MONETRUN_API void monetrun_cpu_allocator_count(void* storage) noexcept {
  auto& impl = *static_cast<c10::StorageImpl*>(storage);
  if (wrapped == nullptr || impl.device_type() != c10::DeviceType::CPU) {
    return;
  }
  c10::DataPtr& data = impl._mutable_data_ptr_no_checks();
  const auto nbytes = static_cast<int64_t>(impl.nbytes());
  if (nbytes == 0 || data.get() != data.get_context() ||
      !data.compare_exchange_deleter(wrapped_deleter, &counted_delete)) {
    return;
  }
  Shard& shard = shard_of(data.get());
  {
    const std::lock_guard<std::mutex> guard(shard.mutex);
    shard.blocks[data.get()] = Block{nbytes, 0};
  }
  raise_peak(allocated.fetch_add(nbytes, kRelaxed) + nbytes);
}

MONETRUN_API int64_t monetrun_cpu_allocator_allocated_bytes() noexcept {
  return allocated.load(kRelaxed);
}

MONETRUN_API int64_t monetrun_cpu_allocator_peak_bytes() noexcept {
  return peak.load(kRelaxed);
}

MONETRUN_API void monetrun_cpu_allocator_reset_peak() noexcept {
  peak.store(allocated.load(kRelaxed), kRelaxed);
  raise_peak(allocated.load(kRelaxed));  // what another thread allocated between the load and the store
}

MONETRUN_API void monetrun_cpu_allocator_set_limit(int64_t nbytes) noexcept {
  limit.store(kNoLimit, kRelaxed);
  limits.fetch_add(1, kRelaxed);
  elsewhere.store(0, kRelaxed);
  limited_thread.store(this_thread(), kRelaxed);
  limit.store(nbytes < 0 ? kNoLimit : nbytes, kRelaxed);
}

MONETRUN_API int64_t monetrun_cpu_allocator_limit_bytes() noexcept {
  return limit.load(kRelaxed);
}

// 0 when nothing was refused yet.
MONETRUN_API int64_t monetrun_cpu_allocator_last_refused_bytes() noexcept {
  return last_refused.load(kRelaxed);
}

MONETRUN_API void monetrun_cpu_allocator_watch() noexcept {
  const std::lock_guard<std::mutex> guard(watch().mutex);
  watch().changes.clear();
  watching.store(true, kRelaxed);
}

// The most that was allocated since the watch began beyond what was then, without what still is; no watch after that.
// -1: nothing was watched to its end.
MONETRUN_API int64_t monetrun_cpu_allocator_passing_bytes() noexcept {
  if (!watching.exchange(false, kRelaxed)) {
    return -1;
  }
  const std::lock_guard<std::mutex> guard(watch().mutex);
  std::vector<std::pair<void*, int64_t>> changes;
  changes.swap(watch().changes);
  std::unordered_set<void*> freed;
  for (auto change = changes.rbegin(); change != changes.rend(); ++change) {
    if (change->second < 0) {
      freed.insert(change->first);
    } else if (freed.erase(change->first) == 0) {
      change->second = 0;  // it stays
    }
  }
  int64_t now = 0;
  int64_t most = 0;
  for (const auto& change : changes) {
    now += change.second;
    most = std::max(most, now);
  }
  return most;
}
