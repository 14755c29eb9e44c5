// Convolutions over the last tokens, channel by channel, of the rows of a step. Each product and sum is rounded by
// itself, as torch does in kernels/short_conv.py.
//
// Letters: T rows; C channels; L taps.
#pragma once

#include <algorithm>

#include "threads.h"
#include "vectors.h"

namespace quire {

// Which rows follow which states, and which states are kept: see StateRows in kernels/state_rows.py.
struct StateRows {
  const int64_t *begins, *sources, *keeps;  // [T]
};

// The input of a gated convolution: gates of inputs times inputs, of rows of gates, gates of outputs, and inputs.
template <typename T>
struct GatedInput {
  const T* projected;  // [T, 3 * C]
  int64_t width;

  Part input(int64_t row, int64_t d, int count) const {
    const T* gates = projected + 3 * row * width + d;
    return rounded(load_lanes<Part>(gates, count) * load_lanes<Part>(gates + 2 * width, count), projected);
  }
  Part output(Part sum, int64_t row, int64_t d, int count) const {
    return load_lanes<Part>(projected + (3 * row + 1) * width + d, count) * rounded(sum, projected);
  }
};

template <typename T, typename Around>
struct CausalConv {
  T* out;         // [T, C]
  const T* taps;  // [L, C]
  const T* bias;  // [C], or null
  T* states;      // [slots, L - 1, C], the last inputs
  Around around;  // what the input is, and what is made of the sum
  const StateRows& at;
  int64_t rows, width, length;

  // Slots that are written are not read in the same step.
  void run(const Worker& worker) const {
    // Both rows and parts of a row are divided among threads, so that a single row uses all threads too.
    constexpr int64_t kStretch = 256;
    const int64_t stretches = (width + kStretch - 1) / kStretch;
    worker.for_shares(rows * stretches, [&](int64_t task) {
      const int64_t row = task / stretches, first = task % stretches * kStretch;
      for_parts(std::min(kStretch, width - first), [&](int64_t d, int count) { convolve(row, first + d, count); });
    });
    const int64_t kept = length - 1;
    worker.for_shares(rows * kept, [&](int64_t task) {
      const int64_t row = task / kept, place = task % kept;
      if (at.keeps[row] < 0) return;
      T* to = states + (at.keeps[row] * kept + place) * width;
      for_parts(width, [&](int64_t d, int count) {
        store_lanes(to + d, input(row, kept - 1 - place, d, count), count);
      });
    });
  }

 private:
  void convolve(int64_t row, int64_t d, int count) const {
    Part sum = input(row, length - 1, d, count) * load_lanes<Part>(taps + d, count);
    for (int64_t tap = 1; tap < length; tap++)
      sum = sum + input(row, length - 1 - tap, d, count) * load_lanes<Part>(taps + tap * width + d, count);
    if (bias != nullptr) sum = sum + load_lanes<Part>(bias + d, count);
    store_lanes(out + row * width + d, around.output(sum, row, d, count), count);
  }

  // That of the token `back` before that of a row: of a row of the same item, or in its state.
  Part input(int64_t row, int64_t back, int64_t d, int count) const {
    const int64_t begin = at.begins[row], source = at.sources[row], from = row - back;
    if (from >= begin) return around.input(from, d, count);
    if (source < 0) return Part{};
    return load_lanes<Part>(states + (source * (length - 1) + length - 1 + from - begin) * width + d, count);
  }
};

}  // namespace quire
