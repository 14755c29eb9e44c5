// Mamba 2 between its projections. kernels/mamba2.py has the formulas.
//
// Letters: T rows; I inner width, H heads of P elements; G groups of N elements; D = I + 2 * G * N; L taps.
#pragma once

#include "state_scan.h"

namespace quire {

// Plain data, filled by kernels/cpu/state_scan.py: the fields must agree.
struct Mamba2Weights {
  const void *taps, *bias;                 // [L, D] and [D], or null; of the type of rows
  const float *dt_bias, *decays, *direct;  // [H]
  const void* norm;                        // [I], of the type of rows, or null
  int64_t heads, head_width, groups, state_width, num_taps;
  double eps, least_step;

  int64_t inner() const { return heads * head_width; }
  int64_t state_size() const { return state_width * head_width; }  // of a head
  int64_t convolved() const { return inner() + 2 * groups * state_width; }
  int64_t stride() const { return inner() + convolved() + heads; }  // of projections
};

// Slots that are written are not read in the same step.
template <typename T>
void mamba2(T* out, const T* projected, const Mamba2Weights& weights, T* inputs, float* states, const StateRows& at,
            int64_t rows, const ScanSpace<T>& space, const Worker& worker);

}  // namespace quire
