// The changes that a search tries: recomputations put in (alone or with what they need), taken out, moved, exchanged.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "search_state.hpp"

namespace monet {

class Random {  // xorshift64*: the same numbers on every machine
 public:
  explicit Random(uint64_t seed) : x_(seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull) {
    if (!x_) x_ = 1;
    for (int i = 0; i < 8; ++i) next();
  }
  uint64_t next() {
    x_ ^= x_ >> 12;
    x_ ^= x_ << 25;
    x_ ^= x_ >> 27;
    return x_ * 0x2545F4914F6CDD1Dull;
  }
  int32_t below(int32_t n) { return static_cast<int32_t>(((next() >> 32) * static_cast<uint64_t>(n)) >> 32); }
  double uniform() { return static_cast<double>(next() >> 11) * (1.0 / 9007199254740992.0); }

 private:
  uint64_t x_;
};

class Moves {
 protected:
  Moves(const FlatGraph& g, uint64_t seed) : g_(g), state_(g), random_(seed) {
    for (int32_t o = 0; o < g.operators; ++o) {
      way_start_.push_back(static_cast<int32_t>(ways_.size()));
      add_ways(o);
    }
    way_start_.push_back(static_cast<int32_t>(ways_.size()));
    double sum = 0.0;
    int32_t n = 0;
    for (int32_t t = 0; t < g.tensors; ++t)
      if (state_.recomputable(t) && state_.units(t) > 0) {
        targets_.push_back(t);
        weights_.push_back((weights_.empty() ? 0.0 : weights_.back()) + std::sqrt(static_cast<double>(state_.units(t))));
        sum += g.seconds[cheapest(state_.writer(t))];
        ++n;
      }
    mean_seconds_ = n ? sum / n : 0.0;
    for (int32_t o = 0; o < g.operators; ++o) {
      const bool kept = g.output_start[o + 1] - g.output_start[o] > state_.writes_of(o).last - state_.writes_of(o).first;
      if (ways_of(o) > 1 && !((g.operator_flags[o] & kOptional) && kept)) choosers_.push_back(o);
    }
    choosing_ = std::min(0.25, static_cast<double>(choosers_.size()) / std::max(1, n));
    if (!n) {
      for (int32_t o = 0; o < g.operators; ++o) sum += g.seconds[cheapest(o)];
      mean_seconds_ = sum / std::max(1, g.operators);
    }
  }

  // The implementations that are a choice: not in place, and not as good as another in everything. The default, or
  // what is as good as it, is the first.
  void add_ways(int32_t op) {
    const int32_t first = g_.implementation_start[op], last = g_.implementation_start[op + 1];
    for (int32_t k = first; k < last; ++k) {
      if (g_.in_place_of[k] >= 0) continue;
      const int32_t way = undominated(op, k);
      if (std::find(ways_.begin() + way_start_[op], ways_.end(), way) == ways_.end()) ways_.push_back(way);
    }
    if (static_cast<int32_t>(ways_.size()) == way_start_[op]) ways_.push_back(first);
  }

  // What is as good as implementation k in everything, and better in something: k itself where nothing is.
  int32_t undominated(int32_t op, int32_t k) const {
    const auto read_by = [&](int32_t t, int32_t v) {
      return std::find(&g_.inputs[g_.input_start[v]], &g_.inputs[g_.input_start[v + 1]], t) !=
             &g_.inputs[g_.input_start[v + 1]];
    };
    for (int32_t v = g_.implementation_start[op]; v < g_.implementation_start[op + 1]; ++v) {
      if (v == k || g_.in_place_of[v] >= 0 || g_.seconds[v] > g_.seconds[k] || g_.workspace[v] > g_.workspace[k]) continue;
      if (state_.may_be_in_place(k) && !state_.may_be_in_place(v)) continue;
      bool within = true, fewer = g_.seconds[v] < g_.seconds[k] || g_.workspace[v] < g_.workspace[k];
      for (int32_t j = g_.input_start[v]; j < g_.input_start[v + 1]; ++j) within = within && read_by(g_.inputs[j], k);
      for (int32_t j = g_.input_start[k]; j < g_.input_start[k + 1]; ++j) fewer = fewer || !read_by(g_.inputs[j], v);
      if (within && fewer) return undominated(op, v);
    }
    return k;
  }

  int32_t ways_of(int32_t op) const { return way_start_[op + 1] - way_start_[op]; }
  int32_t cheapest(int32_t op) const { return ways_[way_start_[op]]; }

  // How to run op again at slot s: so that the least has to be held for it, at random with chance `vary_`.
  int32_t way_at(int32_t op, int32_t s) {
    int32_t best = cheapest(op);
    if (ways_of(op) == 1) return best;
    const bool any = vary_ > 0 && random_.uniform() < vary_;
    if (any) best = ways_[way_start_[op] + random_.below(ways_of(op))];
    int64_t least = held_units(best, s);
    if (any && least >= 0) return best;
    for (int32_t w = way_start_[op]; w < way_start_[op + 1]; ++w) {
      const int64_t held = held_units(ways_[w], s);
      if (held < 0) continue;
      if (least < 0 || held < least || (held == least && g_.seconds[ways_[w]] < g_.seconds[best]))
        best = ways_[w], least = held;
    }
    return best;
  }

  // What would have to be held till slot s for a run there with `impl`, or -1 where something was never written.
  int64_t held_units(int32_t impl, int32_t s) const {
    if (reads_kept_of_optional(impl)) return -1;
    int64_t held = 0;
    for (int32_t t : state_.reads_of(impl)) {
      const auto& e = state_.events(t);
      const size_t i = SearchState::find(e, s);
      if (!state_.written_before(t, s)) return -1;
      if (i == 0 || !SearchState::is_read(e, i)) held += state_.units(t);
    }
    return held;
  }

  bool reads_kept_of_optional(int32_t impl) const {  // such reads are not followed
    for (int32_t j = g_.input_start[impl]; j < g_.input_start[impl + 1]; ++j) {
      const int32_t t = g_.inputs[j];
      if ((g_.tensor_flags[t] & kKept) && (g_.operator_flags[state_.writer(t)] & kOptional)) return true;
    }
    return false;
  }

  int32_t room_before(int32_t r) {  // notes where there is none
    const int32_t s = state_.room_before(r);
    crowded_ = crowded_ || s < 0;
    return s;
  }

  // Put op directly before the step at slot r; with chance `chain` also what it reads, where that had to be held
  // for it. False when there was no room, or nothing to read.
  bool insert_before(int32_t r, int32_t op, double chain, int32_t depth, int32_t least) {
    if (state_.main_slot(op) < 0) return false;  // what has been left out runs only where it is chosen again
    const int32_t s = room_before(r);
    if (s < 0) return false;
    const int32_t impl = way_at(op, s);
    for (int32_t t : state_.reads_of(impl))
      if (!state_.written_before(t, s)) return false;  // an optional operator that has been left out
    int32_t held[8], count = 0;
    if (chain > 0 && depth > 0)
      for (int32_t t : state_.reads_of(impl)) {
        if (!state_.recomputable(t) || count == 8) continue;
        const auto& e = state_.events(t);
        const size_t i = SearchState::find(e, s);
        if (i > 0 && SearchState::is_read(e, i)) continue;  // alive here anyway
        if ((i == 0 || s - SearchState::slot_of(e[i - 1]) > 8) && state_.units(t) >= least) held[count++] = t;
      }
    state_.insert(s, op, impl);
    for (int32_t t : state_.writes_of(op)) drop_useless_before(t, s);
    if (merge_ > 0 && random_.uniform() < merge_) remove_next(op, s);
    for (int32_t j = 0; j < count; ++j)
      if (chain >= 1.0 || random_.uniform() < chain)
        if (!insert_before(s, state_.writer(held[j]), chain, depth - 1, least)) return false;
    return true;
  }

  // The first slot from s on where t is written, or INT32_MAX.
  int32_t next_write(int32_t t, int32_t s) const {
    for (int32_t e : state_.events(t))
      if (SearchState::slot_of(e) >= s && !SearchState::is_read(e)) return SearchState::slot_of(e);
    return INT32_MAX;
  }

  // Take out the next recomputation of op behind slot s: what the one at s writes is held in its place.
  void remove_next(int32_t op, int32_t s) {
    int32_t next = INT32_MAX;
    for (int32_t t : state_.writes_of(op)) next = std::min(next, next_write(t, s + 1));
    if (next != INT32_MAX) remove_with_feeders(next);
  }

  // Take out the recomputation of t before slot s if nothing reads what it writes.
  void drop_useless_before(int32_t t, int32_t s) {
    const auto& e = state_.events(t);
    const size_t i = SearchState::find(e, s);
    if (i == 0 || SearchState::is_read(e[i - 1])) return;
    const int32_t w = SearchState::slot_of(e[i - 1]);
    if (w >= g_.forward && state_.op_at(w) == state_.writer(t) && state_.useless(w) &&
        state_.is_recomputation(state_.op_at(w)))
      remove_with_feeders(w);
  }

  // Take out the step at s, and the recomputations that served only it.
  void remove_with_feeders(int32_t s) {
    const int32_t impl = state_.impl_at(s);
    state_.remove(s);
    for (int32_t t : state_.reads_of(impl)) drop_unwanted(t, s);
  }

  int32_t draw_target() {
    const double x = random_.uniform() * weights_.back();
    return targets_[std::upper_bound(weights_.begin(), weights_.end() - 1, x) - weights_.begin()];
  }

  void remove_all(int32_t op) {
    const auto writes = state_.writes_of(op);
    if (writes.begin() == writes.end()) return;
    const int32_t t = *writes.begin();
    for (int32_t s; (s = next_write(t, g_.forward)) != INT32_MAX;) remove_with_feeders(s);
  }

  bool move() {
    const auto& again = state_.recomputations();
    const int32_t kind = random_.below(100);
    if (!choosers_.empty() && (targets_.empty() || random_.uniform() < choosing_))
      return targets_.empty() || random_.below(3) ? move_choose() : move_avoid();
    if (kind < 40 || again.empty()) return move_insert();
    const int32_t s = again[random_.below(static_cast<int32_t>(again.size()))];
    if (kind < 48) {
      remove_all(state_.op_at(s));
      return true;
    }
    if (kind < 70) {
      remove_with_feeders(s);
      return true;
    }
    if (kind < 82) return move_relocate(s);
    if (kind < 93) return move_exchange(s);
    return move_remove_run(s);
  }

  bool move_insert() {
    static constexpr double kChains[] = {0, 0, 0, 0.5, 0.8, 1};
    for (int attempt = 0; attempt < 8; ++attempt) {
      const int32_t t = draw_target();
      const auto& e = state_.events(t);
      if (e.size() < 2) continue;
      const size_t i = 1 + random_.below(static_cast<int32_t>(e.size()) - 1);
      const int32_t r = SearchState::slot_of(e[i]);
      if (!SearchState::is_read(e[i]) || r < g_.forward) continue;
      if (r - SearchState::slot_of(e[i - 1]) < 3) continue;
      merge_ = 0.5 * random_.below(3);
      vary_ = 0.25;
      const bool done = insert_before(r, state_.writer(t), kChains[random_.below(6)], 40, state_.units(t) / 32);
      merge_ = vary_ = 0;
      return done;
    }
    return false;
  }

  // Run an operator with another of its implementations.
  bool move_choose() {
    const int32_t op = choosers_[random_.below(static_cast<int32_t>(choosers_.size()))];
    const int32_t impl = ways_[way_start_[op] + random_.below(ways_of(op))];
    int32_t s = state_.main_slot(op);
    const auto& again = state_.recomputations();
    if (state_.is_recomputation(op) && !again.empty() && (s < 0 || random_.below(2))) {
      const int32_t from = random_.below(static_cast<int32_t>(again.size()));
      for (size_t i = 0; i < again.size(); ++i) {
        const int32_t other = again[(from + i) % again.size()];
        if (state_.op_at(other) == op) s = other;
      }
    }
    return s >= 0 && choose(s, impl);
  }

  // An implementation of the step at s that does not read t, or -1: each is as likely as the others.
  int32_t draw_without(int32_t s, int32_t t) {
    const int32_t op = state_.op_at(s);
    int32_t found = -1, count = 0;
    for (int32_t w = way_start_[op]; w < way_start_[op + 1]; ++w) {
      const auto reads = state_.reads_of(ways_[w]);
      if (std::find(reads.begin(), reads.end(), t) == reads.end() && random_.below(++count) == 0) found = ways_[w];
    }
    return found;
  }

  // Do without a tensor from one of its reads on: its readers use other implementations, and where one has none the
  // tensor is computed again.
  bool move_avoid() {
    const int32_t t = draw_target();
    if (state_.events(t).empty()) return false;
    const int32_t from = random_.below(static_cast<int32_t>(state_.events(t).size()));
    bool done = false;
    for (size_t i = from; i < state_.events(t).size();) {
      const int32_t e = state_.events(t)[i], s = SearchState::slot_of(e);
      if (!SearchState::is_read(e) || s < g_.forward) {
        ++i;
        continue;
      }
      const size_t before = state_.events(t).size();
      const int32_t impl = draw_without(s, t);
      if (impl < 0) return insert_before(s, state_.writer(t), 0, 0, 0);
      if (!choose(s, impl)) return false;
      done = true;
      if (state_.events(t).size() >= before) ++i;
    }
    return done;
  }

  // Let the step at s use `impl`; the optional operators that it wants run, those that nothing wants any more do not.
  bool choose(int32_t s, int32_t impl) {
    const int32_t old = state_.impl_at(s), op = state_.op_at(s);
    if (impl == old || g_.in_place_of[impl] >= 0) return false;
    if (reads_kept_of_optional(impl)) return false;
    for (int32_t t : state_.reads_of(impl)) {
      if (state_.written_before(t, s)) continue;
      const int32_t wanted = state_.writer(t);
      if (wanted >= g_.forward || state_.main_slot(wanted) >= 0 || wanted >= s) return false;
      const int32_t how = cheapest(wanted);
      for (int32_t u : state_.reads_of(how))
        if (!state_.written_before(u, wanted)) return false;
      state_.insert(wanted, wanted, how);
    }
    state_.remove(s);
    state_.insert(s, op, impl);
    for (int32_t t : state_.reads_of(old)) drop_unwanted(t, s);
    return true;
  }

  // After a read of t at s has gone: take out the writer that served only it.
  void drop_unwanted(int32_t t, int32_t s) {
    drop_useless_before(t, s);
    const int32_t op = state_.writer(t);
    if (!(g_.operator_flags[op] & kOptional)) return;
    const int32_t w = state_.main_slot(op);
    if (w >= 0 && state_.alone(w)) remove_with_feeders(w);
  }

  bool move_relocate(int32_t s) {
    const int32_t op = state_.op_at(s);
    const int32_t reach = 2 << random_.below(9);
    int32_t r = s + random_.below(2 * reach + 1) - reach;
    while (r < state_.size() && (r <= g_.forward || state_.op_at(r) < 0)) ++r;
    if (r >= state_.size() || r == s) return false;
    const int32_t impl = state_.impl_at(s);
    state_.remove(s);
    const int32_t to = room_before(r);
    if (to < 0) return false;
    state_.insert(to, op, impl);
    for (int32_t t : state_.writes_of(op)) drop_useless_before(t, to);
    return true;
  }

  // Take one out and put another in.
  bool move_exchange(int32_t s) {
    const int32_t impl = state_.impl_at(s);
    int32_t r = s + 1;
    while (r < state_.size() && state_.op_at(r) < 0) ++r;
    const auto reads = state_.reads_of(impl);
    const int32_t n = static_cast<int32_t>(reads.last - reads.first);
    const bool near = n > 0 && random_.below(2);
    int32_t feeder = -1;
    if (near) {
      const int32_t t = reads.first[random_.below(n)];
      if (state_.recomputable(t)) feeder = state_.writer(t);
    }
    remove_with_feeders(s);
    if (feeder >= 0 && r < state_.size() && state_.op_at(r) >= 0) return insert_before(r, feeder, 0, 0, 0);
    return move_insert();
  }

  // Take out several that stand together.
  bool move_remove_run(int32_t s) {
    int32_t left = 2 + random_.below(12);
    int32_t patience = 4 + random_.below(40);
    for (; s < state_.size() && left > 0 && patience > 0; ++s) {
      if (state_.op_at(s) < 0) continue;
      if (state_.is_recomputation(state_.op_at(s))) {
        remove_with_feeders(s);
        --left;
      } else {
        --patience;
      }
    }
    return true;
  }

  const FlatGraph& g_;
  SearchState state_;
  Random random_;
  std::vector<int32_t> targets_, choosers_;
  std::vector<int32_t> way_start_, ways_;  // per operator the implementations that are a choice
  std::vector<double> weights_;  // of targets_, added up: large tensors are tried more often
  double merge_ = 0.0;           // chance to take out the next recomputation of what is put in
  double choosing_ = 0.0;        // chance of a change of implementations
  double vary_ = 0.0;            // chance to run again what is put in with any of its implementations
  double mean_seconds_ = 0.0;
  bool crowded_ = false;  // there was no room where something was to be put in
};

}  // namespace monet
