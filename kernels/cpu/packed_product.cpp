// Divides products into tiles: see packed_product.h.

#include <algorithm>

#include "product_tile.h"

namespace quire {
namespace {

// The rows whose sums are kept while the weights of some blocks are read.
constexpr int64_t kChunkRows = 256;
// The weights of a panel, which stay in L1 while tiles of rows pass.
constexpr int64_t kPanelBytes = 16 << 10;

template <typename Weight, int kRows = Product<Weight>::kTileRows>
void add_tile(float* sums, int64_t stride, const Weight* weight, int64_t block_size, int64_t blocks,
              const InputOf<Weight>* const* rows, int64_t count, int64_t inputs, Ahead ahead) {
  if constexpr (kRows > 1)
    if (count < kRows)
      return add_tile<Weight, kRows - 1>(sums, stride, weight, block_size, blocks, rows, count, inputs, ahead);
  add_blocks<Weight, kRows>(sums, stride, weight, block_size, blocks, rows, inputs, ahead);
}

}  // namespace

template <typename Weight>
void Products<Weight>::multiply_blocks(int64_t begin, int64_t end) const {
  using P = Product<Weight>;
  constexpr int64_t kMostBlocks = 4;
  alignas(64) float sums[kChunkRows * kMostBlocks * kBlockOutputs];
  const int64_t block_size = block_size_of<Weight>(inputs);
  for (int64_t first = 0; first < count; first += kChunkRows) {
    const int64_t chunk = std::min(kChunkRows, count - first), tiles = (chunk + P::kTileRows - 1) / P::kTileRows;
    const int64_t width = blocks_beside<Weight>((chunk + tiles - 1) / tiles);
    const int64_t panel = kPanelBytes / (width * kBlockOutputs * int64_t(sizeof(Weight)));
    for (int64_t block = begin; block < end; block += width) {
      const int64_t blocks = std::min(width, end - block), stride = blocks * kBlockOutputs;
      std::fill_n(sums, chunk * stride, 0.0f);
      const InputOf<Weight>* from[kChunkRows];
      for (int64_t input = 0; input < inputs; input += panel) {
        for (int64_t row = 0; row < chunk; row++) from[row] = rows[first + row] + input;
        const Weight* weights = weight + block * block_size + input * kBlockOutputs;
        // Each tile loads a part of the next panel.
        const int64_t step = P::kStepInputs * kBlockOutputs * sizeof(Weight), ahead = step / tiles;
        const int64_t here = std::min(panel, inputs - input);
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t row = chunk * tile / tiles;
          const char* next = reinterpret_cast<const char*>(weights + panel * kBlockOutputs) + panel / P::kStepInputs * tile * ahead;
          add_tile(sums + row * stride, stride, weights, block_size, blocks, from + row,
                   chunk * (tile + 1) / tiles - row, here, {next, ahead});
        }
      }
      for (int64_t row = 0; row < chunk; row++)
        for (int64_t b = 0; b < blocks; b++) {
          const int64_t output = (block + b) * kBlockOutputs;
          const int lanes = static_cast<int>(std::min(kBlockOutputs, outputs - output));
          Floats sum = load<Floats>(sums + row * stride + b * kBlockOutputs);
          if (bias != nullptr) sum += load_lanes(bias + output, lanes);
          store_lanes(results[first + row] + output, sum, lanes);
        }
    }
  }
}

template struct Products<Bf16>;
template struct Products<float>;

}  // namespace quire
