// Divides products into tiles: see packed_product.h.

#include <algorithm>

#include "denormals.h"
#include "product_tile.h"

namespace quire {
namespace {

// A panel of weights: the inputs of some blocks that stay in the cache, while one tile of rows after the other is
// multiplied. Between panels, sums are in memory.
constexpr int64_t kPanelBytes = 32 << 10;
// A single tile waits for memory, which is faster at several places at once: in these blocks, by turns.
constexpr int64_t kSingleTileBlocks = 4, kTurnBytes = 4 << 10;

template <typename Weight>
constexpr int64_t kMostSums =
    std::max(kPassRows * Product<Weight>::kTileBlocks, Product<Weight>::kTileRows* kSingleTileBlocks) * kBlockOutputs;

// The results of the rows first..first + count and the blocks begin..end.
template <typename Weight>
__attribute__((noinline)) void multiply_rows(const Products<Weight>& products, int64_t first, int64_t count, int64_t begin, int64_t end) {
  using P = Product<Weight>;
  alignas(64) float sums[kMostSums<Weight>];
  const InputOf<Weight>* rows[kPassRows];
  const int64_t block_size = block_size_of<Weight>(products.inputs);
  const int64_t tiles = (count + P::kTileRows - 1) / P::kTileRows;
  const int64_t width = tiles == 1 ? kSingleTileBlocks : P::kTileBlocks;
  const int64_t input_bytes = kBlockOutputs * sizeof(Weight);
  // A tile of all these blocks reads them side by side, as fast as memory is.
  const bool whole = tiles == 1 && blocks_beside<Weight>(count) == width;
  const bool small_blocks = tiles == 1 && are_small<Weight>(products.inputs);
  const int64_t panel = whole ? products.inputs : (tiles == 1 ? kTurnBytes : kPanelBytes / width) / input_bytes;
  for (int64_t block = begin; block < end; block += width) {
    const int64_t blocks = std::min(width, end - block), stride = blocks * kBlockOutputs;
    std::fill_n(sums, count * stride, 0.0f);
    for (int64_t input = 0; input < products.inputs; input += panel) {
      for (int64_t row = 0; row < count; row++) rows[row] = products.rows[first + row] + input;
      const Weight* weight = products.weight + block * block_size + input * kBlockOutputs;
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = count * tile / tiles, next_row = count * (tile + 1) / tiles;
        const char* here = reinterpret_cast<const char*>(weight);
        const Ahead ahead = small_blocks ? Ahead{here + kAheadBytes, P::kStepInputs * input_bytes}
                            : whole      ? Ahead{}
                                         : Ahead{here + (panel + panel * tile / tiles) * input_bytes,
                                                 P::kStepInputs * input_bytes / tiles};
        add_tile(sums + row * stride, stride, weight, block_size, blocks, rows + row, next_row - row,
                 std::min(panel, products.inputs - input), ahead);
      }
    }
    for (int64_t row = 0; row < count; row++) write_results(products, first + row, block, blocks, sums + row * stride);
  }
}

}  // namespace

template <typename Weight>
void Products<Weight>::multiply_blocks(int64_t begin, int64_t end) const {
  const DenormalsOf<Weight> mode;
  for (int64_t row = 0; row < count; row += kPassRows)
    multiply_rows(*this, row, std::min(kPassRows, count - row), begin, end);
}

template struct Products<Bf16>;
template struct Products<float>;

}  // namespace quire
