// The products of attention with the tiles of AMX, for bfloat16.
//
// 16 rows are multiplied, however many there are: it is still faster than memory. The order of a sum is that of the
// instruction, as amx_product.cpp describes it: queries and keys in groups of 32 inputs, the last of which may be 16;
// weights and values in groups of 16 positions.
#pragma once

#include "amx_tiles.h"
#include "attention_product.h"

namespace quire {

template <>
constexpr int kProductRows<Bf16> = 16;
template <>
constexpr bool kFillsUpRows<Bf16> = true;

// Tiles are configured while it exists: 0 to 3 are sums; 4 and 6 are rows and weights of 32 inputs, 5 and 7 those of 16.
template <>
struct ProductScope<Bf16> {
  ProductScope() {
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
      config.row_bytes[tile] = tile == 5 ? 32 : 64;
      config.rows[tile] = tile == 7 ? 8 : 16;
    }
    configure_tiles(config);
  }
  ~ProductScope() { _tile_release(); }
};

// The products of 32 inputs of a key, from `at` on, and of 16. GCC wants tiles as literal numbers.
inline void add_key_products(const Bf16* queries, int64_t row_bytes, const Block<Bf16>& block, int64_t at) {
  _tile_loadd(4, queries, row_bytes);
  _tile_loadd(6, block.keys[0] + at, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(6, block.keys[1] + at, 64);
  _tile_dpbf16ps(1, 4, 6);
  _tile_loadd(6, block.keys[2] + at, 64);
  _tile_dpbf16ps(2, 4, 6);
  _tile_loadd(6, block.keys[3] + at, 64);
  _tile_dpbf16ps(3, 4, 6);
}
inline void add_half_key_products(const Bf16* queries, int64_t row_bytes, const Block<Bf16>& block, int64_t at) {
  _tile_loadd(5, queries, row_bytes);
  _tile_loadd(7, block.keys[0] + at, 64);
  _tile_dpbf16ps(0, 5, 7);
  _tile_loadd(7, block.keys[1] + at, 64);
  _tile_dpbf16ps(1, 5, 7);
  _tile_loadd(7, block.keys[2] + at, 64);
  _tile_dpbf16ps(2, 5, 7);
  _tile_loadd(7, block.keys[3] + at, 64);
  _tile_dpbf16ps(3, 5, 7);
}

// Products of parts that the context does not have are of no meaning.
template <>
inline void multiply_keys<Bf16, 16>(float* products, const Bf16* queries, int64_t width, const Block<Bf16>& block) {
  float sums[16 * kBlockKeys];
  finish_memory_accesses();
  for (int64_t first = 0; first < width; first += kSummedInputs) {
    const int64_t end = std::min(first + kSummedInputs, width);
    float* to = first == 0 ? products : sums;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t input = first;
    for (; input + 32 <= end; input += 32)
      add_key_products(queries + input, width * sizeof(Bf16), block, input * kPartPositions);
    if (input < end) add_half_key_products(queries + input, width * sizeof(Bf16), block, input * kPartPositions);
    constexpr int64_t kRowBytes = kBlockKeys * sizeof(float);
    _tile_stored(0, to, kRowBytes);
    _tile_stored(1, to + kPartPositions, kRowBytes);
    _tile_stored(2, to + 2 * kPartPositions, kRowBytes);
    _tile_stored(3, to + 3 * kPartPositions, kRowBytes);
    finish_memory_accesses();
    if (to == sums)
      for (int i = 0; i < 16 * kBlockKeys; i++) products[i] += sums[i];
    finish_memory_accesses();
  }
}

template <>
inline void add_values<Bf16, 16>(float* sums, const Bf16* weights, int64_t width, const Block<Bf16>& block,
                                 const Block<Bf16>& /*next: tiles are loaded well ahead of their use*/) {
  const int64_t row_bytes = width * sizeof(float);
  constexpr int64_t kWeightRowBytes = kBlockKeys * sizeof(Bf16), kSize = kBlockOutputs * kPartPositions;
  finish_memory_accesses();
  int64_t first = 0;
  for (; first + 4 * kBlockOutputs <= width; first += 4 * kBlockOutputs) {
    float* to = sums + first;
    _tile_loadd(0, to, row_bytes);
    _tile_loadd(1, to + kBlockOutputs, row_bytes);
    _tile_loadd(2, to + 2 * kBlockOutputs, row_bytes);
    _tile_loadd(3, to + 3 * kBlockOutputs, row_bytes);
    for (int64_t part = 0; part < block.parts; part++) {
      const Bf16* values = block.values[part] + first * kPartPositions;
      _tile_loadd(5, weights + part * kPartPositions, kWeightRowBytes);
      _tile_loadd(7, values, 64);
      _tile_dpbf16ps(0, 5, 7);
      _tile_loadd(7, values + kSize, 64);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(7, values + 2 * kSize, 64);
      _tile_dpbf16ps(2, 5, 7);
      _tile_loadd(7, values + 3 * kSize, 64);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, row_bytes);
    _tile_stored(1, to + kBlockOutputs, row_bytes);
    _tile_stored(2, to + 2 * kBlockOutputs, row_bytes);
    _tile_stored(3, to + 3 * kBlockOutputs, row_bytes);
  }
  for (; first < width; first += kBlockOutputs) {
    _tile_loadd(0, sums + first, row_bytes);
    for (int64_t part = 0; part < block.parts; part++) {
      _tile_loadd(5, weights + part * kPartPositions, kWeightRowBytes);
      _tile_loadd(7, block.values[part] + first * kPartPositions, 64);
      _tile_dpbf16ps(0, 5, 7);
    }
    _tile_stored(0, sums + first, row_bytes);
  }
  finish_memory_accesses();
}

}  // namespace quire
