// A schedule under search: which forward operators run again, where, and what that does to memory.
//
// The state is the sequence of steps itself, spread over `slots` (some empty, so that a step can be put in without
// moving others). Putting a recomputation anywhere into the backward part, or taking one out, always leaves a valid
// schedule: lifetimes follow from the sequence. So every schedule is a state, and every change is a few changes of
// intervals: the bytes at every slot are kept by range additions, and with it the excess, the sum over steps of the bytes above
// the budget. Bytes are counted in units that make all sums fit in 30 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "flat_graph.hpp"

namespace monet {

class SearchState {
 public:
  explicit SearchState(const FlatGraph& g) : g_(g) { prepare(); }

  struct Step {
    int32_t op, impl;  // impl: global index
  };

  // ---- loading and reading ------------------------------------------------------------------------------------

  // Take over a sequence (implementations: global indices of ones that are not in place).
  void load(const std::vector<Step>& steps, int32_t forward_steps) {
    const int32_t n = static_cast<int32_t>(steps.size());
    int32_t last_useful = 0;  // behind the last backward step that reads something worth recomputing: no gaps
    for (int32_t i = 0; i < n; ++i)
      for (int32_t t : reads_of(steps[i].impl))
        if (i >= forward_steps && recomputable_[t]) last_useful = i;
    std::vector<int32_t> slots(n);
    int32_t s = g_.forward;
    for (int32_t i = 0; i < n; ++i) {
      if (i < forward_steps) {
        slots[i] = steps[i].op;  // every forward operator has its own slot: optional ones may be absent
      } else {
        if (i <= last_useful) s += is_recomputation(steps[i].op) ? 2 : kGap;
        slots[i] = s++;
      }
    }
    size_ = s;
    op_at_.assign(size_, -1);
    impl_at_.assign(size_, -1);
    in_place_at_.assign(size_, -1);
    taken_.assign(size_, 0);
    index_at_.assign(size_, -1);
    main_slot_.assign(g_.operators, -1);
    const int32_t blocks = size_ / kBlock + 1;
    alive_.assign(blocks * kBlock, -kHidden);
    lazy_.assign(blocks, 0);
    top_.assign(blocks, -kHidden);
    recomputations_.clear();
    idle_.assign(g_.operators, 0);
    idle_reads_.assign(g_.tensors, 0);
    for (auto& e : events_) e.clear();
    seconds_ = 0.0;
    excess_ = 0;
    const int32_t budget = budget_;
    budget_ = INT32_MAX / 2;  // nothing is above it while it is built
    for (int32_t i = 0; i < n; ++i) put(slots[i], steps[i].op, steps[i].impl);
    set_budget_units(budget);
    log_.clear();
  }

  void sequence(std::vector<Step>& steps, int32_t& forward_steps) const {
    steps.clear();
    forward_steps = 0;
    for (int32_t s = 0; s < size_; ++s)
      if (op_at_[s] >= 0) {
        steps.push_back({op_at_[s], impl_at_[s]});
        forward_steps += s < g_.forward;
      }
  }

  // The same sequence with room for more.
  void relayout() {
    std::vector<Step> steps;
    int32_t forward_steps;
    sequence(steps, forward_steps);
    load(steps, forward_steps);
  }

  void set_budget(int64_t bytes) { set_budget_units(static_cast<int32_t>(std::min<int64_t>(bytes / unit_, kHidden - 1))); }
  int64_t unit() const { return unit_; }
  double seconds() const { return seconds_; }
  int64_t excess() const { return excess_; }
  int64_t peak() const { return int64_t{std::max(0, *std::max_element(top_.begin(), top_.end()))} * unit_; }
  int32_t size() const { return size_; }
  int32_t op_at(int32_t s) const { return op_at_[s]; }
  int32_t main_slot(int32_t op) const { return main_slot_[op]; }  // of its run that is no recomputation, -1 for none
  int32_t impl_at(int32_t s) const { return impl_at_[s]; }
  int32_t alive_at(int32_t s) const { return alive_[s] + lazy_[s / kBlock]; }
  int32_t budget() const { return budget_; }
  const std::vector<int32_t>& recomputations() const { return recomputations_; }  // their slots, in no order
  const std::vector<int32_t>& events(int32_t t) const { return events_[t]; }      // slot * 2 + is_read, sorted
  static int32_t slot_of(int32_t event) { return event >> 1; }
  static bool is_read(int32_t event) { return event & 1; }
  static bool is_read(const std::vector<int32_t>& events, size_t i) { return i < events.size() && is_read(events[i]); }
  static size_t find(const std::vector<int32_t>& events, int32_t s) {  // the first event at slot s or behind it
    size_t i = 0;
    while (i < events.size() && slot_of(events[i]) < s) ++i;
    return i;
  }
  bool is_recomputation(int32_t op) const { return !(g_.operator_flags[op] & kBackward); }
  bool recomputable(int32_t t) const { return recomputable_[t]; }
  int32_t writer(int32_t t) const { return writer_[t]; }
  int32_t units(int32_t t) const { return units_[t]; }

  // The slot with the most bytes.
  int32_t highest() const {
    const int32_t k = static_cast<int32_t>(std::max_element(top_.begin(), top_.end()) - top_.begin());
    const auto first = alive_.begin() + k * kBlock;
    return static_cast<int32_t>(std::max_element(first, first + kBlock) - alive_.begin());
  }

  struct Span {
    const int32_t* first;
    const int32_t* last;
    const int32_t* begin() const { return first; }
    const int32_t* end() const { return last; }
  };
  Span reads_of(int32_t impl) const { return {&reads_[read_start_[impl]], &reads_[read_start_[impl + 1]]}; }
  Span writes_of(int32_t op) const { return {&writes_[write_start_[op]], &writes_[write_start_[op + 1]]}; }

  // Whether nothing reads what the step at s writes before it is written again.
  bool useless(int32_t s) const {
    for (int32_t t : writes_of(op_at_[s])) {
      const auto& e = events_[t];
      size_t i = find(e, s);
      if (is_read(e, i + 1)) return false;
    }
    return true;
  }

  // Whether what the step at s writes is neither read nor written by any other step.
  bool alone(int32_t s) const {
    const size_t own = idle_[op_at_[s]] && s == main_slot_[op_at_[s]] ? 0 : 1;
    for (int32_t t : writes_of(op_at_[s]))
      if (events_[t].size() > own || idle_reads_[t] > 0) return false;
    return true;
  }

  bool may_be_in_place(int32_t impl) const { return in_place_target_[impl] >= 0; }

  // Whether something writes t before slot s, or would if t were read.
  bool written_before(int32_t t, int32_t s) const {
    const auto& e = events_[t];
    if (!e.empty() && slot_of(e[0]) < s) return true;
    return idle_[writer_[t]] && main_slot_[writer_[t]] < s;
  }

  // The tensor whose storage the step at s may take over now, or -1.
  int32_t in_place_now(int32_t s) const {
    const int32_t t = in_place_at_[s];
    if (t < 0) return -1;
    const auto& e = events_[t];
    size_t i = find(e, s);
    return is_read(e, i + 1) ? -1 : t;
  }

  // The implementation to name for the step at s: the in-place variant where that is legal.
  int32_t chosen_at(int32_t s) const {
    const int32_t op = op_at_[s], k = impl_at_[s], t = in_place_now(s);
    if (t >= 0)
      for (int32_t v = g_.implementation_start[op]; v < g_.implementation_start[op + 1]; ++v)
        if (g_.in_place_of[v] == t && variant(op, k, v)) return v;
    return k;
  }

  // ---- changing -----------------------------------------------------------------------------------------------

  // An empty slot directly before the step at s (in the backward part), or -1 when there is none near.
  int32_t room_before(int32_t s) {
    int32_t e = s - 1;
    const int32_t limit = std::max(g_.forward, s - 24);
    while (e >= limit && op_at_[e] >= 0) --e;
    if (e < limit) return -1;
    for (; e + 1 < s; ++e) {  // slide the steps between by one
      slide(e + 1, e);
      log_.push_back({e, kSlid, -1});
    }
    return s - 1;
  }

  void insert(int32_t s, int32_t op, int32_t impl) {
    put(s, op, impl);
    log_.push_back({s, kPut, -1});
  }

  void remove(int32_t s) {
    log_.push_back({s, op_at_[s], impl_at_[s]});
    take(s);
  }

  void commit() { log_.clear(); }
  size_t changes() const { return log_.size(); }  // since the last commit or undo

  void undo(size_t mark = 0) {  // down to what changes() was then
    for (size_t i = log_.size(); i-- > mark;) {
      const auto& change = log_[i];
      if (change.op == kPut)
        take(change.slot);
      else if (change.op == kSlid)
        slide(change.slot, change.slot + 1);
      else
        put(change.slot, change.op, change.impl);
    }
    log_.resize(mark);
  }

 private:
  static constexpr int32_t kHidden = 1 << 30;  // taken off an empty slot's bytes
  static constexpr int32_t kGap = 5;
  static constexpr int32_t kMostLazy = kHidden / 4;
  static constexpr int32_t kBlock = 64;

  static constexpr int32_t kPut = -1, kSlid = -2;

  struct Change {
    int32_t slot = 0, op = 0, impl = 0;  // op: what was taken out, or kPut or kSlid (from slot + 1)
  };

  void prepare() {
    const int32_t nt = g_.tensors, no = g_.operators, ni = g_.implementations;
    int64_t total = 1;
    for (int32_t t = 0; t < nt; ++t) total += (g_.tensor_flags[t] & kExternal) ? 0 : g_.nbytes[t];
    int64_t work = 0;
    for (int32_t k = 0; k < ni; ++k) work = std::max(work, g_.workspace[k]);
    for (unit_ = 1; (2 * total + work) / unit_ + 3 * nt >= kHidden; unit_ *= 2) {
    }
    units_.resize(nt);
    for (int32_t t = 0; t < nt; ++t)
      units_[t] = (g_.tensor_flags[t] & kExternal) ? 0 : static_cast<int32_t>((g_.nbytes[t] + unit_ - 1) / unit_);
    for (int32_t k = 0; k < ni; ++k) work_.push_back(static_cast<int32_t>((g_.workspace[k] + unit_ - 1) / unit_));
    writer_.assign(nt, -1);
    recomputable_.assign(nt, 0);
    write_start_.assign(1, 0);
    transient_.assign(no, 0);
    may_idle_.assign(no, 0);
    for (int32_t o = 0; o < no; ++o) {
      for (int32_t j = g_.output_start[o]; j < g_.output_start[o + 1]; ++j) {
        const int32_t t = g_.outputs[j];
        writer_[t] = o;
        if (g_.tensor_flags[t] & kKept) {
          transient_[o] += units_[t];
        } else {
          writes_.push_back(t);
          recomputable_[t] = !(g_.operator_flags[o] & kBackward) && (g_.operator_flags[o] & kReplayable);
        }
      }
      write_start_.push_back(static_cast<int32_t>(writes_.size()));
      const int32_t outputs = g_.output_start[o + 1] - g_.output_start[o];
      const bool none_kept = outputs > 0 && write_start_[o + 1] - write_start_[o] == outputs;
      may_idle_[o] = none_kept && (g_.operator_flags[o] & kOptional) && (g_.operator_flags[o] & kReplayable);
    }
    writes_.push_back(0);  // so that the address of its end exists
    read_start_.assign(1, 0);
    for (int32_t k = 0; k < ni; ++k) {
      const size_t from = reads_.size();
      for (int32_t j = g_.input_start[k]; j < g_.input_start[k + 1]; ++j) {
        const int32_t t = g_.inputs[j];
        if (!g_.tensor_flags[t] && std::find(reads_.begin() + from, reads_.end(), t) == reads_.end())
          reads_.push_back(t);
      }
      read_start_.push_back(static_cast<int32_t>(reads_.size()));
    }
    reads_.push_back(0);
    // in-place variants: used by themselves wherever they are legal, so they are no choice
    in_place_target_.assign(ni, -1);
    saving_.assign(ni, 0.0);
    for (int32_t o = 0; o < no; ++o)
      for (int32_t k = g_.implementation_start[o]; k < g_.implementation_start[o + 1]; ++k) {
        if (g_.in_place_of[k] >= 0) continue;
        for (int32_t v = g_.implementation_start[o]; v < g_.implementation_start[o + 1]; ++v)
          if (in_place_target_[k] < 0 && variant(o, k, v)) {
            in_place_target_[k] = g_.in_place_of[v];
            saving_[k] = g_.seconds[k] - g_.seconds[v];
          }
      }
    events_.resize(nt);
  }

  bool variant(int32_t o, int32_t k, int32_t v) const {
    const int32_t t = g_.in_place_of[v];
    if (t < 0 || g_.tensor_flags[t] || g_.seconds[v] > g_.seconds[k] || g_.workspace[v] > g_.workspace[k]) return false;
    if (g_.nbytes[t] != g_.nbytes[g_.outputs[g_.output_start[o]]]) return false;
    const Span a{&g_.inputs[g_.input_start[k]], &g_.inputs[g_.input_start[k + 1]]};
    const Span b{&g_.inputs[g_.input_start[v]], &g_.inputs[g_.input_start[v + 1]]};
    return std::is_permutation(a.begin(), a.end(), b.begin(), b.end());
  }

  // What a step that is x above the budget adds to the excess: being above at all counts, too.
  int64_t over(int32_t x) const { return x > 0 ? int64_t{x} + extra_ : 0; }

  void set_budget_units(int32_t budget) {
    extra_ = budget / extra_share_;
    budget_ = budget;
    excess_ = 0;
    for (int32_t s = 0; s < size_; ++s) excess_ += over(alive_at(s) - budget_);
  }

  // Add d to the bytes of slots a..b. Whole blocks that stay under the budget are done at once.
  void add(int32_t a, int32_t b, int32_t d) {
    if (a > b || d == 0) return;
    const int32_t first = a / kBlock, last = b / kBlock;
    if (first == last) return add_within(first, a, b + 1, d);
    int32_t k = first;
    if (a % kBlock) add_within(k, a, (k + 1) * kBlock, d), ++k;
    const int32_t whole = (b + 1) / kBlock;
    for (; k < whole; ++k) {
      if (std::max<int64_t>(top_[k], int64_t{top_[k]} + d) > budget_) {
        int64_t change = 0;
        const int32_t limit = budget_ - lazy_[k];
        const int32_t* __restrict alive = &alive_[k * kBlock];
        for (int32_t s = 0; s < kBlock; ++s)
          change += over(alive[s] + d - limit) - over(alive[s] - limit);
        excess_ += change;
      }
      lazy_[k] += d;
      top_[k] += d;
      if (lazy_[k] > kMostLazy || lazy_[k] < -kMostLazy) spread(k);
    }
    if (k == last) add_within(k, k * kBlock, b + 1, d);
  }

  // What whole blocks were given is taken off in parts, and the other way round: both grow, and would overflow.
  void spread(int32_t k) {
    for (int32_t s = k * kBlock; s < (k + 1) * kBlock; ++s) alive_[s] += lazy_[k];
    lazy_[k] = 0;
  }

  void add_within(int32_t k, int32_t a, int32_t b, int32_t d) {
    int32_t* __restrict alive = alive_.data();
    if (std::max<int64_t>(top_[k], int64_t{top_[k]} + d) > budget_) {
      int64_t change = 0;
      const int32_t limit = budget_ - lazy_[k];
      for (int32_t s = a; s < b; ++s)
        change += over(alive[s] + d - limit) - over(alive[s] - limit);
      excess_ += change;
    }
    for (int32_t s = a; s < b; ++s) alive[s] += d;
    int32_t top = INT32_MIN;
    for (int32_t s = k * kBlock; s < (k + 1) * kBlock; ++s) top = std::max(top, alive[s]);
    top_[k] = top + lazy_[k];
  }

  // The first slot that tensor t no longer holds after event e, were e the last of its interval.
  int32_t end_after(int32_t t, int32_t e) const {
    const int32_t s = slot_of(e);
    return is_read(e) && in_place_at_[s] == t ? s : s + 1;
  }

  // A read at s starts or stops counting: events[i-1] is before it, events[i] (if any) behind it.
  void count_read(int32_t t, int32_t s, size_t i, int32_t sign) {
    const auto& e = events_[t];
    if (is_read(e, i)) return;
    add(end_after(t, e[i - 1]), in_place_at_[s] == t ? s - 1 : s, sign * units_[t]);
  }

  void count_write(int32_t t, int32_t s, size_t i, int32_t sign) {
    const auto& e = events_[t];
    if (i > 0 && is_read(e, i))
      add(end_after(t, e[i - 1]), s - 1, -sign * units_[t]);
    else if (is_read(e, i))
      return;  // can not be: a read before any write
    else
      add(s, s, sign * units_[t]);
  }

  // An optional operator that runs again before anything has read it need not have run in the forward part: while it is
  // so, that run is idle: it costs nothing, reads and holds nothing, and is left out of the schedule in the end.
  void settle_first_run(int32_t op) {
    const int32_t s = may_idle_[op] ? main_slot_[op] : -1;
    if (s < 0 || idle_[op] || !useless(s)) return;
    seconds_ -= cost_at(s);
    taken_[s] = 0;
    idle_[op] = 1;
    leave(s);
    count_idle_reads(s, 1);
    for (int32_t t : reads_of(impl_at_[s])) settle_first_run(writer_[t]);
  }

  void count_idle_reads(int32_t s, int32_t sign) {
    for (int32_t t : reads_of(impl_at_[s])) idle_reads_[t] += sign;
  }

  void settle_first_runs(int32_t op, int32_t impl) {
    settle_first_run(op);
    for (int32_t t : reads_of(impl)) settle_first_run(writer_[t]);
  }

  // What the first run of an operator writes is about to be read.
  void wake(int32_t op) {
    if (!idle_[op]) return;
    const int32_t s = main_slot_[op];
    idle_[op] = 0;
    count_idle_reads(s, -1);
    seconds_ += cost_at(s);
    enter(s);
  }

  // Whether what reads t in event i takes over its storage depends on the event behind it, which has changed.
  void settle_in_place(int32_t t, size_t i) {
    const auto& e = events_[t];
    if (!is_read(e, i)) return;
    const int32_t s = slot_of(e[i]);
    const bool last = !is_read(e, i + 1);
    if (in_place_at_[s] != t || taken_[s] == last) return;
    seconds_ -= cost_at(s);
    taken_[s] = last;
    seconds_ += cost_at(s);
  }

  double cost_at(int32_t s) const {
    if (s == main_slot_[op_at_[s]] && idle_[op_at_[s]]) return 0.0;
    return g_.seconds[impl_at_[s]] - (taken_[s] ? saving_[impl_at_[s]] : 0.0);
  }

  // Move the step at `from` to the empty slot `to` beside it. Nothing that a step sees changes.
  void slide(int32_t from, int32_t to) {
    const int32_t op = op_at_[from], impl = impl_at_[from];
    const bool again = from >= g_.forward && is_recomputation(op);
    const int32_t during = alive_at(from);
    int32_t beside = during - kHidden - work_units(impl) - (again ? transient_[op] : 0);
    if (to > from && !again) beside -= transient_[op];
    for (int32_t t : reads_of(impl)) {
      auto& e = events_[t];
      const size_t i = find(e, from);
      const bool last = !is_read(e, i + 1), taken = in_place_at_[from] == t;
      if (to < from && last && !taken) beside -= units_[t];
      if (to > from && last && taken) beside += units_[t];
      e[i] = 2 * to + 1;
    }
    for (int32_t t : writes_of(op)) {
      auto& e = events_[t];
      const size_t i = find(e, from);
      const bool dead = !is_read(e, i + 1);
      if (to > from || dead) beside -= units_[t];
      e[i] = 2 * to;
    }
    set_at(to, during);
    set_at(from, beside);
    op_at_[to] = op;
    impl_at_[to] = impl;
    in_place_at_[to] = in_place_at_[from];
    taken_[to] = taken_[from];
    index_at_[to] = index_at_[from];
    if (again)
      recomputations_[index_at_[to]] = to;
    else
      main_slot_[op] = to;
    op_at_[from] = impl_at_[from] = in_place_at_[from] = index_at_[from] = -1;
    taken_[from] = 0;
  }

  void set_at(int32_t s, int32_t value) {
    const int32_t k = s / kBlock;
    alive_[s] = value - lazy_[k];
    const int32_t* alive = &alive_[k * kBlock];
    int32_t top = INT32_MIN;
    for (int32_t j = 0; j < kBlock; ++j) top = std::max(top, alive[j]);
    top_[k] = top + lazy_[k];
  }

  int32_t work_units(int32_t impl) const { return work_[impl]; }

  void put(int32_t s, int32_t op, int32_t impl) {
    op_at_[s] = op;
    impl_at_[s] = impl;
    in_place_at_[s] = in_place_target_[impl];
    seconds_ += g_.seconds[impl];
    if (is_again(s)) {
      index_at_[s] = static_cast<int32_t>(recomputations_.size());
      recomputations_.push_back(s);
    } else {
      main_slot_[op] = s;
    }
    enter(s);
    settle_first_runs(op, impl);
  }

  void take(int32_t s) {
    const int32_t op = op_at_[s], impl = impl_at_[s];
    const bool again = is_again(s);
    if (again)
      for (int32_t t : writes_of(op))
        if (find(events_[t], s) == 0 && is_read(events_[t], 1)) wake(op);
    seconds_ -= cost_at(s);
    taken_[s] = 0;
    if (!again && idle_[op])
      count_idle_reads(s, -1);
    else
      leave(s);
    if (again) {
      const int32_t moved = recomputations_.back();
      recomputations_[index_at_[s]] = moved;
      index_at_[moved] = index_at_[s];
      recomputations_.pop_back();
      index_at_[s] = -1;
    } else {
      idle_[op] = 0;
      main_slot_[op] = -1;
    }
    op_at_[s] = impl_at_[s] = in_place_at_[s] = -1;
    settle_first_runs(op, impl);
  }

  // Whether the step at s is a recomputation.
  bool is_again(int32_t s) const { return s >= g_.forward && is_recomputation(op_at_[s]); }

  // The step at s counts: its bytes, what it reads and what it writes.
  void enter(int32_t s) {
    const int32_t op = op_at_[s], impl = impl_at_[s];
    const bool again = is_again(s);
    for (int32_t t : reads_of(impl))
      if (find(events_[t], s) == 0) wake(writer_[t]);
    add(s, s, kHidden + work_units(impl) + (again ? transient_[op] : 0));
    if (!again && transient_[op]) add(s, size_ - 1, transient_[op]);
    for (int32_t t : reads_of(impl)) {
      auto& e = events_[t];
      const size_t i = find(e, s);
      count_read(t, s, i, 1);
      e.insert(e.begin() + i, 2 * s + 1);
      if (i > 0) settle_in_place(t, i - 1);
      settle_in_place(t, i);
    }
    for (int32_t t : writes_of(op)) {
      auto& e = events_[t];
      const size_t i = find(e, s);
      count_write(t, s, i, 1);
      e.insert(e.begin() + i, 2 * s);
      if (i > 0) settle_in_place(t, i - 1);
    }
  }

  void leave(int32_t s) {
    const int32_t op = op_at_[s], impl = impl_at_[s];
    const bool again = is_again(s);
    for (int32_t t : writes_of(op)) {
      auto& e = events_[t];
      const size_t i = find(e, s);
      e.erase(e.begin() + i);
      count_write(t, s, i, -1);
      if (i > 0) settle_in_place(t, i - 1);
    }
    for (int32_t t : reads_of(impl)) {
      auto& e = events_[t];
      const size_t i = find(e, s);
      e.erase(e.begin() + i);
      count_read(t, s, i, -1);
      if (i > 0) settle_in_place(t, i - 1);
    }
    add(s, s, -kHidden - work_units(impl) - (again ? transient_[op] : 0));
    if (!again && transient_[op]) add(s, size_ - 1, -transient_[op]);
  }

  const FlatGraph& g_;
  int64_t unit_ = 1;
  int32_t extra_ = 0, extra_share_ = 64;
  int32_t budget_ = INT32_MAX / 2;
  int32_t size_ = 0;
  double seconds_ = 0.0;
  int64_t excess_ = 0;
  std::vector<int32_t> units_, writer_, write_start_, writes_, read_start_, reads_, in_place_target_, transient_,
      work_;
  std::vector<double> saving_;     // seconds, where an implementation may run in place
  std::vector<uint8_t> taken_;     // whether the step at a slot runs in place now
  std::vector<uint8_t> recomputable_, may_idle_, idle_;  // idle_: of an operator whose first run does not count
  std::vector<int32_t> idle_reads_;                      // of a tensor: by such runs
  std::vector<int32_t> op_at_, impl_at_, in_place_at_, index_at_, recomputations_, main_slot_;
  std::vector<int32_t> alive_, lazy_, top_;  // bytes at slot s: alive_[s] + lazy_[s / kBlock]; top_: a block's most
  std::vector<std::vector<int32_t>> events_;
  std::vector<Change> log_;
};

}  // namespace monet
