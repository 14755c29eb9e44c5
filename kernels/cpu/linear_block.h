// The products of a few rows and a block of outputs of a weight in the layout of kernels/cpu/linear.py. Each byte of
// the weight is read once and in order, so the speed is that of the memory.
//
// An output is summed over pairs of inputs in order, independent of the other rows.
#pragma once

#include <algorithm>

#include "vectors.h"

#if defined(__AVX512BF16__)

namespace quire {

constexpr int64_t kBlockOutputs = 64;
constexpr int kVectors = kBlockOutputs / kLanes;
// The number of rows whose sums fit into registers together with a pair of inputs of a block.
constexpr int64_t kTileRows = 6;
// The pairs of inputs that all tiles of rows process before the next ones: 8 kB of the weight, which stay in L1.
constexpr int64_t kChunkPairs = 32;

inline int64_t blocks_of(int64_t outputs) { return (outputs + kBlockOutputs - 1) / kBlockOutputs; }

// Two inputs of each of 16 outputs, or two inputs of a row, repeated.
inline __m512bh weights_at(const Bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh inputs_at(const Bf16* from) {
  int32_t both;
  std::memcpy(&both, from, sizeof(both));
  return (__m512bh)_mm512_set1_epi32(both);
}

// Adds the products of some pairs of inputs, starting at `begin`, to sums[row][64], for `kRows` rows.
template <int kRows>
void add_products(float* sums, const Bf16* weight, const Bf16* const* rows, int64_t begin, int64_t end) {
  __m512 totals[kRows][kVectors];
  const Bf16* from[kRows];
  for (int row = 0; row < kRows; row++) {
    from[row] = rows[row];
    for (int v = 0; v < kVectors; v++) totals[row][v] = _mm512_loadu_ps(sums + row * kBlockOutputs + v * kLanes);
  }
  for (int64_t pair = begin; pair < end; pair++) {
    __m512bh weights[kVectors];
    for (int v = 0; v < kVectors; v++) weights[v] = weights_at(weight + pair * 2 * kBlockOutputs + v * kPair);
    for (int row = 0; row < kRows; row++) {
      const __m512bh inputs = inputs_at(from[row] + 2 * pair);
      for (int v = 0; v < kVectors; v++) totals[row][v] = _mm512_dpbf16_ps(totals[row][v], weights[v], inputs);
    }
  }
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVectors; v++) _mm512_storeu_ps(sums + row * kBlockOutputs + v * kLanes, totals[row][v]);
}

using AddProducts = void (*)(float*, const Bf16*, const Bf16* const*, int64_t, int64_t);
constexpr AddProducts kAddProducts[kTileRows] = {add_products<1>, add_products<2>, add_products<3>,
                                                 add_products<4>, add_products<5>, add_products<6>};

// The sums [count][64] of a block, whose weight is at `weight`. `rows` has the address of each of `count` rows.
inline void multiply_block(float* sums, const Bf16* weight, const Bf16* const* rows, int64_t count, int64_t pairs) {
  std::fill_n(sums, count * kBlockOutputs, 0.0f);
  const int64_t tiles = (count + kTileRows - 1) / kTileRows, tile = (count + tiles - 1) / tiles;
  const int64_t chunk = tiles == 1 ? pairs : kChunkPairs;
  for (int64_t pair = 0; pair < pairs; pair += chunk)
    for (int64_t row = 0; row < count; row += tile)
      kAddProducts[std::min(tile, count - row) - 1](sums + row * kBlockOutputs, weight, rows + row, pair,
                                                    std::min(pair + chunk, pairs));
}

}  // namespace quire

#endif
