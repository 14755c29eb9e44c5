// How instruction sets multiply rows and packed weights, with all sums in registers: see packed_product.h.
#pragma once

#include "intrinsics.h"
#include "packed_product.h"

namespace quire {

// A sum for each output of a block.
#if defined(QUIRE_AVX512)
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
#if defined(QUIRE_AVX512)
  static constexpr int kTileRows = 6, kTileBlocks = 4;
#else
  static constexpr int kTileRows = 5, kTileBlocks = 1;
#endif
  static Step weights_at(const float* from) { return load_sums(from); }
  static void add(Sums& sums, Step weights, const float* row) { add_product(sums, weights, broadcast(*row)); }
};

#if defined(QUIRE_AVX512_BF16)

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
#if defined(QUIRE_AVX512)
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

// Adds the products of kRows rows and kBlocks blocks, each block `block_size` elements after the last.
template <typename Weight, int kRows, int kBlocks>
inline void add_products(Sums (&sums)[kRows][kBlocks], const Weight* weight, int64_t block_size,
                         const InputOf<Weight>* const* rows, int64_t inputs) {
  using P = Product<Weight>;
  const InputOf<Weight>* from[kRows];
  for (int r = 0; r < kRows; r++) from[r] = rows[r];
  for (int64_t input = 0; input < inputs; input += P::kStepInputs, weight += P::kStepInputs * kBlockOutputs) {
    typename P::Step weights[kBlocks];
    for (int b = 0; b < kBlocks; b++) weights[b] = P::weights_at(weight + b * block_size);
    for (int r = 0; r < kRows; r++)
      for (int b = 0; b < kBlocks; b++) P::add(sums[r][b], weights[b], from[r] + input);
  }
}

// The blocks of a tile beside its rows. Few rows need several, so that enough sums are independent of each other.
template <typename Weight>
constexpr int blocks_beside(int64_t rows) {
  constexpr int kSums = Product<Weight>::kTileRows * Product<Weight>::kTileBlocks;
  return kSums >= 4 * rows ? 4 : kSums >= 2 * rows ? 2 : 1;
}

}  // namespace quire
