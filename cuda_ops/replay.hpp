// The replay of a schedule: the rules of monetrun/simulate.py, in one pass backwards and one forwards.
#pragma once

#include <vector>

#include "flat_graph.hpp"

namespace monet {

// Returns -1, or the step at which a rule is broken (the caller lets the Python reference say which).
// before, during and after may be null; all hold `steps` entries.
inline int64_t replay(const FlatGraph& g, int64_t forward_steps, int64_t steps, const int32_t* operators,
                      const int32_t* chosen, int64_t* before, int64_t* during, int64_t* after, int64_t* peak,
                      int64_t* peak_step, double* seconds) {
  // scratch of one thread: the same graph is replayed over and over
  thread_local std::vector<int32_t> written_at, alive_until, read_start, slot_of_output, last_read;
  written_at.assign(g.tensors, -1);
  alive_until.assign(g.tensors, -1);
  slot_of_output.assign(g.tensors, -1);

  // order, and the last read of every write
  int64_t last_forward = -1, last_backward = g.forward - 1;
  read_start.resize(steps + 1);
  last_read.clear();
  auto skipped = [&](int64_t from, int64_t to) {
    for (int64_t o = from; o < to; ++o)
      if (!(g.operator_flags[o] & kOptional)) return true;
    return false;
  };
  for (int64_t i = 0; i < steps; ++i) {
    const int32_t o = operators[i];
    if (o < 0 || o >= g.operators) return i;
    if (chosen[i] < 0 || chosen[i] >= g.implementation_start[o + 1] - g.implementation_start[o]) return i;
    const bool backward = g.operator_flags[o] & kBackward;
    if (backward != (i >= forward_steps)) {
      if (backward || !(g.operator_flags[o] & kReplayable)) return i;
    } else {
      int64_t& last = backward ? last_backward : last_forward;
      if (o <= last || skipped(last + 1, o)) return i;
      last = o;
    }
    const int32_t k = g.implementation_start[o] + chosen[i];
    for (int32_t j = g.input_start[k]; j < g.input_start[k + 1]; ++j) {
      const int32_t t = g.inputs[j];
      if (g.tensor_flags[t] & kExternal) continue;
      if (slot_of_output[t] < 0) return i;
      last_read[slot_of_output[t]] = static_cast<int32_t>(i);
    }
    read_start[i] = static_cast<int32_t>(last_read.size());
    for (int32_t j = g.output_start[o]; j < g.output_start[o + 1]; ++j) {
      const int32_t t = g.outputs[j];
      if (!((g.tensor_flags[t] & kKept) && slot_of_output[t] >= 0))
        slot_of_output[t] = static_cast<int32_t>(last_read.size());
      last_read.push_back(static_cast<int32_t>(i));
    }
  }
  if (skipped(last_forward + 1, g.forward)) return steps;
  if (skipped(last_backward + 1, g.operators)) return steps;

  int64_t alive = 0, top = 0, top_step = steps ? 0 : -1;
  double total = 0.0;
  for (int64_t i = 0; i < steps; ++i) {
    const int32_t o = operators[i];
    const int32_t k = g.implementation_start[o] + chosen[i];
    if (before) before[i] = alive;
    int64_t now = alive + g.workspace[k];
    for (int32_t j = g.output_start[o]; j < g.output_start[o + 1]; ++j) now += g.nbytes[g.outputs[j]];
    const int32_t target = g.in_place_of[k];
    if (target >= 0) {
      const int64_t size = g.nbytes[g.outputs[g.output_start[o]]];
      if (g.tensor_flags[target] || g.nbytes[target] != size || alive_until[target] != i) return i;
      now -= size;
    }
    if (during) during[i] = now;
    if (i == 0 || now > top) {
      top = now;
      top_step = i;
    }
    for (int32_t j = g.input_start[k]; j < g.input_start[k + 1]; ++j) {
      const int32_t t = g.inputs[j];
      if (alive_until[t] == i) {
        alive_until[t] = -1;
        alive -= g.nbytes[t];
      }
    }
    int32_t slot = read_start[i];
    for (int32_t j = g.output_start[o]; j < g.output_start[o + 1]; ++j, ++slot) {
      const int32_t t = g.outputs[j];
      if (g.tensor_flags[t] & kKept) {
        if (written_at[t] < 0) alive += g.nbytes[t];
        written_at[t] = static_cast<int32_t>(i);
      } else if (last_read[slot] > i) {
        alive_until[t] = last_read[slot];
        alive += g.nbytes[t];
      }
    }
    if (after) after[i] = alive;
    total += g.seconds[k];
  }
  *peak = top;
  *peak_step = top_step;
  *seconds = total;
  return -1;
}

}  // namespace monet
