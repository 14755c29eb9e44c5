// x W^T + b for a few rows, from a weight in the layout of kernels/cpu/linear.py. Each byte of the weight is read
// once, in order, which is all that a product of few rows is: as fast as memory.
//
// An output is summed over the inputs in order, in pairs, whatever rows are beside it: the bits of a row do not
// depend on the others, nor on the number of threads.

#include <algorithm>

#include "threads.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

namespace quire {
namespace {

constexpr int64_t kBlockOutputs = 64;
constexpr int kVectors = kBlockOutputs / kLanes;
// Rows whose sums fit the registers beside a pair of inputs of a block.
constexpr int64_t kTileRows = 6;
constexpr int64_t kMostRows = 8;  // MOST_ROWS of linear.py
// Inputs, in pairs, that several tiles of rows go through in turn: 8 kB of the weight stay in the first cache.
constexpr int64_t kChunkPairs = 32;

// Plain data, filled by kernels/cpu/linear.py: the fields must agree. Strides are in elements.
struct Arguments {
  Bf16* out;           // [T, O] contiguous
  const Bf16* x;       // [T, I]
  const Bf16* weight;  // [O / 64, I_padded / 2, 64, 2], the last blocks filled up
  const Bf16* bias;    // [O], or null
  int64_t rows, inputs, outputs, padded_inputs, x_stride, threads;
};

// Two inputs of each of 16 outputs, or two inputs of a row for all of them.
inline __m512bh weights_at(const Bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh inputs_at(const Bf16* from) {
  int32_t both;
  std::memcpy(&both, from, sizeof(both));
  return (__m512bh)_mm512_set1_epi32(both);
}

// Adds the products of some pairs of inputs to sums[row][64], for `kRows` rows.
template <int kRows>
void add_products(float* sums, const Bf16* weight, const Bf16* x, int64_t x_stride, int64_t pairs) {
  __m512 totals[kRows][kVectors];
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVectors; v++) totals[row][v] = _mm512_loadu_ps(sums + row * kBlockOutputs + v * kLanes);
  for (int64_t pair = 0; pair < pairs; pair++) {
    __m512bh weights[kVectors];
    for (int v = 0; v < kVectors; v++) weights[v] = weights_at(weight + pair * 2 * kBlockOutputs + v * kPair);
    for (int row = 0; row < kRows; row++) {
      const __m512bh inputs = inputs_at(x + row * x_stride + 2 * pair);
      for (int v = 0; v < kVectors; v++) totals[row][v] = _mm512_dpbf16_ps(totals[row][v], weights[v], inputs);
    }
  }
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVectors; v++) _mm512_storeu_ps(sums + row * kBlockOutputs + v * kLanes, totals[row][v]);
}

using AddProducts = void (*)(float*, const Bf16*, const Bf16*, int64_t, int64_t);
constexpr AddProducts kAddProducts[kTileRows] = {add_products<1>, add_products<2>, add_products<3>,
                                                 add_products<4>, add_products<5>, add_products<6>};

void multiply_block(const Arguments& a, int64_t block, int64_t rows_per_tile) {
  float sums[kMostRows * kBlockOutputs] = {};
  const Bf16* weight = a.weight + block * kBlockOutputs * a.padded_inputs;
  const int64_t pairs = a.inputs / 2, chunk = rows_per_tile == a.rows ? pairs : kChunkPairs;
  for (int64_t pair = 0; pair < pairs; pair += chunk)
    for (int64_t row = 0; row < a.rows; row += rows_per_tile)
      kAddProducts[std::min(rows_per_tile, a.rows - row) - 1](
          sums + row * kBlockOutputs, weight + pair * 2 * kBlockOutputs, a.x + row * a.x_stride + 2 * pair, a.x_stride,
          std::min(chunk, pairs - pair));
  const int64_t first = block * kBlockOutputs;
  for (int64_t row = 0; row < a.rows; row++)
    for_lanes(std::min(kBlockOutputs, a.outputs - first), [&](int64_t o, int count) {
      Floats total = load<Floats>(sums + row * kBlockOutputs + o);
      if (a.bias != nullptr) total += load_lanes(a.bias + first + o, count);
      store_lanes(a.out + row * a.outputs + first + o, total, count);
    });
}

}  // namespace
}  // namespace quire

extern "C" void quire_linear_bf16(const void* arguments) {
  using namespace quire;
  const Arguments& a = *static_cast<const Arguments*>(arguments);
  const int64_t blocks = (a.outputs + kBlockOutputs - 1) / kBlockOutputs;
  const int64_t tiles = (a.rows + kTileRows - 1) / kTileRows, rows_per_tile = (a.rows + tiles - 1) / tiles;
#pragma omp parallel for schedule(static) num_threads(threads_for(a.outputs * a.inputs * 2, a.threads))
  for (int64_t block = 0; block < blocks; block++) multiply_block(a, block, rows_per_tile);
}

#endif
