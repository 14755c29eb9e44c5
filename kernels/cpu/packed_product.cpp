// How instruction sets multiply: see packed_product.h.

#include "packed_product.h"

#include <immintrin.h>

#include <algorithm>

namespace quire {
namespace {

// A sum for each output of a block.
#if defined(__AVX512F__)
struct Sums {
  __m512 all;
};
inline Sums zero_sums() { return {_mm512_setzero_ps()}; }
inline Sums broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Sums load_sums(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void add_product(Sums& sums, Sums a, Sums b) { sums.all = _mm512_fmadd_ps(a.all, b.all, sums.all); }
inline Floats lanes_of(Sums sums) { return (Floats)sums.all; }
#else
struct Sums {
  __m256 low, high;
};
inline Sums zero_sums() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Sums broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Sums load_sums(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void add_product(Sums& sums, Sums a, Sums b) {
  sums.low = _mm256_fmadd_ps(a.low, b.low, sums.low);
  sums.high = _mm256_fmadd_ps(a.high, b.high, sums.high);
}
inline Floats lanes_of(Sums sums) {
  Floats lanes;
  std::memcpy(&lanes, &sums, sizeof(lanes));
  return lanes;
}
#endif

// How an instruction set multiplies weights of a type. A step is one vector of a block's weights: `kStepInputs` inputs
// of each output. Registers hold `kTileRows` x `kTileBlocks` sums beside a step's weights.
template <typename Weight>
struct Product;

template <>
struct Product<float> {
  using Step = Sums;
  static constexpr int kStepInputs = 1;
#if defined(__AVX512F__)
  static constexpr int kTileRows = 6, kTileBlocks = 4;
#else
  static constexpr int kTileRows = 5, kTileBlocks = 1;
#endif
  static Step weights_at(const float* from) { return load_sums(from); }
  static void add(Sums& sums, Step weights, const float* row) { add_product(sums, weights, broadcast(*row)); }
};

#if defined(__AVX512BF16__)

template <>
struct Product<Bf16> {
  using Step = __m512bh;
  static constexpr int kStepInputs = 2;
  static constexpr int kTileRows = 6, kTileBlocks = 4;
  static Step weights_at(const Bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static void add(Sums& sums, Step weights, const Bf16* row) {
    int32_t both;
    std::memcpy(&both, row, sizeof(both));
    sums.all = _mm512_dpbf16_ps(sums.all, weights, (__m512bh)_mm512_set1_epi32(both));
  }
};

#else

// Without instructions for bfloat16: the two inputs of each output become two floats.
template <>
struct Product<Bf16> {
  struct Step {
    Sums even, odd;
  };
  static constexpr int kStepInputs = 2;
#if defined(__AVX512F__)
  static constexpr int kTileRows = 5, kTileBlocks = 4;
  static Step weights_at(const Bf16* from) {
    const __m512i both = _mm512_loadu_si512(from), odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))}, {_mm512_castsi512_ps(_mm512_and_si512(both, odd))}};
  }
#else
  static constexpr int kTileRows = 4, kTileBlocks = 1;
  static Step weights_at(const Bf16* from) {
    const __m256i* at = reinterpret_cast<const __m256i*>(from);
    const __m256i low = _mm256_loadu_si256(at), high = _mm256_loadu_si256(at + 1);
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(low, odd)), _mm256_castsi256_ps(_mm256_and_si256(high, odd))}};
  }
#endif
  static void add(Sums& sums, const Step& weights, const float* row) {
    add_product(sums, weights.even, broadcast(row[0]));
    add_product(sums, weights.odd, broadcast(row[1]));
  }
};

#endif

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
  using P = Product<Weight>;
  const int64_t block_size = block_size_of<Weight>(products.inputs);
  const Weight* weight = products.weight + block * block_size;
  const InputOf<Weight>* from[kRows];
  Sums sums[kRows][kBlocks];
  for (int r = 0; r < kRows; r++) {
    from[r] = products.rows[row + r];
    for (int b = 0; b < kBlocks; b++) sums[r][b] = zero_sums();
  }
  for (int64_t input = 0; input < products.inputs; input += P::kStepInputs, weight += P::kStepInputs * kBlockOutputs) {
    typename P::Step weights[kBlocks];
    for (int b = 0; b < kBlocks; b++) weights[b] = P::weights_at(weight + b * block_size);
    for (int r = 0; r < kRows; r++)
      for (int b = 0; b < kBlocks; b++) P::add(sums[r][b], weights[b], from[r] + input);
  }
  for (int r = 0; r < kRows; r++)
    for (int b = 0; b < kBlocks; b++) write(products, row + r, block + b, lanes_of(sums[r][b]));
}

// The blocks of a tile beside its rows. Few rows need several, so that enough sums are independent of each other.
template <typename Weight>
constexpr int blocks_beside(int64_t rows) {
  constexpr int kSums = Product<Weight>::kTileRows * Product<Weight>::kTileBlocks;
  return kSums >= 4 * rows ? 4 : kSums >= 2 * rows ? 2 : 1;
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
