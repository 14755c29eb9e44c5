// activation(gate) * up.
#pragma once

#include "threads.h"

namespace quire {

// Plain data, filled by kernels/gated_activation.py: the fields must agree. Strides are in elements.
struct GateArguments {
  void* out;            // [T, I] contiguous
  const void* gate_up;  // [T, 2 * I], rows of gate, then up; without gates [T, I]
  int64_t rows, width, stride;
  int64_t activation;  // its place in ACTIVATIONS of kernels/gated_activation.py
};

template <typename T>
void gated_activation(const GateArguments& a, const Worker& worker);

}  // namespace quire
