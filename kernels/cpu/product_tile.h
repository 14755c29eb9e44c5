// How instruction sets multiply rows and packed weights, with all sums in registers: see packed_product.h.
#pragma once

#include <algorithm>

#include "intrinsics.h"
#include "packed_product.h"

namespace quire {

// A vector of sums, one for each of some outputs of a block.
#if defined(QUIRE_AVX512)
using Vector = __m512;
inline Vector broadcast(float x) { return _mm512_set1_ps(x); }
inline Vector add_product(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
#elif defined(__aarch64__)
using Vector = float32x4_t;
inline Vector broadcast(float x) { return vdupq_n_f32(x); }
inline Vector add_product(Vector a, Vector b, Vector sum) { return vfmaq_f32(sum, a, b); }
#else
using Vector = __m256;
inline Vector broadcast(float x) { return _mm256_set1_ps(x); }
inline Vector add_product(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
#endif
// The compiler may not compute it again.
inline void keep(Vector& vector) {
#if defined(QUIRE_INTRINSICS)
  asm("" : "+m"(vector));  // it is several registers
#elif defined(__aarch64__)
  asm("" : "+w"(vector));
#else
  asm("" : "+v"(vector));
#endif
}
constexpr int kVectors = kBlockOutputs * sizeof(float) / sizeof(Vector);  // of a block

// How an instruction set multiplies weights of a type. A step is `kStepInputs` inputs of a block, which are multiplied
// in `kParts`, one after the other. Registers hold the sums of `kTileRows` rows and `kTileBlocks` blocks.
template <typename Weight>
struct Product;

template <>
struct Product<float> {
  static constexpr int kStepInputs = 1, kParts = 1;
#if defined(QUIRE_AVX512)
  static constexpr int kTileRows = 6, kTileBlocks = 4;
#else
  static constexpr int kTileRows = 6, kTileBlocks = 1;
#endif
  static Vector weights(const float* step, int vector, int) {
    Vector weights = load<Vector>(step + vector * (sizeof(Vector) / sizeof(float)));
    keep(weights);  // otherwise the compiler would load it again for each row
    return weights;
  }
  static Vector inputs(const float* row, int) { return broadcast(*row); }
  static Vector add(Vector weights, Vector inputs, Vector sum) { return add_product(weights, inputs, sum); }
};

#if defined(QUIRE_AVX512_BF16)

template <>
struct Product<Bf16> {
  static constexpr int kStepInputs = 2, kParts = 1;
  static constexpr int kTileRows = 6, kTileBlocks = 4;
  static __m512bh weights(const Bf16* step, int, int) { return (__m512bh)_mm512_loadu_si512(step); }
  static __m512bh inputs(const Bf16* row, int) { return (__m512bh)_mm512_set1_epi32(load<int32_t>(row)); }
  static Vector add(__m512bh weights, __m512bh inputs, Vector sum) { return _mm512_dpbf16_ps(sum, weights, inputs); }
};

#else

// Without instructions for bfloat16: the two inputs of each output become floats, and their products are added one after
// the other, first the odd one, as the instruction does it.
template <>
struct Product<Bf16> {
  static constexpr int kStepInputs = 2, kParts = 2;
#if defined(QUIRE_AVX512)
  static constexpr int kTileRows = 5, kTileBlocks = 4;
#else
  static constexpr int kTileRows = 5, kTileBlocks = 1;
#endif
  static Vector weights(const Bf16* step, int vector, int part) {
    typedef uint32_t Pairs __attribute__((vector_size(sizeof(Vector))));
    const Pairs pairs = load<Pairs>(step + vector * (sizeof(Vector) / sizeof(Bf16)));
    return (Vector)(part == 0 ? pairs & 0xffff0000u : pairs << 16);
  }
  static Vector inputs(const float* row, int part) { return broadcast(row[1 - part]); }
  static Vector add(Vector weights, Vector inputs, Vector sum) { return add_product(weights, inputs, sum); }
};

#endif

// What a tile loads into the cache for later: in each step the line at `from` and those at the same place of its other
// blocks; `from` grows by `bytes` per step. Addresses after the end of a weight do no harm.
struct Ahead {
  const char* from = nullptr;  // null: nothing
  int64_t bytes = 0;
};

// Adds the products of kRows rows and kBlocks blocks, each block `block_size` elements after the last. All loops but that
// over the inputs are unrolled, since otherwise the compiler keeps sums in memory.
template <typename Weight, int kRows, int kBlocks>
inline void add_products(Vector (&sums)[kRows][kBlocks * kVectors], const Weight* weight, int64_t block_size,
                         const InputOf<Weight>* const* rows, int64_t inputs, Ahead ahead) {
  using P = Product<Weight>;
  constexpr int kColumns = kBlocks * kVectors;
  const InputOf<Weight>* from[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++) from[r] = rows[r];
#pragma GCC unroll 2
  for (int64_t input = 0; input < inputs; input += P::kStepInputs, weight += P::kStepInputs * kBlockOutputs) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; b++)
      __builtin_prefetch(ahead.from + b * block_size * static_cast<int64_t>(sizeof(Weight)));
    ahead.from += ahead.bytes;
#pragma GCC unroll 2
    for (int part = 0; part < P::kParts; part++) {
      asm("" : "+r"(weight));  // otherwise what one part loads would take registers until the next
      const auto weights = [&](int c) {
        return P::weights(weight + c / kVectors * block_size, c % kVectors, part);
      };
      const auto row = [&](int r) { return P::inputs(from[r] + input, part); };
      // The fewer are kept in registers, and the more are loaded one by one.
      if constexpr (kRows < kColumns) {
        decltype(row(0)) all[kRows];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) all[r] = row(r);
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; c++) {
          const auto one = weights(c);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; r++) sums[r][c] = P::add(one, all[r], sums[r][c]);
        }
      } else {
        decltype(weights(0)) all[kColumns];
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; c++) all[c] = weights(c);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
          const auto one = row(r);
#pragma GCC unroll 16
          for (int c = 0; c < kColumns; c++) sums[r][c] = P::add(all[c], one, sums[r][c]);
        }
      }
    }
  }
}

// The blocks of a tile beside its rows. Few rows need several, so that enough sums are independent of each other.
template <typename Weight>
constexpr int blocks_beside(int64_t rows) {
  constexpr int kSums = Product<Weight>::kTileRows * Product<Weight>::kTileBlocks;
  return kSums >= 4 * rows ? 4 : kSums >= 2 * rows ? 2 : 1;
}

// sums[r] += the products of kRows rows and `blocks` blocks of a packed weight; `stride` floats between the sums of rows.
template <typename Weight, int kRows>
void add_blocks(float* sums, int64_t stride, const Weight* weight, int64_t block_size, int64_t blocks,
                const InputOf<Weight>* const* rows, int64_t inputs, Ahead ahead = {}) {
  if (ahead.from == nullptr) ahead.from = reinterpret_cast<const char*>(weight);
  const auto add = [&](auto width, int64_t block) {
    constexpr int kColumns = width() * kVectors, kLane = sizeof(Vector) / sizeof(float);
    Vector tile[kRows][kColumns];
    float* to = sums + block * kBlockOutputs;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; c++) tile[r][c] = load<Vector>(to + r * stride + c * kLane);
    const Ahead ahead_here{ahead.from + block * block_size * static_cast<int64_t>(sizeof(Weight)), ahead.bytes};
    add_products<Weight, kRows, width()>(tile, weight + block * block_size, block_size, rows, inputs, ahead_here);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; c++) std::memcpy(to + r * stride + c * kLane, &tile[r][c], sizeof(Vector));
  };
  constexpr int kWidth = blocks_beside<Weight>(kRows);
  int64_t block = 0;
  for (; block + kWidth <= blocks; block += kWidth) add(std::integral_constant<int, kWidth>(), block);
  for (; block < blocks; block++) add(std::integral_constant<int, 1>(), block);
}

// `add_blocks` for up to a tile of rows.
template <typename Weight, int kRows = Product<Weight>::kTileRows>
void add_tile(float* sums, int64_t stride, const Weight* weight, int64_t block_size, int64_t blocks,
              const InputOf<Weight>* const* rows, int64_t count, int64_t inputs, Ahead ahead) {
  if constexpr (kRows > 1)
    if (count < kRows)
      return add_tile<Weight, kRows - 1>(sums, stride, weight, block_size, blocks, rows, count, inputs, ahead);
  add_blocks<Weight, kRows>(sums, stride, weight, block_size, blocks, rows, inputs, ahead);
}

// Writes the results of a row and some blocks, of their sums.
template <typename Weight>
void write_results(const Products<Weight>& products, int64_t row, int64_t block, int64_t blocks, const float* sums) {
  const int64_t first = block * kBlockOutputs;
  for_parts(std::min(blocks * kBlockOutputs, products.outputs - first), [&](int64_t i, int lanes) {
    Part sum = load<Part>(sums + i);
    Weight* result = products.results[row] + first + i;
    if (products.bias != nullptr) sum += load_lanes<Part>(products.bias + first + i, lanes);
    if (products.adds) sum += load_lanes<Part>(result, lanes);
    store_lanes(result, sum, lanes);
  });
}

}  // namespace quire
