// Divides products into tiles: see packed_product.h.

#include <algorithm>

#include "product_tile.h"

namespace quire {
namespace {

// Not inlined: it is called once for each sum of a tile.
template <typename Weight>
__attribute__((noinline)) void write(const Products<Weight>& products, int64_t row, int64_t block, Floats sums) {
  const int64_t output = block * kBlockOutputs;
  const int lanes = static_cast<int>(std::min(kBlockOutputs, products.outputs - output));
  if (products.bias != nullptr) sums += load_lanes(products.bias + output, lanes);
  store_lanes(products.results[row] + output, sums, lanes);
}

// The results of a tile of kRows rows and kBlocks blocks, the first of which is `block`.
template <typename Weight, int kRows, int kBlocks>
void multiply_tile(const Products<Weight>& products, int64_t row, int64_t block) {
  Sums sums[kRows][kBlocks];
  for (int r = 0; r < kRows; r++)
    for (int b = 0; b < kBlocks; b++) sums[r][b] = zero_sums();
  const int64_t block_size = block_size_of<Weight>(products.inputs);
  add_products(sums, products.weight + block * block_size, block_size, products.rows + row, products.inputs);
  for (int r = 0; r < kRows; r++)
    for (int b = 0; b < kBlocks; b++) write(products, row + r, block + b, lanes_of(sums[r][b]));
}

template <typename Weight, int kBlocks, int kRows = Product<Weight>::kTileRows>
void multiply_rows(const Products<Weight>& products, int64_t row, int64_t count, int64_t block) {
  if constexpr (kRows > 1)
    if (count < kRows) return multiply_rows<Weight, kBlocks, kRows - 1>(products, row, count, block);
  if constexpr (kBlocks <= blocks_beside<Weight>(kRows)) multiply_tile<Weight, kRows, kBlocks>(products, row, block);
}

}  // namespace

template <typename Weight>
void Products<Weight>::multiply_blocks(int64_t begin, int64_t end) const {
  if (count == 0) return;
  constexpr int64_t kMost = Product<Weight>::kTileRows;
  const int64_t tiles = (count + kMost - 1) / kMost, tile = (count + tiles - 1) / tiles;
  for (int64_t block = begin, width = blocks_beside<Weight>(tile); block < end; block += width) {
    while (width > end - block) width /= 2;
    // Tiles of rows are the inner loop, so that the weights of these blocks are read from memory once.
    for (int64_t row = 0; row < count; row += tile) {
      const int64_t rows_here = std::min(tile, count - row);
      if (width == 4) multiply_rows<Weight, 4>(*this, row, rows_here, block);
      else if (width == 2) multiply_rows<Weight, 2>(*this, row, rows_here, block);
      else multiply_rows<Weight, 1>(*this, row, rows_here, block);
    }
  }
}

template struct Products<Bf16>;
template struct Products<float>;

}  // namespace quire
