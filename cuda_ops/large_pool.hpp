// The large pool of the caching allocator, with expandable segments, and a training step's requests replayed through it:
// the rules of monetrun/core/large_pool.py and monetrun/planning/pool_replay.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace monet {

struct PoolSettings {
  int64_t page;          // of what is mapped at once
  int64_t least_block;   // a rest that is smaller stays with its block
  int64_t max_split;     // larger blocks are not split; the largest number: no limit
  int64_t max_rounding;  // by how much more a block that is not split may have
};

class LargePool {
 public:
  enum State : int8_t { kFree, kUsed, kHole };

  explicit LargePool(const PoolSettings& settings) : settings_(settings) {}

  // Blocks in the order of their addresses; gives each one's number.
  int32_t add(int64_t start, int64_t bytes, State state) {
    const auto block = static_cast<int32_t>(blocks_.size());
    const bool adjacent = block > 0 && blocks_.back().start + blocks_.back().bytes == start;
    blocks_.push_back({start, bytes, adjacent ? block - 1 : -1, -1, state});
    if (adjacent) blocks_[block - 1].next = block;
    if (state == kHole) {
      holes_.push_back(block);
    } else {
      reserved_ += bytes;
      if (state == kFree) insert_free(block);
      if (state == kUsed) allocated_ += bytes;
    }
    return block;
  }

  int64_t reserved() const { return reserved_; }
  int64_t allocated() const { return allocated_; }

  // Appends the bytes of the free blocks that are large enough, ascending.
  void fitting(int64_t bytes, std::vector<int64_t>& found) const {
    for (size_t i = first_fitting(bytes); i < free_.size(); ++i) found.push_back(free_[i].bytes);
  }

  // Serves a request; gives the block.
  int32_t allocate(int64_t bytes) {
    int64_t i = best_fit(bytes);
    if (i < 0) i = expand(bytes);
    const int32_t block = free_[i].block;
    free_.erase(free_.begin() + i);
    if (blocks_[block].bytes - bytes >= settings_.least_block) {
      const int32_t rest = new_block({blocks_[block].start + bytes, blocks_[block].bytes - bytes, block,
                                      blocks_[block].next, kFree});
      if (blocks_[rest].next >= 0) blocks_[blocks_[rest].next].prev = rest;
      blocks_[block].next = rest;
      blocks_[block].bytes = bytes;
      insert_free(rest);
    }
    blocks_[block].state = kUsed;
    allocated_ += blocks_[block].bytes;
    return block;
  }

  void release(int32_t block) {
    allocated_ -= blocks_[block].bytes;
    merge(block);
  }

 private:
  struct Block {
    int64_t start, bytes;
    int32_t prev, next;  // of the same stretch of addresses; -1: none
    State state;
  };
  struct Free {
    int64_t bytes, start;
    int32_t block;
    bool operator<(const Free& other) const {
      return bytes != other.bytes ? bytes < other.bytes : start < other.start;
    }
  };

  size_t first_fitting(int64_t bytes) const {
    return std::lower_bound(free_.begin(), free_.end(), Free{bytes, std::numeric_limits<int64_t>::min(), 0}) -
           free_.begin();
  }

  // Bytes that are not mapped directly behind a block; -1: none.
  int64_t hole_behind(int32_t block) const {
    const int32_t next = blocks_[block].next;
    return next >= 0 && blocks_[next].state == kHole ? blocks_[next].bytes : -1;
  }

  // The smallest one; of several, one that cannot grow. -1: none.
  int64_t best_fit(int64_t bytes) const {
    size_t i = first_fitting(bytes);
    if (i == free_.size()) return -1;
    for (int64_t more; (more = hole_behind(free_[i].block)) >= 0 && i + 1 < free_.size(); ++i) {
      const Free& following = free_[i + 1];
      if (following.bytes + std::max<int64_t>(0, hole_behind(following.block)) >= free_[i].bytes + more) break;
    }
    if (settings_.max_split < std::numeric_limits<int64_t>::max()) {
      const int64_t found = free_[i].bytes;
      if (bytes < settings_.max_split && settings_.max_split <= found) return -1;
      if (bytes >= settings_.max_split && found - bytes >= settings_.max_rounding) return -1;
    }
    return static_cast<int64_t>(i);
  }

  // Maps pages until a free block has so many bytes, at the lowest address where one can be; gives its place.
  int64_t expand(int64_t bytes) {
    int32_t hole = -1;
    for (const int32_t h : holes_) {
      hole = h;
      if (has_room(h, bytes)) break;
    }
    const int32_t before = blocks_[hole].prev;
    const bool joined = before >= 0 && blocks_[before].state == kFree;
    const int64_t start = joined ? blocks_[before].start : blocks_[hole].start;
    int64_t present = joined ? blocks_[before].bytes : 0;
    int32_t block = joined ? before : -1;
    while (present < bytes) {
      const int32_t next = block >= 0 ? blocks_[block].next : hole;
      const int64_t pages = (bytes - present + settings_.page - 1) / settings_.page * settings_.page;
      block = map(next, std::min(blocks_[next].bytes, pages));
      present = blocks_[block].bytes;
    }
    return std::lower_bound(free_.begin(), free_.end(), Free{present, start, 0}) - free_.begin();
  }

  bool has_room(int32_t hole, int64_t bytes) const {
    const int32_t before = blocks_[hole].prev;
    int64_t room = before >= 0 && blocks_[before].state == kFree ? blocks_[before].bytes : 0;
    for (int32_t b = hole; b >= 0 && blocks_[b].state != kUsed && room < bytes; b = blocks_[b].next)
      room += blocks_[b].bytes;
    return room >= bytes;
  }

  // Maps the beginning of a hole; gives the free block that it is a part of.
  int32_t map(int32_t hole, int64_t bytes) {
    const auto place = std::find(holes_.begin(), holes_.end(), hole);
    if (bytes < blocks_[hole].bytes) {
      const int32_t rest =
          new_block({blocks_[hole].start + bytes, blocks_[hole].bytes - bytes, hole, blocks_[hole].next, kHole});
      if (blocks_[rest].next >= 0) blocks_[blocks_[rest].next].prev = rest;
      blocks_[hole].next = rest;
      blocks_[hole].bytes = bytes;
      *place = rest;
    } else {
      holes_.erase(place);
    }
    reserved_ += bytes;
    return merge(hole);
  }

  // Makes a block free, together with free ones beside it; gives the one that they are now.
  int32_t merge(int32_t block) {
    const int32_t next = blocks_[block].next, prev = blocks_[block].prev;
    if (next >= 0 && blocks_[next].state == kFree) {
      erase_free(next);
      join(block, next);
    }
    if (prev >= 0 && blocks_[prev].state == kFree) {
      erase_free(prev);
      join(prev, block);
      block = prev;
    }
    blocks_[block].state = kFree;
    insert_free(block);
    return block;
  }

  void join(int32_t block, int32_t next) {
    blocks_[block].bytes += blocks_[next].bytes;
    blocks_[block].next = blocks_[next].next;
    if (blocks_[next].next >= 0) blocks_[blocks_[next].next].prev = block;
    unused_.push_back(next);
  }

  int32_t new_block(const Block& block) {
    if (unused_.empty()) {
      blocks_.push_back(block);
      return static_cast<int32_t>(blocks_.size()) - 1;
    }
    const int32_t found = unused_.back();
    unused_.pop_back();
    blocks_[found] = block;
    return found;
  }

  void insert_free(int32_t block) {
    const Free entry{blocks_[block].bytes, blocks_[block].start, block};
    free_.insert(std::lower_bound(free_.begin(), free_.end(), entry), entry);
  }

  void erase_free(int32_t block) {
    const Free entry{blocks_[block].bytes, blocks_[block].start, block};
    free_.erase(std::lower_bound(free_.begin(), free_.end(), entry));
  }

  PoolSettings settings_;
  std::vector<Block> blocks_;
  std::vector<Free> free_;       // ascending
  std::vector<int32_t> holes_;   // by address
  std::vector<int32_t> unused_;  // numbers of blocks that were joined to others
  int64_t reserved_ = 0, allocated_ = 0;
};

// Requests, and steps of schedules during which something is held.
class PoolReplay {
 public:
  enum Kind : int8_t { kRequest, kRelease, kStepBegins, kStepEnds };
  struct Event {
    Kind kind;
    int32_t number;  // of the request, or of the step's place
    int64_t bytes;
  };
  struct Served {
    int32_t place, request;
    int64_t bytes;
    int64_t first, count;  // of the fitting blocks' bytes in Outcome::fitting
  };
  struct Outcome {
    int64_t reserved = 0, allocated = 0;
    std::vector<Served> served;
    std::vector<int64_t> fitting;
    std::vector<int32_t> in_the_way;  // of served
  };

  PoolReplay(LargePool pool, std::vector<int32_t> base, int64_t requests, int64_t large)
      : begin_(std::move(pool)), base_(std::move(base)), requests_(requests), large_(large) {}

  void add_trace(std::vector<Event> events) { traces_.push_back(std::move(events)); }
  size_t traces() const { return traces_.size(); }

  // starts: for each place, where its held bytes begin; one more than there are places. The first trace says, too, how
  // requests were served.
  void replay(size_t trace, const int32_t* starts, const int64_t* held_bytes, Outcome& found) {
    LargePool pool = begin_;
    std::vector<int32_t>& block_of = scratch_;
    block_of.assign(requests_, -1);
    std::copy(base_.begin(), base_.end(), block_of.begin());
    std::vector<int32_t> held;
    const bool noted = trace == 0;
    found.served.clear();
    found.fitting.clear();
    found.in_the_way.clear();
    found.allocated = pool.allocated();
    int64_t reserved = pool.reserved(), grown_at = -1;
    int32_t place = -1;
    const std::vector<Event>& events = traces_[trace];
    for (size_t t = 0; t < events.size(); ++t) {
      const Event& event = events[t];
      switch (event.kind) {
        case kRequest:
          if (noted && place >= 0 && event.bytes >= large_) {
            const auto first = static_cast<int64_t>(found.fitting.size());
            pool.fitting(event.bytes, found.fitting);
            found.served.push_back(
                {place, event.number, event.bytes, first, static_cast<int64_t>(found.fitting.size()) - first});
          }
          block_of[event.number] = pool.allocate(event.bytes);
          found.allocated = std::max(found.allocated, pool.allocated());
          if (pool.reserved() > reserved) {
            reserved = pool.reserved();
            grown_at = static_cast<int64_t>(t);
          }
          break;
        case kRelease:
          if (block_of[event.number] >= 0) {
            pool.release(block_of[event.number]);
            block_of[event.number] = -1;
          }
          break;
        case kStepBegins:
          place = event.number;
          for (int32_t i = starts[place]; i < starts[place + 1]; ++i) held.push_back(pool.allocate(held_bytes[i]));
          if (!held.empty()) found.allocated = std::max(found.allocated, pool.allocated());
          break;
        case kStepEnds:
          for (const int32_t block : held) pool.release(block);
          held.clear();
          place = -1;
          break;
      }
    }
    found.reserved = pool.reserved();
    if (noted && grown_at >= 0) note_in_the_way(events, static_cast<size_t>(grown_at), found);
  }

 private:
  // The served requests that are alive after an event.
  void note_in_the_way(const std::vector<Event>& events, size_t at, Outcome& found) {
    std::vector<int32_t>& served = scratch_;
    served.assign(requests_, -1);
    size_t k = 0;
    for (size_t t = 0; t <= at; ++t) {
      if (events[t].kind == kRelease) served[events[t].number] = -1;
      if (events[t].kind == kRequest && k < found.served.size() && found.served[k].request == events[t].number)
        served[events[t].number] = static_cast<int32_t>(k++);
    }
    for (size_t i = 0; i < k; ++i)
      if (served[found.served[i].request] == static_cast<int32_t>(i)) found.in_the_way.push_back(static_cast<int32_t>(i));
  }

  LargePool begin_;
  std::vector<int32_t> base_;  // blocks of the requests that were there before
  int64_t requests_, large_;
  std::vector<std::vector<Event>> traces_;
  std::vector<int32_t> scratch_;
};

}  // namespace monet
