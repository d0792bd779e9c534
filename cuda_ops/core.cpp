// The native core behind a C interface: replay and search (monetrun/core/simulate.py, monetrun/solve/greedy.py), and
// what is reserved for a step (monetrun/planning/placement.py).

#include "large_pool.hpp"
#include "replay.hpp"
#include "search.hpp"

using monet::FlatGraph;
using monet::LargePool;
using monet::PoolReplay;
using monet::Search;
using monet::SearchState;

extern "C" {

int64_t monet_replay(const FlatGraph* graph, int64_t forward_steps, int64_t steps, const int32_t* operators,
                     const int32_t* implementations, int64_t* before, int64_t* during, int64_t* after, int64_t* peak,
                     int64_t* peak_step, double* seconds) {
  return monet::replay(*graph, forward_steps, steps, operators, implementations, before, during, after, peak,
                       peak_step, seconds);
}

// The graph's arrays must outlive the search.
Search* monet_search_new(const FlatGraph* graph, uint64_t seed) { return new Search(*graph, seed); }

void monet_search_free(Search* search) { delete search; }

// implementations: local indices, none of them in place.
void monet_search_load(Search* search, const FlatGraph* graph, int64_t forward_steps, int64_t steps,
                       const int32_t* operators, const int32_t* implementations) {
  std::vector<SearchState::Step> sequence;
  for (int64_t i = 0; i < steps; ++i)
    sequence.push_back({operators[i], graph->implementation_start[operators[i]] + implementations[i]});
  search->load(sequence, static_cast<int32_t>(forward_steps));
}

void monet_search_budget(Search* search, int64_t bytes) { search->set_budget(bytes); }

int32_t monet_search_greedy(Search* search, int64_t tries) { return search->greedy(tries); }

int32_t monet_search_anneal(Search* search, int64_t iterations, double hot, double cold, double time_limit,
                            int32_t until_it_fits) {
  return search->anneal(iterations, hot, cold, time_limit, until_it_fits);
}

int32_t monet_search_ruin(Search* search, int64_t iterations, double hot, double cold, double time_limit) {
  return search->ruin(iterations, hot, cold, time_limit);
}

void monet_search_return_to_best(Search* search) { search->return_to_best(); }

int64_t monet_search_peak(Search* search) { return search->state().peak(); }
int64_t monet_search_excess(Search* search) { return search->state().excess(); }
double monet_search_seconds(Search* search) { return search->state().seconds(); }
double monet_search_best_seconds(Search* search) { return search->best_seconds(); }
int64_t monet_search_accepted(Search* search) { return search->accepted_; }
int64_t monet_search_relayouts(Search* search) { return search->relayouts_; }

// The best that fits (which = 0) or the current state (1); returns its length, with -1 in *forward_steps when there
// is none. In-place variants stand where they are legal. `room` entries are written at most.
int64_t monet_search_read(Search* search, const FlatGraph* graph, int32_t which, int64_t room, int32_t* operators,
                          int32_t* implementations, int64_t* forward_steps) {
  if (which == 0 && !search->has_best()) {
    *forward_steps = -1;
    return 0;
  }
  std::vector<SearchState::Step> sequence;
  int32_t forward = 0;
  if (which == 0) {
    sequence = search->best();
    forward = search->best_forward();
  } else {
    search->state().sequence(sequence, forward);
  }
  *forward_steps = forward;
  SearchState placed(*graph);
  placed.load(sequence, forward);
  int64_t i = 0;
  for (int32_t s = 0; s < placed.size() && i < room; ++s) {
    const int32_t op = placed.op_at(s);
    if (op < 0) continue;
    operators[i] = op;
    implementations[i++] = placed.chosen_at(s) - graph->implementation_start[op];
  }
  return static_cast<int64_t>(sequence.size());
}

// ---- what is held beside the steps of a schedule (monetrun/planning/native_pool_replay.py)

// Outcomes: the latest one of the first trace, the one that is kept, and that of another trace.
struct Replays {
  PoolReplay replay;
  PoolReplay::Outcome latest, kept, other;
};

// states: of LargePool::State; base: which request a block in use is, or -1. Blocks are in the order of their addresses.
Replays* monet_pool_new(int64_t page, int64_t least_block, int64_t max_split, int64_t max_rounding, int64_t blocks,
                       const int64_t* starts, const int64_t* bytes, const int8_t* states, const int32_t* base,
                       int64_t requests, int64_t large) {
  LargePool pool({page, least_block, max_split, max_rounding});
  std::vector<int32_t> base_blocks(requests, -1);
  for (int64_t i = 0; i < blocks; ++i) {
    const int32_t block = pool.add(starts[i], bytes[i], static_cast<LargePool::State>(states[i]));
    if (base[i] >= 0) base_blocks[base[i]] = block;
  }
  return new Replays{{std::move(pool), std::move(base_blocks), requests, large}, {}, {}, {}};
}

void monet_pool_free(Replays* replays) { delete replays; }

void monet_pool_trace(Replays* replays, int64_t count, const int8_t* kinds, const int32_t* numbers, const int64_t* bytes) {
  std::vector<PoolReplay::Event> events;
  for (int64_t i = 0; i < count; ++i)
    events.push_back({static_cast<PoolReplay::Kind>(kinds[i]), numbers[i], bytes[i]});
  replays->replay.add_trace(std::move(events));
}

// What is reserved; allocated: the most.
int64_t monet_pool_replay(Replays* replays, const int32_t* starts, const int64_t* held, int64_t* allocated) {
  replays->replay.replay(0, starts, held, replays->latest);
  *allocated = replays->latest.allocated;
  return replays->latest.reserved;
}

// The most that any other trace reserves; a number above `most` as soon as one reserves more.
int64_t monet_pool_most_of_variants(Replays* replays, const int32_t* starts, const int64_t* held, int64_t most) {
  int64_t reserved = 0;
  for (size_t trace = 1; trace < replays->replay.traces() && reserved <= most; ++trace) {
    replays->replay.replay(trace, starts, held, replays->other);
    reserved = std::max(reserved, replays->other.reserved);
  }
  return reserved;
}

void monet_pool_keep(Replays* replays) { replays->kept = replays->latest; }

// How many requests were served in the outcome that is kept, or how many of them are in the way.
int64_t monet_pool_count(Replays* replays, int32_t in_the_way) {
  return static_cast<int64_t>(in_the_way ? replays->kept.in_the_way.size() : replays->kept.served.size());
}

// One of these: its place and bytes, and the bytes of the free blocks that could serve it (`room` of them at most).
int64_t monet_pool_served(Replays* replays, int32_t in_the_way, int64_t i, int32_t* place, int64_t* bytes, int64_t room,
                           int64_t* fitting) {
  const auto& kept = replays->kept;
  const auto& served = kept.served[in_the_way ? kept.in_the_way[i] : i];
  *place = served.place;
  *bytes = served.bytes;
  std::copy_n(kept.fitting.begin() + served.first, std::min(room, served.count), fitting);
  return served.count;
}

}  // extern "C"
