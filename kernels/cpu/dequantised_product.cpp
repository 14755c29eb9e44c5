// Products of rows that are not rounded and quantised weights: see dequantised_product.h.

#include "dequantised_product.h"

#include <algorithm>

#include "group_chunk.h"
#include "product_tile.h"

namespace quire {
namespace {

// The blocks that are multiplied side by side: a few rows need as many sums, and memory is faster at several places.
constexpr int64_t kBesideBlocks = 4, kStride = kBesideBlocks * kBlockOutputs;
constexpr int64_t kChunkInputs = kChunkGroups * kGroupInputs, kTileRows = Product<float>::kTileRows;
// A line between chunks: otherwise these would be in the same places of the cache.
constexpr int64_t kChunkFloats = (kChunkInputs + 1) * kBlockOutputs;

// A tile of rows in float32.
template <typename T>
struct Tile {
  const float* rows[kTileRows];
  float copies[kTileRows][kChunkInputs];

  Tile(const InputOf<T>* const* from, int64_t count, int64_t input, int64_t inputs) {
    for (int64_t r = 0; r < count; r++) {
      if constexpr (std::is_same_v<InputOf<T>, float>) {
        rows[r] = from[r] + input;
      } else {
        for_lanes(inputs, [&](int64_t i, int lanes) {
          store_lanes(copies[r] + i, load_lanes(from[r] + input + i, lanes), lanes);
        });
        rows[r] = copies[r];
      }
    }
  }
};

// The results of some rows and up to kBesideBlocks blocks from `block` on.
template <typename T>
__attribute__((noinline)) void multiply_rows(const Products<T>& all, const uint8_t* weight, const GroupFormat& format,
                                             int64_t first_row, int64_t count, int64_t block, int64_t blocks) {
  alignas(64) float sums[kPassRows * kStride], values[kBesideBlocks * kChunkFloats];
  const int64_t groups = groups_of(all.inputs), block_bytes = format.block_bytes(groups);
  const int64_t tiles = (count + kTileRows - 1) / kTileRows;
  const uint8_t* chunk = weight + block * block_bytes;
  std::fill_n(sums, count * kStride, 0.0f);
  for (int64_t group = 0; group < groups; group += kChunkGroups) {
    const int64_t taken = std::min(kChunkGroups, groups - group), input = group * kGroupInputs;
    const int64_t inputs = std::min(kChunkInputs, all.inputs - input);
    for (int64_t b = 0; b < blocks; b++) dequantise(values + b * kChunkFloats, format, chunk + b * block_bytes, taken);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = count * tile / tiles, number = count * (tile + 1) / tiles - row;
      const Tile<T> from(all.rows + first_row + row, number, input, inputs);
      add_tile<float>(sums + row * kStride, kStride, values, kChunkFloats, blocks, from.rows, number, inputs, {});
    }
    chunk += format.chunk_bytes(taken);
  }
  for (int64_t row = 0; row < count; row++) write_results(all, first_row + row, block, blocks, sums + row * kStride);
}

}  // namespace

template <typename T>
void multiply_dequantised(const Products<T>& all, const void* weight, const GroupFormat& format, int64_t begin, int64_t end) {
  const uint8_t* from = static_cast<const uint8_t*>(weight);
  for (int64_t row = 0; row < all.count; row += kPassRows)
    for (int64_t block = begin; block < end; block += kBesideBlocks)
      multiply_rows(all, from, format, row, std::min(kPassRows, all.count - row), block, std::min(kBesideBlocks, end - block));
}

template void multiply_dequantised(const Products<Bf16>&, const void*, const GroupFormat&, int64_t, int64_t);
template void multiply_dequantised(const Products<float>&, const void*, const GroupFormat&, int64_t, int64_t);

}  // namespace quire
