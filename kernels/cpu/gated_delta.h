// The gated delta rule between its projections. kernels/gated_delta.py has the formulas.
//
// Letters: T rows; J key heads of K elements; H value heads of V elements; I = H * V; D = 2 * J * K + I; L taps.
#pragma once

#include "state_scan.h"

namespace quire {

// Plain data, filled by kernels/cpu/state_scan.py: the fields must agree.
struct GatedDeltaWeights {
  const void* taps;                // [L, D], of the type of rows
  const float *dt_bias, *decays;   // [H]; if each element of a key has a decay of its own, dt_bias is [H * K]
  const void* norm;                // [V], of the type of rows
  int64_t key_heads, key_width, heads, head_width, num_taps;
  int64_t adjacent;  // how many value heads of a key head are one after the other
  int64_t is_wide;   // whether each element of a key has a decay of its own; then gates are sigmoids, and J = H
  double eps;

  int64_t inner() const { return heads * head_width; }
  int64_t state_size() const { return key_width * head_width; }  // of a head
  int64_t keys() const { return key_heads * key_width; }
  int64_t convolved() const { return 2 * keys() + inner(); }
  int64_t steps() const { return is_wide ? keys() : heads; }
  int64_t stride() const { return inner() + convolved() + heads + steps(); }
  int64_t key_head_of(int64_t head) const { return head / adjacent % key_heads; }
};

// Slots that are written are not read in the same step.
template <typename T>
void gated_delta(T* out, const T* projected, const GatedDeltaWeights& weights, T* inputs, float* states,
                 const StateRows& at, int64_t rows, const ScanSpace<T>& space, const Worker& worker);

}  // namespace quire
