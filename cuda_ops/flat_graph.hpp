// A joint graph as flat arrays: what Python hands over, and what replay and search read.
#pragma once

#include <cstdint>

namespace monet {

enum TensorFlag : uint8_t { kExternal = 1, kKept = 2 };
enum OperatorFlag : uint8_t { kBackward = 1, kReplayable = 2, kOptional = 4 };

// Layout shared with monetrun/simulate.py (_FlatGraph). All *_start arrays have one entry more than they have items.
struct FlatGraph {
  int32_t tensors;
  int32_t operators;
  int32_t forward;                       // operators before this one are forward
  int32_t implementations;               // of all operators
  const int64_t* nbytes;                 // [tensors]
  const uint8_t* tensor_flags;           // [tensors]
  const uint8_t* operator_flags;         // [operators]
  const int32_t* output_start;           // [operators + 1]
  const int32_t* outputs;
  const int32_t* implementation_start;   // [operators + 1]
  const int32_t* input_start;            // [implementations + 1]
  const int32_t* inputs;
  const int32_t* in_place_of;            // [implementations], -1 for none
  const double* seconds;                 // [implementations]
  const int64_t* workspace;              // [implementations], bytes
};

}  // namespace monet
