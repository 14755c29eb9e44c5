// The arithmetic of paged attention on one block of 16 keys, and on the sums over blocks.
//
// Independent of pages, sequences and threads.
#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace quire {

constexpr int64_t kBlockKeys = kLanes;

// The unnormalised rows of a task: R sums of width V, padded to whole pairs, R maxima, R denominators.
struct Rows {
  float *sums, *maxima, *totals;
  int64_t padded;  // width of a row of sums
  Rows(float* memory, int64_t rows, int64_t width)
      : sums(memory), padded((width + kPair - 1) / kPair * kPair) {
    maxima = sums + rows * padded;
    totals = maxima + rows;
  }
  static int64_t size(int64_t rows, int64_t width) {
    return rows * ((width + kPair - 1) / kPair * kPair + 2);
  }
};

// The keys and values of a block. If several passes read them, they are copied to contiguous memory first: in their
// page the distance between them is a power of two, so that the cache could not hold them all.
template <typename T>
struct Block {
  const T *keys[kBlockKeys], *values[kBlockKeys];

  void copy_to(T* memory, int64_t width, int64_t value_width) {
    memory = copy_rows(keys, memory, width);
    copy_rows(values, memory, value_width);
  }

  static T* copy_rows(const T* (&rows)[kBlockKeys], T* memory, int64_t width) {
    for (const T*& row : rows) {
      std::memcpy(memory, row, width * sizeof(T));
      row = memory;
      memory += width;
    }
    return memory;
  }
};

// The scores of a block and `kRows` rows, for half the keys at a time, so that the sums stay in registers.
template <int kRows, typename T>
inline void block_scores(Floats (&scores)[kRows], const T* const (&queries)[kRows], const Block<T>& block,
                         int64_t width) {
  Floats sums[kRows][kLanes];
#pragma GCC unroll 2
  for (int half = 0; half < kLanes; half += kLanes / 2) {
    const T* const* keys = block.keys + half;
    Floats part[kRows][kLanes / 2] = {};
    auto add = [&](int64_t d, int count) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < kLanes / 2; i++)
#pragma GCC unroll 2
        for (int r = 0; r < kRows; r++) part[r][i] = dot(part[r][i], keys[i] + d, queries[r] + d, count);
    };
    int64_t d = 0;
    for (; d + kPair <= width; d += kPair) add(d, kPair);
    if (d < width) add(d, kLanes);
    for (int r = 0; r < kRows; r++)
      for (int i = 0; i < kLanes / 2; i++) sums[r][half + i] = part[r][i];
  }
  for (int r = 0; r < kRows; r++) scores[r] = sum_each(sums[r]);
}

// sums[r] += weights[r][i] * values[i], for `kRows` rows, columns d up to `count` of `kPairs` pairs.
template <int kRows, int kPairs, typename T>
inline void add_columns(float* sums, int64_t padded, const float* weights, const T* const (&values)[kBlockKeys],
                        int64_t d, int count) {
  Floats total[kRows][2 * kPairs];
  for (int r = 0; r < kRows; r++)
    for (int j = 0; j < 2 * kPairs; j++) total[r][j] = load<Floats>(sums + r * padded + d + j * kLanes);
#pragma GCC unroll 4
  for (int i = 0; i < kBlockKeys; i++)
#pragma GCC unroll 2
    for (int j = 0; j < kPairs; j++) {
      Pair value = load_pair(values[i] + d + j * kPair, count);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        Floats weight = splat(weights[r * kBlockKeys + i]);
        total[r][2 * j] += weight * value.first;
        total[r][2 * j + 1] += weight * value.second;
      }
    }
  for (int r = 0; r < kRows; r++)
    for (int j = 0; j < 2 * kPairs; j++) std::memcpy(sums + r * padded + d + j * kLanes, &total[r][j], 64);
}

template <int kRows, typename T>
inline void add_values(float* sums, int64_t padded, const float* weights, const T* const (&values)[kBlockKeys],
                       int64_t width) {
  int64_t d = 0;
  for (; d + 2 * kPair <= width; d += 2 * kPair)
    add_columns<kRows, 2>(sums, padded, weights, values, d, kPair);
  if (d + kPair <= width) {
    add_columns<kRows, 1>(sums, padded, weights, values, d, kPair);
    d += kPair;
  }
  if (d < width) add_columns<kRows, 1>(sums, padded, weights, values, d, kLanes);
}

// Turn the scores of a block into weights relative to the row's running maximum, which is updated.
inline Floats block_weights(Floats scores, const Rows& rows, int64_t row) {
  float before = rows.maxima[row];
  float highest = std::max(before, reduce(scores, larger));
  if (highest == kHidden) return Floats{};  // nothing visible yet: there is no maximum to subtract
  Floats weights = power_of_two(scores - highest);
  float sum = reduce(weights, [](Floats a, Floats b) { return a + b; });
  if (highest > before) {
    float shrink = std::exp2(before - highest);  // 0 for the first visible block
    float* sums = rows.sums + row * rows.padded;
    for (int64_t d = 0; d < rows.padded; d++) sums[d] *= shrink;
    rows.totals[row] *= shrink;
    rows.maxima[row] = highest;
  }
  rows.totals[row] += sum;
  return weights;
}

// Merge the rows of a later chunk into those of the first.
inline void merge_rows(const Rows& into, const Rows& from, int64_t num_rows) {
  for (int64_t row = 0; row < num_rows; row++) {
    const float highest = std::max(into.maxima[row], from.maxima[row]);
    if (highest == kHidden) continue;
    const float mine = std::exp2(into.maxima[row] - highest), theirs = std::exp2(from.maxima[row] - highest);
    for (int64_t d = row * into.padded; d < (row + 1) * into.padded; d++)
      into.sums[d] = into.sums[d] * mine + from.sums[d] * theirs;
    into.totals[row] = into.totals[row] * mine + from.totals[row] * theirs;
    into.maxima[row] = highest;
  }
}

}  // namespace quire
