// Greedy eviction, simulated annealing, and ruin and recreate, over SearchState.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

#include "moves.hpp"

namespace monet {

class Search : private Moves {
 public:
  using Step = SearchState::Step;

  Search(const FlatGraph& g, uint64_t seed) : Moves(g, seed) {}

  SearchState& state() { return state_; }
  bool has_best() const { return best_seconds_ < std::numeric_limits<double>::infinity(); }
  double best_seconds() const { return best_seconds_; }
  const std::vector<Step>& best() const { return best_; }
  int32_t best_forward() const { return best_forward_; }
  double price() const { return price_; }

  void load(std::vector<Step> steps, int32_t forward_steps) {
    for (Step& step : steps) step.impl = undominated(step.op, step.impl);
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
  // Gives up after so many tries.
  bool greedy(int64_t tries) {
    tried_ = 0;
    const double unknown = std::numeric_limits<double>::infinity();
    std::vector<Eviction> scores(targets_.size(), Eviction{unknown, 0, 0, -1});
    std::vector<uint8_t> fresh(targets_.size(), 0);
    std::vector<int32_t> index(g_.tensors, -1);
    for (size_t i = 0; i < targets_.size(); ++i) index[targets_[i]] = static_cast<int32_t>(i);
    bool all_anew = true;
    while (state_.excess() > 0 && tried_ < tries) {
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
        std::fill(scores.begin(), scores.end(), Eviction{unknown, 0, 0, -1});
        if (crowded_) state_.relayout();
        all_anew = true;
        continue;
      }
      all_anew = false;
      const Eviction& e = scores[best];
      evict(targets_[best], e);
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
      if (random_.uniform() < choosing_) move_choose();
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
    int32_t impl;  // of the step there, which does not read the tensor, or -1: it is computed again
  };

  bool evict(int32_t t, const Eviction& e) {
    ++tried_;
    if (e.impl >= 0) return choose(e.before, e.impl);
    return insert_before(e.before, state_.writer(t), 1.0, e.depth, state_.units(t) / 32);
  }

  // Excess taken off per second since excess and seconds were these; all of it where that costs nothing.
  double gain(int64_t excess, double seconds) const {
    return static_cast<double>(excess - state_.excess()) / std::max(state_.seconds() - seconds, 1e-9 * mean_seconds_);
  }

  // The best way to have tensor t computed again before one of its reads, or not read there.
  Eviction score(int32_t t) {
    Eviction best{0.0, 0, 0, -1};
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
        const Eviction again{0.0, r, depth, -1};
        const bool done = evict(t, again);
        const double score = gain(excess, seconds);
        if (done && score > best.score) best = again, best.score = score;
        const size_t changes = state_.changes();
        state_.undo();
        if (changes == steps) break;  // no deeper chain
        steps = changes;
      }
      const int32_t op = state_.op_at(r);
      for (int32_t w = way_start_[op]; ways_of(op) > 1 && w < way_start_[op + 1]; ++w) {
        const Eviction other{0.0, r, 0, ways_[w]};
        const bool done = evict(t, other);
        const double score = gain(excess, seconds);
        if (done && score > best.score) best = other, best.score = score;
        state_.undo();
      }
    }
    return best;
  }

  void note_best() {
    if (state_.size() == 0 || state_.excess() > 0 || state_.seconds() >= best_seconds_) return;
    best_seconds_ = state_.seconds();
    state_.sequence(best_, best_forward_);
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
      Eviction best{0.0, 0, 0, -1};
      int32_t best_tensor = -1, seen = 0;
      for (int32_t draw = 0; draw < 200 && seen < 12; ++draw) {
        const int32_t t = draw_target();
        const auto& e = state_.events(t);
        const size_t i = SearchState::find(e, high);
        if (i == 0 || !SearchState::is_read(e, i)) continue;
        const int32_t r = SearchState::slot_of(e[i]);
        if (r < g_.forward || r == high) continue;
        ++seen;
        Eviction drawn{0.0, r, kDepths[random_.below(5)], -1};
        if (random_.uniform() < 2 * choosing_) drawn.impl = draw_without(r, t);
        if (evict(t, drawn)) {
          drawn.score = gain(excess, seconds);
          if (drawn.score > best.score) best = drawn, best_tensor = t;
        }
        state_.undo(mark);
      }
      if (best_tensor < 0) return false;
      evict(best_tensor, best);
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

  int64_t tried_ = 0;
  double price_ = 0.0;  // seconds that a unit of excess is worth
  double best_seconds_ = std::numeric_limits<double>::infinity();
  std::vector<Step> best_;
  int32_t best_forward_ = 0;
  std::vector<int32_t> order_;
};

}  // namespace monet
