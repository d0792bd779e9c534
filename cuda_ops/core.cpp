// The native core: replay and search behind a C interface (monetrun/simulate.py, monetrun/solve/greedy.py).

#include "replay.hpp"
#include "search.hpp"

using monet::FlatGraph;
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

}  // extern "C"
