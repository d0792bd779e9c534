// Greedy eviction and simulated annealing over SearchState.
#pragma once

#include <chrono>
#include <cmath>
#include <limits>
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

class Search {
 public:
  using Step = SearchState::Step;

  Search(const FlatGraph& g, uint64_t seed) : g_(g), state_(g), random_(seed) {
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

  SearchState& state() { return state_; }
  bool has_best() const { return best_seconds_ < std::numeric_limits<double>::infinity(); }
  double best_seconds() const { return best_seconds_; }
  const std::vector<Step>& best() const { return best_; }
  int32_t best_forward() const { return best_forward_; }
  double price() const { return price_; }

  void load(const std::vector<Step>& steps, int32_t forward_steps) {
    state_.load(steps, forward_steps);
    note_best();
  }

  void set_budget(int64_t bytes) {
    state_.set_budget(bytes);
    best_seconds_ = std::numeric_limits<double>::infinity();
    note_best();
  }

  // Put in, one after another, the recomputation that takes off the most excess per second; true when it fits.
  // A tensor's score mostly falls as others are dropped, so only those that still look best are scored anew.
  bool greedy() {
    const double unknown = std::numeric_limits<double>::infinity();
    std::vector<Eviction> scores(targets_.size(), Eviction{unknown, 0, 0});
    std::vector<uint8_t> fresh(targets_.size(), 0);
    std::vector<int32_t> index(g_.tensors, -1);
    for (size_t i = 0; i < targets_.size(); ++i) index[targets_[i]] = static_cast<int32_t>(i);
    bool all_anew = true;
    while (state_.excess() > 0) {
      std::fill(fresh.begin(), fresh.end(), 0);
      crowded_ = false;
      size_t best = 0;
      for (;;) {
        best = 0;
        for (size_t i = 1; i < scores.size(); ++i)
          if (scores[i].score > scores[best].score) best = i;
        if (scores.empty() || scores[best].score <= 0 || fresh[best]) break;
        scores[best] = score(targets_[best]);
        fresh[best] = 1;
      }
      if (scores.empty() || scores[best].score <= 0) {
        if (all_anew) break;
        std::fill(scores.begin(), scores.end(), Eviction{unknown, 0, 0});
        if (crowded_) state_.relayout();
        all_anew = true;
        continue;
      }
      all_anew = false;
      const Eviction& e = scores[best];
      insert_before(e.before, state_.writer(targets_[best]), 1.0, e.depth, state_.units(targets_[best]) / 32);
      price_ = 1.0 / e.score;
      // the tensors near what was put in may have become better to drop
      for (int32_t s = std::max(g_.forward, e.before - 64); s <= e.before; ++s) {
        if (state_.op_at(s) < 0 || !state_.is_recomputation(state_.op_at(s))) continue;
        for (int32_t t : state_.reads_of(state_.impl_at(s)))
          if (index[t] >= 0) scores[index[t]].score = unknown;
        for (int32_t t : state_.writes_of(state_.op_at(s)))
          if (index[t] >= 0) scores[index[t]].score = unknown;
      }
      state_.commit();
      if (crowded_) state_.relayout();
    }
    crowded_ = false;
    note_best();
    return state_.excess() == 0;
  }

  // Simulated annealing on seconds + price * excess, the price driven so that the state keeps crossing the budget.
  // Temperatures are in units of the mean seconds of a recomputation. True when it ran to the end of `iterations`.
  bool anneal(int64_t iterations, double hot, double cold, double time_limit, bool until_it_fits) {
    if (targets_.empty() && choosers_.empty()) return true;
    const auto start = std::chrono::steady_clock::now();
    const double ratio = std::log(cold / hot);
    if (!(price_ > 0)) price_ = 1e-3 * mean_seconds_ / std::max(1, state_.budget());
    double temperature = hot * mean_seconds_;
    const double first_price = price_;
    int64_t fitting = 0, misses = 0;
    constexpr int64_t kBlock = 1024, kPatience = 64;
    for (int64_t i = 0; i < iterations; ++i) {
      if (i % kBlock == 0) {
        temperature = hot * mean_seconds_ * std::exp(ratio * static_cast<double>(i) / static_cast<double>(iterations));
        if (i) price_ *= fitting < kBlock / 4 ? 1.05 : fitting > kBlock / 2 ? 1 / 1.05 : 1.0;
        price_ = std::clamp(price_, first_price / 64, first_price * 64);
        misses = fitting ? 0 : misses + 1;
        if (misses > kPatience && has_best()) {  // frozen above the budget
          return_to_best();
          price_ = first_price;
          misses = 0;
        }
        fitting = 0;
        if (time_limit > 0 &&
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > time_limit)
          return false;
      }
      const double seconds = state_.seconds();
      const int64_t excess = state_.excess();
      const bool made = move();
      const double change =
          state_.seconds() - seconds + price_ * static_cast<double>(state_.excess() - excess);
      if (made && (change <= 0 || random_.uniform() < std::exp(-change / temperature))) {
        state_.commit();
        ++accepted_;
        if (state_.excess() == 0 && state_.seconds() < best_seconds_ * (1 - 1e-12)) {
          note_best();
          if (until_it_fits) return true;
        }
      } else {
        state_.undo();
        if (crowded_) {
          crowded_ = false;
          ++relayouts_;
          state_.relayout();
        }
      }
      fitting += state_.excess() == 0;
    }
    return true;
  }

  // Ruin and recreate: take out some recomputations, put in others greedily where it is above the budget, take out
  // those that have become needless. It crosses what annealing can not: one large recomputation for many small ones.
  // Starts from the best; does nothing where there is none. True when it ran to the end of `iterations`.
  bool ruin(int64_t iterations, double hot, double cold, double time_limit) {
    if (!has_best() || targets_.empty()) return true;
    const auto start = std::chrono::steady_clock::now();
    return_to_best();
    for (int64_t i = 0; i < iterations; ++i) {
      if (i % 16 == 0 && time_limit > 0 &&
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > time_limit)
        return false;
      const double done = static_cast<double>(i) / static_cast<double>(iterations);
      const double temperature = hot * mean_seconds_ * std::exp(std::log(cold / hot) * done);
      const double seconds = state_.seconds();
      const auto& again = state_.recomputations();
      for (int32_t k = random_.below(4); k >= 0 && !again.empty(); --k) {
        const int32_t s = again[random_.below(static_cast<int32_t>(again.size()))];
        const int32_t kind = random_.below(8);
        if (kind < 4)
          remove_all(state_.op_at(s));
        else if (kind < 7)
          remove_with_feeders(s);
        else
          move_remove_run(s);
      }
      if (random_.below(3) == 0) move_insert();
      const bool fits = refill();
      if (fits) purge();
      const double change = state_.seconds() - seconds;
      if (fits && (change <= 0 || random_.uniform() < std::exp(-change / temperature))) {
        state_.commit();
        ++accepted_;
        note_best();
      } else {
        state_.undo();
      }
      if (crowded_) {
        crowded_ = false;
        ++relayouts_;
        state_.relayout();
      }
    }
    return true;
  }

  void return_to_best() {
    if (has_best()) state_.load(best_, best_forward_);
  }

  int64_t accepted_ = 0, relayouts_ = 0;

 private:
  struct Eviction {
    double score;  // excess taken off per second
    int32_t before, depth;
  };

  // The best way to have tensor t computed again before one of its reads.
  Eviction score(int32_t t) {
    Eviction best{0.0, 0, 0};
    std::vector<int32_t> reads;
    const auto& e = state_.events(t);
    for (size_t i = 1; i < e.size(); ++i)
      if (SearchState::is_read(e[i]) && SearchState::slot_of(e[i]) >= g_.forward)
        if (SearchState::slot_of(e[i]) - SearchState::slot_of(e[i - 1]) > 1) reads.push_back(SearchState::slot_of(e[i]));
    const int64_t excess = state_.excess();
    const double seconds = state_.seconds();
    for (int32_t r : reads) {
      size_t steps = 0;
      for (int32_t depth : {0, 1, 2, 4, 16}) {
        const bool done = insert_before(r, state_.writer(t), 1.0, depth, state_.units(t) / 32);
        const double score = static_cast<double>(excess - state_.excess()) /
                             std::max(state_.seconds() - seconds, 1e-9 * mean_seconds_);
        if (done && score > best.score) best = {score, r, depth};
        const size_t changes = state_.changes();
        state_.undo();
        if (changes == steps) break;  // no deeper chain
        steps = changes;
      }
    }
    return best;
  }

  int32_t cheapest(int32_t op) const {  // the default, unless that one is in place
    int32_t k = g_.implementation_start[op];
    while (k + 1 < g_.implementation_start[op + 1] && g_.in_place_of[k] >= 0) ++k;
    return k;
  }

  void note_best() {
    if (state_.size() == 0 || state_.excess() > 0 || state_.seconds() >= best_seconds_) return;
    best_seconds_ = state_.seconds();
    state_.sequence(best_, best_forward_);
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

  // Put in recomputations until it fits, each the best of a few that free bytes where there are most.
  bool refill() {
    static constexpr int32_t kDepths[] = {0, 1, 2, 4, 16};
    for (int32_t round = 0; state_.excess() > 0; ++round) {
      if (round == 128) return false;
      const int32_t high = state_.highest();
      const int64_t excess = state_.excess();
      const double seconds = state_.seconds();
      const size_t mark = state_.changes();
      double best = 0.0;
      int32_t best_before = 0, best_depth = 0, best_tensor = -1, seen = 0;
      for (int32_t draw = 0; draw < 200 && seen < 12; ++draw) {
        const int32_t t = draw_target();
        const auto& e = state_.events(t);
        size_t i = 0;
        while (i < e.size() && SearchState::slot_of(e[i]) < high) ++i;
        if (i == 0 || i == e.size() || !SearchState::is_read(e[i])) continue;
        const int32_t r = SearchState::slot_of(e[i]);
        if (r < g_.forward || r == high) continue;
        ++seen;
        const int32_t depth = kDepths[random_.below(5)];
        if (insert_before(r, state_.writer(t), 1.0, depth, state_.units(t) / 32)) {
          const double score = static_cast<double>(excess - state_.excess()) /
                               std::max(state_.seconds() - seconds, 1e-9 * mean_seconds_);
          if (score > best) best = score, best_before = r, best_depth = depth, best_tensor = t;
        }
        state_.undo(mark);
      }
      if (best_tensor < 0) return false;
      insert_before(best_before, state_.writer(best_tensor), 1.0, best_depth, state_.units(best_tensor) / 32);
    }
    return true;
  }

  // Take out, in random order, every recomputation without which it fits as well.
  void purge() {
    order_ = state_.recomputations();
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random_.below(static_cast<int32_t>(i))]);
    for (int32_t s : order_) {
      if (state_.op_at(s) < 0 || !state_.is_recomputation(state_.op_at(s))) continue;
      const size_t mark = state_.changes();
      remove_with_feeders(s);
      if (state_.excess() > 0) state_.undo(mark);
    }
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
    const int32_t op = state_.op_at(s);
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
    (void)op;
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
  double merge_ = 0.0;  // chance to take out the next recomputation of what is put in
  double mean_seconds_ = 0.0, price_ = 0.0;
  double best_seconds_ = std::numeric_limits<double>::infinity();
  std::vector<Step> best_;
  int32_t best_forward_ = 0;
  std::vector<int32_t> order_;
  bool crowded_ = false;
};

}  // namespace monet
