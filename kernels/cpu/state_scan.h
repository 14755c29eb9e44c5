// What layers share that scan the rows of a step: a row changes the state of each head and reads it. Rows are scanned
// one by one, so bits do not depend on how a text is cut into chunks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "causal_conv.h"
#include "gates.h"

namespace quire {

// The inputs of a convolution in rows of projections, from column `first` on. silu follows the convolution.
template <typename T>
struct PlainInput {
  const T* projected;
  int64_t stride, first;

  Floats input(int64_t row, int64_t d, int count) const { return load_lanes(projected + row * stride + first + d, count); }
  Floats output(Floats sum, int64_t, int64_t, int) const { return Silu::of(rounded(sum, projected)); }
};

// Space for the rows of a step.
template <typename T>
struct ScanSpace {
  T* convolved;    // [T, D], the outputs of the convolution
  float* unit;     // of the gated delta rule: queries and keys
  float* scanned;  // [T, I], what is read of the states
};

// Plain data, filled by kernels/cpu/state_scan.py: the fields must agree.
struct ScanArguments {
  void* out;
  const void *projected, *weights;
  void* inputs;
  float* states;
  StateRows at;
  void* convolved;
  float *unit, *scanned;
  int64_t rows;

  template <typename T>
  ScanSpace<T> space() const {
    return {static_cast<T*>(convolved), unit, scanned};
  }
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

inline float load_one(const float* from) { return *from; }
inline float load_one(const Bf16* from) {
  const uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

// Calls kernel(worker, weights) on threads.
template <typename Weights, typename Kernel>
inline void run_scan(const ScanArguments& a, int64_t threads, Kernel kernel) {
  const Weights& weights = *static_cast<const Weights*>(a.weights);
  const int64_t bytes = a.rows * weights.heads * weights.state_size() * static_cast<int64_t>(sizeof(float));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) { kernel(worker, weights); });
}

// Calls step(row, from, to) for all rows, with the state of head h of `heads` before the row and the place of that after
// it: the slot where it is kept, or `state` [size]. Both may be the same place.
template <typename Step>
inline void scan_rows(float* state, int64_t size, float* states, int64_t heads, int64_t h, const StateRows& at,
                      int64_t rows, Step step) {
  const auto slot = [&](int64_t index) { return states + (index * heads + h) * size; };
  const float* from = state;
  for (int64_t row = 0; row < rows; row++) {
    if (row == at.begins[row]) {
      const int64_t source = at.sources[row];
      if (source < 0) std::fill_n(state, size, 0.0f);
      from = source < 0 ? state : slot(source);
    }
    float* to = at.keeps[row] < 0 ? state : slot(at.keeps[row]);
    step(row, from, to);
    from = to;
  }
}

}  // namespace quire
