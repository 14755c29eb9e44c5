// What layers share that scan the rows of a step: a row changes the state of each head and reads it. Rows are scanned
// one by one, so bits do not depend on how a text is cut into chunks.
//
// Letters: T rows; H heads, each with a state of N rows and P columns.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "causal_conv.h"
#include "gates.h"

namespace quire {

// The inputs of a convolution in rows of projections, from column `first` on. silu follows the convolution.
template <typename T>
struct PlainInput {
  const T* projected;
  int64_t stride, first;

  Part input(int64_t row, int64_t d, int count) const {
    return load_lanes<Part>(projected + row * stride + first + d, count);
  }
  Part output(Part sum, int64_t, int64_t, int) const { return Silu::of(rounded(sum, projected)); }
};

// Space for the rows of a step.
template <typename T>
struct ScanSpace {
  T* convolved;     // [T, D], the outputs of the convolution
  float* prepared;  // [T, at most as wide as rows of projections], what several heads or columns of a state need of a row
  float* scanned;   // [T, I], what is read of the states
};

// Plain data, filled by kernels/cpu/state_scan.py: the fields must agree.
struct ScanArguments {
  void* out;
  const void *projected, *weights;
  void* inputs;
  float* states;
  StateRows at;
  void* convolved;
  float *prepared, *scanned;
  int64_t rows;

  template <typename T>
  ScanSpace<T> space() const {
    return {static_cast<T*>(convolved), prepared, scanned};
  }
};

// log(1 + e^x), computed as max(x, 0) + log(1 + t) with t = e^-|x|. The logarithm is 2 artanh(s) with s = t / (2 + t), which
// is 1/3 at most: the next term of the series is below 1e-9 of it.
inline Part softplus(Part x) {
  const Part t = power_of_two(larger(x, -x) * -kLog2E), s = t / (t + 2.0f), square = s * s;
  Part p = splat<Part>(2.0f / 15);
  for (const float next : {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f})
    p = fused(p, square, splat<Part>(next));
  const Part value = fused(p, s, larger(x, Part{}));
  return x == x ? value : x;
}

// e^x for x <= 0.
inline Part exponential(Part x) {
  const Part value = power_of_two(x * kLog2E);
  return x == x ? value : x;
}

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

// The states of a head in all slots.
struct HeadStates {
  float* states;
  int64_t heads, h, height, width;

  float* slot(int64_t index) const { return states + (index * heads + h) * height * width; }
};

// Some columns of a state, before and after a row. Both may be the same place.
struct Columns {
  const float* from;
  float* to;
  int64_t from_stride, to_stride;  // from a row of the state to the next one
};

// The columns of a state do not depend on each other. So many registers of each row are scanned by all rows of a text
// before the next columns are, so that they stay in the first cache.
constexpr int kParts = 4;
using Tile = std::vector<Part>;

// Calls step(parts, row, first, count, columns) for all columns and rows: `parts` registers from column `first` on,
// each full but for the last, which has `count` columns. `parts` is a constant.
template <typename Step>
inline void scan_rows(const HeadStates& head, const StateRows& at, int64_t rows, Tile& tile, Step step) {
  tile.resize(head.height * kParts);
  const auto scan = [&](auto parts, int64_t first) {
    constexpr int kWidth = decltype(parts)::value * kPartLanes;
    float* const own = reinterpret_cast<float*>(tile.data());
    const int count = static_cast<int>(std::min<int64_t>(kPartLanes, head.width - first));
    Columns columns{};
    for (int64_t row = 0; row < rows; row++) {
      const int64_t source = at.sources[row], kept = at.keeps[row];
      if (row == at.begins[row]) {
        if (source < 0) std::fill_n(own, head.height * kWidth, 0.0f);
        columns.from = source < 0 ? own : head.slot(source) + first;
        columns.from_stride = source < 0 ? kWidth : head.width;
      }
      columns.to = kept < 0 ? own : head.slot(kept) + first;
      columns.to_stride = kept < 0 ? kWidth : head.width;
      step(parts, row, first, count, columns);
      columns.from = columns.to;
      columns.from_stride = columns.to_stride;
    }
  };
  static_assert(kParts == 4);
  int64_t first = 0;
  for (; first + 4 * kPartLanes <= head.width; first += 4 * kPartLanes) scan(std::integral_constant<int, 4>(), first);
  for (; first + 2 * kPartLanes <= head.width; first += 2 * kPartLanes) scan(std::integral_constant<int, 2>(), first);
  for (; first < head.width; first += kPartLanes) scan(std::integral_constant<int, 1>(), first);
}

}  // namespace quire
