// The two products of attention: of queries and keys, and of weights and values. See attention.cpp and kv_pages.h.
#pragma once

#include <algorithm>

#include "kv_pages.h"
#include "product_tile.h"

namespace quire {

constexpr int64_t kBlockKeys = 64;
constexpr int64_t kBlockParts = kBlockKeys / kPartPositions;
// The inputs of a key whose products are summed one after the other: long sums lose more than those of their parts.
constexpr int64_t kSummedInputs = 128;

// The parts of 64 positions of a head that the context has. Those behind them are the last one again.
template <typename T>
struct Block {
  const T *keys[kBlockParts], *values[kBlockParts];
  int64_t index, parts;
  // Of pages of 8 bits the scales of the 64 positions, else null.
  const float *key_scales = nullptr, *value_scales = nullptr;
};

// How many rows are multiplied at a time, with all sums in registers, and whether fewer are multiplied as if they were
// as many.
template <typename T>
constexpr int kProductRows = Product<T>::kTileRows;
template <typename T>
constexpr bool kFillsUpRows = false;

// What a thread needs while it multiplies: nothing.
template <typename T>
struct ProductScope {};

// Loads what is at an address into the cache, a line for each that is multiplied. The CPU does not do it by itself, since
// parts are not next to each other.
template <typename T>
Ahead prefetch_from(const T* address) {
  return {reinterpret_cast<const char*>(address), 64};
}

// products[r] = the products of queries[r] and the keys of a block, [kRows, D] and [kRows, 64]. The block's values are
// loaded meanwhile.
template <typename T, int kRows>
void multiply_keys(float* products, const InputOf<T>* queries, int64_t width, const Block<T>& block) {
  std::fill_n(products, kRows * kBlockKeys, 0.0f);
  for (int64_t first = 0; first < width; first += kSummedInputs) {
    float sums[kRows * kBlockKeys] = {};
    const InputOf<T>* rows[kRows];
    for (int r = 0; r < kRows; r++) rows[r] = queries + r * width + first;
    for (int64_t part = 0; part < block.parts; part++)
      add_blocks<T, kRows>(sums + part * kPartPositions, kBlockKeys, block.keys[part] + first * kPartPositions, 0, 1, rows,
                           std::min(kSummedInputs, width - first), prefetch_from(block.values[part] + first * kPartPositions));
    for (int i = 0; i < kRows * kBlockKeys; i++) products[i] += sums[i];
  }
}

// sums[r] += the products of weights[r] and the values of a block, [kRows, 64] and [kRows, V]. The keys of the next block
// are loaded meanwhile.
template <typename T, int kRows>
void add_values(float* sums, const InputOf<T>* weights, int64_t width, const Block<T>& block, const Block<T>& next) {
  const auto add = [&](auto blocks, int64_t first) {
    constexpr int kColumns = blocks() * kVectors, kLane = sizeof(Vector) / sizeof(float);
    Vector tile[kRows][kColumns];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; c++) tile[r][c] = load<Vector>(sums + r * width + first + c * kLane);
    for (int64_t part = 0; part < block.parts; part++) {
      const InputOf<T>* rows[kRows];
      for (int r = 0; r < kRows; r++) rows[r] = weights + r * kBlockKeys + part * kPartPositions;
      add_products<T, kRows, blocks()>(tile, block.values[part] + first * kPartPositions, kBlockOutputs * kPartPositions,
                                       rows, kPartPositions, prefetch_from(next.keys[part] + first * kPartPositions));
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; c++) std::memcpy(sums + r * width + first + c * kLane, &tile[r][c], sizeof(Vector));
  };
  constexpr int kWidth = blocks_beside<T>(kRows);
  int64_t first = 0;
  for (; first + kWidth * kBlockOutputs <= width; first += kWidth * kBlockOutputs)
    add(std::integral_constant<int, kWidth>(), first);
  for (; first < width; first += kBlockOutputs) add(std::integral_constant<int, 1>(), first);
}

}  // namespace quire
