// The sum of the products of a group of weights and of some rows: see grouped_product.h.
#pragma once

#include <type_traits>

#include "group_chunk.h"
#include "grouped_product.h"

namespace quire {

// A vector has a sum of each of some outputs of a block.
#if defined(__AVX2__) && !defined(QUIRE_VNNI) && !defined(QUIRE_INTRINSICS)
#define QUIRE_SUMS 8
#else
#define QUIRE_SUMS 16
#endif
typedef int32_t Whole __attribute__((vector_size(4 * QUIRE_SUMS)));
typedef float Real __attribute__((vector_size(4 * QUIRE_SUMS)));
constexpr int kSums = QUIRE_SUMS, kVectors = kBlockOutputs / kSums;

inline int32_t four(const RowGroup& row, int step) { return load<int32_t>(row.values + 4 * step); }

// How the values of a weight lie where products read them: in a plane of kLowBits and, unless it has none, one of kHighBits
// above them (group_chunk.h). They have kValueBits.
template <int kLowBits, int kHighBits, int kValueBits>
struct Stored {
  static constexpr int kLow = kLowBits, kHigh = kHighBits, kBits = kLowBits + kHighBits, kWidth = kValueBits;
  static constexpr int kGroupBytes = kBits * kStepBytes;
};
using Bytes = Stored<8, 0, 8>;
using Nibbles = Stored<4, 0, 4>;
#if QUIRE_SUMS == 8
using FewBits = Stored<8, 0, 6>;  // at most 6 bits in a byte
using FiveBits = Stored<4, 1, 5>;
using SixBits = Stored<4, 2, 6>;

// Bytes whose sizes and signs are apart, as `split_signs` writes them: for each four inputs of a group the sizes, and as many
// bytes that are -1 where a weight is negative. Behind them for each half, or for the group, the sizes of the negative
// weights added up [16] in int32: a value of a row with all bits inverted is -value - 1.
struct Signs : Bytes {
  static constexpr int kStep = 2 * kStepBytes, kSumsAt = 8 * kStep;
  static constexpr int kGroupBytes = kSumsAt + 2 * kBlockOutputs * static_cast<int>(sizeof(int32_t));
};
#else
using FewBits = Bytes;
#endif

// The sums of one group, or of its halves, for kRows rows and the outputs of a block, exact: of weight * value over the
// inputs. Values of weights are `moved`; see RowGroup::starts.
template <int kHalves, int kRows>
using GroupSums = Whole[kHalves][kRows][kVectors];

#if defined(QUIRE_VNNI)

template <typename Values, int kHalves, int kRows>
inline void sum_group(GroupSums<kHalves, kRows>& sums, const uint8_t* values, const RowGroup* rows, int) {
  const Whole low = Whole{} + 0x0f0f0f0f;
  const auto add = [&](int step, Whole weights) {
    Whole(&half)[kRows][kVectors] = sums[kHalves == 2 ? step / 4 : 0];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const Whole inputs = Whole{} + four(rows[r], step);
      half[r][0] = (Whole)_mm512_dpbusd_epi32((__m512i)half[r][0], (__m512i)weights, (__m512i)inputs);
    }
  };
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; h++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) sums[h][r][0] = Whole{} + rows[r].starts[h];
#pragma GCC unroll 8
  for (int step = 0; step < Values::kBits; step++) {
    const Whole weights = load<Whole>(values + step * kStepBytes);
    if constexpr (Values::kBits == 8) {
      add(step, weights);
    } else {
      add(step, weights & low);
      add(step + 4, (Whole)((Pairs)weights >> 4) & low);
    }
  }
}

#elif QUIRE_SUMS == 8

// Makes GCC have a value in a register here. It would add all products at the end, and read weights again for each row, but
// has neither so many registers nor ports.
inline void keep(__m256i& value) { asm("" : "+x"(value)); }

// The weights of four inputs and of the outputs of a vector, a byte each.
template <typename Values>
inline __m256i weights_of(const uint8_t* values, int step, int vector) {
  const auto line = [&](int index) { return load<__m256i>(values + index * kStepBytes + vector * kSums * 4); };
  const auto bits = [](__m256i pairs, int from, int to, int count) {
    const __m256i moved = from >= to ? _mm256_srli_epi16(pairs, from - to) : _mm256_slli_epi16(pairs, to - from);
    return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(((1 << count) - 1) << to)));
  };
  constexpr int kLow = Values::kLow, kHigh = Values::kHigh;
  if constexpr (kLow == 8) return line(step);
  const __m256i low = bits(line(step % kLow), step / kLow * kLow, 0, kLow);
  if constexpr (kHigh == 0) return low;
  else return _mm256_or_si256(low, bits(line(kLow + step % kHigh), step / kHigh * kHigh, kLow, kHigh));
}

// The sums of pairs of 16 bits, in 32 bits.
inline __m256i of_pairs(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

// Writes the weights of a chunk of so many groups as `Signs` has them. Its values are `moved`.
template <int kHalves>
void split_signs(const uint8_t* values, int64_t groups, int moved, uint8_t* to) {
  const __m256i by = _mm256_set1_epi8(static_cast<char>(moved)), ones = _mm256_set1_epi8(1);
  constexpr int kSteps = 8 / kHalves;
  for (int64_t group = 0; group < groups; group++, values += 8 * kStepBytes, to += Signs::kGroupBytes)
    for (int part = 0; part < kHalves * kVectors; part++) {
      const int half = part / kVectors, v = part % kVectors;
      __m256i negative{};
#pragma GCC unroll 8
      for (int step = half * kSteps; step < (half + 1) * kSteps; step++) {
        const __m256i weights = _mm256_sub_epi8(load<__m256i>(values + step * kStepBytes + v * 32), by);
        const __m256i sizes = _mm256_abs_epi8(weights), signs = _mm256_cmpgt_epi8(__m256i{}, weights);
        std::memcpy(to + step * Signs::kStep + v * 32, &sizes, sizeof(sizes));
        std::memcpy(to + step * Signs::kStep + kStepBytes + v * 32, &signs, sizeof(signs));
        negative = _mm256_add_epi16(negative, _mm256_maddubs_epi16(_mm256_and_si256(sizes, signs), ones));
      }
      const __m256i sum = of_pairs(negative);
      std::memcpy(to + Signs::kSumsAt + (half * kVectors + v) * 32, &sum, sizeof(sum));
    }
}

// `sum_group` where signs are apart. Sizes are up to 128 and inverted values from -128 to 126: a sum of two products fits in
// 16 bits.
template <int kHalves, int kRows>
inline void sum_split_group(GroupSums<kHalves, kRows>& sums, const uint8_t* values, const RowGroup* rows) {
  constexpr int kSteps = 8 / kHalves;
#pragma GCC unroll 8
  for (int step = 0; step < 8; step++) {
    const int h = step / kSteps;
    __m256i sizes[kVectors], signs[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) {
      sizes[v] = load<__m256i>(values + step * Signs::kStep + v * 32);
      signs[v] = load<__m256i>(values + step * Signs::kStep + kStepBytes + v * 32);
      keep(sizes[v]), keep(signs[v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const __m256i inputs = _mm256_set1_epi32(four(rows[r], step));
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        const uint8_t* negative = values + Signs::kSumsAt + (h * kVectors + v) * 32;
        const Whole first = step % kSteps != 0 ? sums[h][r][v] : load<Whole>(negative);
        const __m256i products = _mm256_maddubs_epi16(sizes[v], _mm256_xor_si256(inputs, signs[v]));
        __m256i sum = (__m256i)(first + (Whole)of_pairs(products));
        keep(sum);
        sums[h][r][v] = (Whole)sum;
      }
    }
  }
}

// Pairs of products are added in 16 bits: 2 * 128 * 127 fits, as do 4 * 63 * 127, and 16 * 15 * 127 of a whole group.
template <typename Values, int kHalves, int kRows>
inline void sum_group(GroupSums<kHalves, kRows>& sums, const uint8_t* values, const RowGroup* rows, int moved) {
  if constexpr (std::is_same_v<Values, Signs>) return sum_split_group<kHalves, kRows>(sums, values, rows);
  const __m256i by = _mm256_set1_epi8(static_cast<char>(moved));
  constexpr bool kSigned = Values::kWidth == 8;
  constexpr int kSteps = 8 / kHalves, kTogether = kSigned ? 1 : Values::kWidth > 4 ? 2 : kSteps;
#pragma GCC unroll 8
  for (int begin = 0; begin < 8; begin += kTogether) {
    const int h = begin / kSteps;
    __m256i found[kRows][kVectors];
#pragma GCC unroll 8
    for (int step = begin; step < begin + kTogether; step++) {
      __m256i weights[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        weights[v] = weights_of<Values>(values, step, v);
        if (kSigned) weights[v] = _mm256_sub_epi8(weights[v], by);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const __m256i inputs = _mm256_set1_epi32(four(rows[r], step));
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) {
          const __m256i products =
              kSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(weights[v]), _mm256_sign_epi8(inputs, weights[v]))
                      : _mm256_maddubs_epi16(weights[v], inputs);
          found[r][v] = step == begin ? products : _mm256_add_epi16(found[r][v], products);
          keep(found[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        const Whole first = begin % kSteps != 0 ? sums[h][r][v] : Whole{} + (kSigned ? 0 : rows[r].starts[h]);
        __m256i sum = (__m256i)(first + (Whole)of_pairs(found[r][v]));
        keep(sum);
        sums[h][r][v] = (Whole)sum;
      }
  }
}

#else

template <typename Values, int kHalves, int kRows>
inline void sum_group(GroupSums<kHalves, kRows>& sums, const uint8_t* values, const RowGroup* rows, int moved) {
  for (int h = 0; h < kHalves; h++)
    for (int r = 0; r < kRows; r++)
      for (int output = 0; output < kSums; output++) {
        int32_t sum = 0;
        for (int step = h * 4; step < h * 4 + 8 / kHalves; step++)
          for (int i = 0; i < 4; i++) {
            const int byte = values[step % Values::kBits * kStepBytes + output * 4 + i];
            const int value = Values::kBits == 8 ? byte : step < 4 ? byte & 15 : byte >> 4;
            sum += (value - moved) * rows[r].values[4 * step + i];
          }
        sums[h][r][0][output] = sum;
      }
}

#endif

}  // namespace quire
