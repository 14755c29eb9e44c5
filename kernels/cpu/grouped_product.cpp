// x W^T + b with a quantised weight: see grouped_product.h.

#include "grouped_product.h"

#include <algorithm>
#include <limits>

#include "intrinsics.h"

namespace quire {
namespace {

// A vector has a sum of each of some outputs of a block.
#if defined(QUIRE_VNNI)
#define QUIRE_SUMS 16
constexpr int kTileRows = 8;
#elif defined(__AVX2__) && !defined(QUIRE_INTRINSICS)
#define QUIRE_SUMS 8
constexpr int kTileRows = 4;
#else
#define QUIRE_SUMS 16
constexpr int kTileRows = 4;
#endif
typedef int32_t Whole __attribute__((vector_size(4 * QUIRE_SUMS)));
typedef float Real __attribute__((vector_size(4 * QUIRE_SUMS)));
constexpr int kSums = QUIRE_SUMS, kVectors = kBlockOutputs / kSums;
// What a row's values are below is lost: its inverse would overflow.
constexpr float kLeast = 1e-30f;
// Rows that do not pass many blocks beside each other load a weight so far ahead.
constexpr int64_t kAhead = 2 << 10;

template <int kBits>
constexpr int kSteps = kBits;  // of kStepBytes in a group

inline int32_t four(const RowGroup& row, int step) { return load<int32_t>(row.values + 4 * step); }

// The sums of one group for kRows rows and the outputs of a vector, exact: sum over inputs of weight * value.
#if defined(QUIRE_VNNI)

// Instructions multiply unsigned bytes by signed ones. So signed weights are moved by 128, and the sum of the row's values
// is taken off as often.
template <int kBits, int kRows>
inline void sum_group(Whole (&sums)[kRows], const uint8_t* weight, const RowGroup* const* rows, int64_t group) {
  typedef uint16_t Pairs __attribute__((vector_size(64)));
  const Whole flip = Whole{} + static_cast<int32_t>(0x80808080u), low = Whole{} + 0x0f0f0f0f;
  const auto add = [](Whole sum, Whole weights, int32_t values) {
    return (Whole)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)(Whole{} + values));
  };
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) sums[r] = Whole{} - rows[r][group].sum * (kBits == 8 ? 128 : 8);
#pragma GCC unroll 8
  for (int step = 0; step < kSteps<kBits>; step++) {
    const Whole weights = load<Whole>(weight + step * kStepBytes);
    if constexpr (kBits == 8) {
      const Whole moved = weights ^ flip;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) sums[r] = add(sums[r], moved, four(rows[r][group], step));
    } else {
      const Whole first = weights & low, last = (Whole)((Pairs)weights >> 4) & low;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        sums[r] = add(sums[r], first, four(rows[r][group], step));
        sums[r] = add(sums[r], last, four(rows[r][group], step + 4));
      }
    }
  }
}

#elif QUIRE_SUMS == 8

// Pairs of products are added in 16 bits: 2 * 127 * 127 fits, as do 16 * 15 * 127 of a whole group of 4 bits.
template <int kBits, int kRows>
inline void sum_group(Whole (&sums)[kRows], const uint8_t* weight, const RowGroup* const* rows, int64_t group) {
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
  __m256i found[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) found[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int step = 0; step < kSteps<kBits>; step++) {
    const __m256i weights = load<__m256i>(weight + step * kStepBytes);
    if constexpr (kBits == 8) {
      const __m256i sizes = _mm256_abs_epi8(weights);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const __m256i values = _mm256_sign_epi8(_mm256_set1_epi32(four(rows[r][group], step)), weights);
        found[r] = _mm256_add_epi32(found[r], _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, values), ones));
      }
    } else {
      const __m256i first = _mm256_and_si256(weights, low);
      const __m256i last = _mm256_and_si256(_mm256_srli_epi16(weights, 4), low);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const __m256i one = _mm256_maddubs_epi16(first, _mm256_set1_epi32(four(rows[r][group], step)));
        const __m256i other = _mm256_maddubs_epi16(last, _mm256_set1_epi32(four(rows[r][group], step + 4)));
        found[r] = _mm256_add_epi16(found[r], _mm256_add_epi16(one, other));
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    if constexpr (kBits == 8) sums[r] = (Whole)found[r];
    else sums[r] = (Whole)_mm256_madd_epi16(found[r], ones) - 8 * rows[r][group].sum;
  }
}

#else

template <int kBits, int kRows>
inline void sum_group(Whole (&sums)[kRows], const uint8_t* weight, const RowGroup* const* rows, int64_t group) {
  for (int r = 0; r < kRows; r++) {
    const int8_t* values = rows[r][group].values;
    for (int output = 0; output < kSums; output++) {
      int32_t sum = 0;
      for (int step = 0; step < kSteps<kBits>; step++)
        for (int i = 0; i < 4; i++) {
          const uint8_t byte = weight[step * kStepBytes + output * 4 + i];
          if constexpr (kBits == 8) sum += static_cast<int8_t>(byte) * values[4 * step + i];
          else sum += ((byte & 15) - 8) * values[4 * step + i] + ((byte >> 4) - 8) * values[4 * (step + 4) + i];
        }
      sums[r][output] = sum;
    }
  }
}

#endif

#if QUIRE_SUMS == 8
inline Real add_product(Real a, Real b, Real sum) { return _mm256_fmadd_ps(a, b, sum); }
#else
inline Real add_product(Real a, Real b, Real sum) { return fused(a, b, sum); }
#endif

// float16 as floats. All are finite.
inline Real scales_of(const uint8_t* from) {
#if QUIRE_SUMS == 8
  return _mm256_cvtph_ps(load<__m128i>(from));
#elif defined(QUIRE_VNNI) && !defined(QUIRE_INTRINSICS)
  return _mm512_cvtph_ps(load<__m256i>(from));
#else
  Real scales;
  for (int i = 0; i < kSums; i++) {
    const uint16_t half = load<uint16_t>(from + 2 * i);
    const uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
    const float size = load<float>(&bits) * 0x1p112f;  // its exponent counts from another one
    scales[i] = half >> 15 ? -size : size;
  }
  return scales;
#endif
}

// The blocks beside each other that few rows pass at a time: memory is faster at several places at once.
constexpr int64_t kMostBeside = 4;
constexpr int beside(int64_t rows) { return rows * kVectors <= 2 ? 4 : rows * kVectors <= 4 ? 2 : 1; }

typedef float Results[kTileRows][kBlockOutputs];  // of a block

// The results of kRows rows and kBlocks blocks.
template <int kBits, int kRows, int kBlocks>
inline void multiply_blocks(Results* results, const uint8_t* block, int64_t groups, const RowGroup* const* rows) {
  constexpr int64_t kGroupBytes = kSteps<kBits> * kStepBytes, kScaleBytes = 2 * kBlockOutputs;
  const int64_t whole = block_bytes(groups, kBits), before = scale_bytes(groups);
  Real sums[kBlocks][kRows][kVectors];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; b++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sums[b][r][v] = Real{};
  for (int64_t group = 0; group < groups; group++) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; b++) {
      const uint8_t* scale = block + b * whole + group * kScaleBytes;
      const uint8_t* weight = block + b * whole + before + group * kGroupBytes;
      if constexpr (kBlocks < kMostBeside)
#pragma GCC unroll 8
        for (int line = 0; line < kGroupBytes; line += 64) __builtin_prefetch(weight + kAhead + line);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        Whole found[kRows];
        sum_group<kBits, kRows>(found, weight + v * kSums * 4, rows, group);
        const Real scales = scales_of(scale + v * kSums * 2);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
          const Real both = scales * rows[r][group].scale;
          sums[b][r][v] = add_product(both, __builtin_convertvector(found[r], Real), sums[b][r][v]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; b++)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) std::memcpy(results[b][r], sums[b][r], sizeof(sums[b][r]));
}

// For up to a tile of rows, and `blocks` blocks.
template <int kBits, int kRows = kTileRows>
void multiply_tile(Results* results, const uint8_t* block, int64_t blocks, int64_t groups, const RowGroup* const* rows,
                   int64_t count) {
  if constexpr (kRows > 1)
    if (count < kRows) return multiply_tile<kBits, kRows - 1>(results, block, blocks, groups, rows, count);
  constexpr int kWidth = beside(kRows);
  const int64_t whole = block_bytes(groups, kBits);
  int64_t b = 0;
  for (; b + kWidth <= blocks; b += kWidth) multiply_blocks<kBits, kRows, kWidth>(results + b, block + b * whole, groups, rows);
  for (; b < blocks; b++) multiply_blocks<kBits, kRows, 1>(results + b, block + b * whole, groups, rows);
}

// Values are rounded to the nearest, to even ones if two are as near. A group with what is not finite becomes NaN.
template <typename T>
void round_group(RowGroup& to, const T* from, int64_t count) {
  const Floats first = load_lanes(from, static_cast<int>(std::min<int64_t>(count, kLanes)));
  const Floats last = count > kLanes ? load_lanes(from + kLanes, static_cast<int>(count - kLanes)) : Floats{};
  // As integers sizes are in order, and NaN is the largest.
  const Ints mask = Ints{} + 0x7fffffff, one = (Ints)first & mask, other = (Ints)last & mask;
  const int32_t bits = reduce(one > other ? one : other, [](Ints a, Ints b) { return a > b ? a : b; });
  const float most = load<float>(&bits);
  if (!(most >= kLeast && most <= std::numeric_limits<float>::max())) {
    to = RowGroup{};
    if (!(most < kLeast)) to.scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float inverse = 127.0f / most, magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const auto round = [&](Floats values) { return (Ints)(values * inverse + magic) - static_cast<int32_t>(0x4b400000); };
  const Ints begin = round(first), end = round(last);
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes halves[] = {__builtin_convertvector(begin, Bytes), __builtin_convertvector(end, Bytes)};
  to.scale = most / 127.0f;
  to.sum = reduce(begin + end, [](Ints a, Ints b) { return a + b; });
  std::memcpy(to.values, halves, sizeof(halves));
}

template <typename T, int kBits>
void multiply(const LinearArguments& a, const RowGroup* rounded, int64_t first_row, int64_t count, const Worker& worker) {
  const int64_t groups = groups_of(a.inputs), blocks = blocks_of(a.outputs), tiles = (count + kTileRows - 1) / kTileRows;
  const int64_t width = tiles == 1 ? kMostBeside : 1, end = worker.end_of(blocks);
  for (int64_t block = worker.begin_of(blocks); block < end; block += width) {
    const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + block * block_bytes(groups, kBits);
    const int64_t taken = std::min(width, end - block);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t begin = count * tile / tiles, size = count * (tile + 1) / tiles - begin;
      const RowGroup* rows[kTileRows];
      for (int64_t r = 0; r < size; r++) rows[r] = rounded + (begin + r) * groups;
      alignas(64) Results results[kMostBeside];
      multiply_tile<kBits>(results, weight, taken, groups, rows, size);
      for (int64_t r = 0; r < size; r++) {
        const int64_t output = block * kBlockOutputs;
        T* out = static_cast<T*>(a.out) + (first_row + begin + r) * a.outputs + output;
        for_lanes(std::min(taken * kBlockOutputs, a.outputs - output), [&](int64_t i, int lanes) {
          Floats sum = load<Floats>(results[i / kBlockOutputs][r]);
          if (a.bias != nullptr) sum += load_lanes(static_cast<const T*>(a.bias) + output + i, lanes);
          store_lanes(out + i, sum, lanes);
        });
      }
    }
  }
}

}  // namespace

template <typename T>
void grouped_linear(const LinearArguments& a, int64_t bits, const Worker& worker) {
  RowGroup* rounded = static_cast<RowGroup*>(a.scratch);
  const int64_t groups = groups_of(a.inputs);
  for (int64_t first = 0; first < a.rows; first += kRoundedRows) {
    const int64_t count = std::min(kRoundedRows, a.rows - first);
    worker.for_shares(count * groups, [&](int64_t i) {
      const int64_t row = i / groups, input = i % groups * kGroupInputs;
      round_group(rounded[i], static_cast<const T*>(a.x) + (first + row) * a.x_stride + input,
                  std::min(kGroupInputs, a.inputs - input));
    });
    if (bits == 8) multiply<T, 8>(a, rounded, first, count, worker);
    else multiply<T, 4>(a, rounded, first, count, worker);
    worker.barrier();
  }
}

template void grouped_linear<Bf16>(const LinearArguments&, int64_t, const Worker&);
template void grouped_linear<float>(const LinearArguments&, int64_t, const Worker&);

namespace {

template <typename T>
void run(const LinearArguments& a, int64_t bits, int64_t threads) {
  run_together(threads_for(a.outputs * a.inputs * bits / 8, threads),
               [&](const Worker& worker) { grouped_linear<T>(a, bits, worker); });
}

}  // namespace
}  // namespace quire

extern "C" void quire_grouped_linear_bf16(const quire::LinearArguments* a, int64_t bits, int64_t threads) {
  quire::run<quire::Bf16>(*a, bits, threads);
}
extern "C" void quire_grouped_linear_f32(const quire::LinearArguments* a, int64_t bits, int64_t threads) {
  quire::run<float>(*a, bits, threads);
}
