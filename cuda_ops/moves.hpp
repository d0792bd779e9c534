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
      int32_t choices = 0;
      for (int32_t k = g.implementation_start[o]; k < g.implementation_start[o + 1]; ++k)
        choices += g.in_place_of[k] < 0;
      const bool kept = g.output_start[o + 1] - g.output_start[o] > state_.writes_of(o).last - state_.writes_of(o).first;
      if (choices > 1 && !((g.operator_flags[o] & kOptional) && kept)) choosers_.push_back(o);
    }
    if (!n) {
      for (int32_t o = 0; o < g.operators; ++o) sum += g.seconds[cheapest(o)];
      mean_seconds_ = sum / std::max(1, g.operators);
    }
  }

  int32_t cheapest(int32_t op) const {  // the default, unless that one is in place
    int32_t k = g_.implementation_start[op];
    while (k + 1 < g_.implementation_start[op + 1] && g_.in_place_of[k] >= 0) ++k;
    return k;
  }

  // Put op directly before the step at slot r; with chance `chain` also what it reads, where that had to be held
  // for it. False when there was no room.
  bool insert_before(int32_t r, int32_t op, double chain, int32_t depth, int32_t least) {
    const int32_t s = state_.room_before(r);
    if (s < 0) {
      crowded_ = true;
      return false;
    }
    const int32_t impl = cheapest(op);
    int32_t held[8], count = 0;
    if (chain > 0 && depth > 0)
      for (int32_t t : state_.reads_of(impl)) {
        if (!state_.recomputable(t) || count == 8) continue;
        const auto& e = state_.events(t);
        size_t i = 0;
        while (i < e.size() && SearchState::slot_of(e[i]) < s) ++i;
        if (i < e.size() && SearchState::is_read(e[i])) continue;  // alive here anyway
        if (i > 0 && s - SearchState::slot_of(e[i - 1]) > 8 && state_.units(t) >= least) held[count++] = t;
      }
    state_.insert(s, op, impl);
    for (int32_t t : state_.writes_of(op)) drop_useless_before(t, s);
    if (merge_ > 0 && random_.uniform() < merge_) remove_next(op, s);
    for (int32_t j = 0; j < count; ++j)
      if (chain >= 1.0 || random_.uniform() < chain)
        if (!insert_before(s, state_.writer(held[j]), chain, depth - 1, least)) return false;
    return true;
  }

  // Take out the next recomputation of op behind slot s: what the one at s writes is held in its place.
  void remove_next(int32_t op, int32_t s) {
    int32_t next = INT32_MAX;
    for (int32_t t : state_.writes_of(op))
      for (int32_t e : state_.events(t))
        if (SearchState::slot_of(e) > s && !SearchState::is_read(e)) {
          next = std::min(next, SearchState::slot_of(e));
          break;
        }
    if (next != INT32_MAX) remove_with_feeders(next);
  }

  // Take out the recomputation of t before slot s if nothing reads what it writes.
  void drop_useless_before(int32_t t, int32_t s) {
    const auto& e = state_.events(t);
    size_t i = 0;
    while (i < e.size() && SearchState::slot_of(e[i]) < s) ++i;
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
    for (bool found = true; found;) {
      found = false;
      for (int32_t e : state_.events(t))
        if (!SearchState::is_read(e) && SearchState::slot_of(e) >= g_.forward) {
          remove_with_feeders(SearchState::slot_of(e));
          found = true;
          break;
        }
    }
  }

  bool move() {
    const auto& again = state_.recomputations();
    const int32_t kind = random_.below(100);
    if (!choosers_.empty() && (targets_.empty() || random_.below(4) == 0)) return move_choose();
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
      const bool done = insert_before(r, state_.writer(t), kChains[random_.below(6)], 40, state_.units(t) / 32);
      merge_ = 0;
      return done;
    }
    return false;
  }

  // Run an operator with another of its implementations.
  bool move_choose() {
    const int32_t op = choosers_[random_.below(static_cast<int32_t>(choosers_.size()))];
    const int32_t first = g_.implementation_start[op];
    const int32_t impl = first + random_.below(g_.implementation_start[op + 1] - first);
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

  // Let the step at s use `impl`; the optional operators that it wants run, those that nothing wants any more do not.
  bool choose(int32_t s, int32_t impl) {
    const int32_t old = state_.impl_at(s), op = state_.op_at(s);
    if (impl == old || g_.in_place_of[impl] >= 0) return false;
    for (int32_t j = g_.input_start[impl]; j < g_.input_start[impl + 1]; ++j) {
      const int32_t t = g_.inputs[j];  // a kept output of an optional operator: its reads are not followed
      if ((g_.tensor_flags[t] & kKept) && (g_.operator_flags[state_.writer(t)] & kOptional)) return false;
    }
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
    const int32_t to = state_.room_before(r);
    if (to < 0) {
      crowded_ = true;
      return false;
    }
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
  std::vector<double> weights_;  // of targets_, added up: large tensors are tried more often
  double merge_ = 0.0;           // chance to take out the next recomputation of what is put in
  double mean_seconds_ = 0.0;
  bool crowded_ = false;  // there was no room where something was to be put in
};

}  // namespace monet
