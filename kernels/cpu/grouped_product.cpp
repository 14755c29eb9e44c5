// x W^T + b with a quantised weight: see grouped_product.h.

#include "grouped_product.h"

#include <algorithm>
#include <limits>

#include "dequantised_product.h"
#include "group_chunk.h"

namespace quire {
namespace {

// A vector has a sum of each of some outputs of a block.
#if defined(QUIRE_VNNI)
#define QUIRE_SUMS 16
constexpr int kTileRows = 8;
// Fewer rows wait for memory all the time, which processors then foresee. More load the next chunk.
constexpr int kLoadingRows = 7;
// For more tiles, it is faster to unpack values of 4 bits once.
constexpr int64_t kMostTilesOfHalves = 2;
#elif defined(__AVX2__) && !defined(QUIRE_INTRINSICS)
#define QUIRE_SUMS 8
constexpr int kTileRows = 4, kLoadingRows = 1;
constexpr int64_t kMostTilesOfPlanes = 2;  // likewise of 5 and 6 bits
constexpr int64_t kMostTilesOfHalves = kRoundedRows;
#else
#define QUIRE_SUMS 16
constexpr int kTileRows = 4, kLoadingRows = 7;
constexpr int64_t kMostTilesOfHalves = kRoundedRows;
#endif
typedef int32_t Whole __attribute__((vector_size(4 * QUIRE_SUMS)));
typedef float Real __attribute__((vector_size(4 * QUIRE_SUMS)));
constexpr int kSums = QUIRE_SUMS, kVectors = kBlockOutputs / kSums;
// What a row's values are below is lost: its inverse would overflow.
constexpr float kLeast = 1e-30f;

inline int32_t four(const RowGroup& row, int step) { return load<int32_t>(row.values + 4 * step); }

// How the values of a weight lie where products read them: in a plane of kLowBits and, unless it has none, one of kHighBits
// above them (group_chunk.h). They have kValueBits.
template <int kLowBits, int kHighBits, int kValueBits>
struct Stored {
  static constexpr int kLow = kLowBits, kHigh = kHighBits, kBits = kLowBits + kHighBits, kWidth = kValueBits;
};
using Bytes = Stored<8, 0, 8>;
using Nibbles = Stored<4, 0, 4>;
#if QUIRE_SUMS == 8
using FewBits = Stored<8, 0, 6>;  // at most 6 bits in a byte
using FiveBits = Stored<4, 1, 5>;
using SixBits = Stored<4, 2, 6>;
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

// Makes GCC add in the order of the source. It would add all products at the end, and has not so many registers.
inline void keep_order(__m256i& sum) { asm("" : "+x"(sum)); }

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

// Pairs of products are added in 16 bits: 2 * 128 * 127 fits, as do 4 * 63 * 127, and 16 * 15 * 127 of a whole group.
template <typename Values, int kHalves, int kRows>
inline void sum_group(GroupSums<kHalves, kRows>& sums, const uint8_t* values, const RowGroup* rows, int moved) {
  const __m256i ones = _mm256_set1_epi16(1), by = _mm256_set1_epi8(static_cast<char>(moved));
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
          keep_order(found[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        const Whole first = begin % kSteps != 0 ? sums[h][r][v] : Whole{} + (kSigned ? 0 : rows[r].starts[h]);
        sums[h][r][v] = first + (Whole)_mm256_madd_epi16(found[r][v], ones);
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

#if QUIRE_SUMS == 8
inline Real add_product(Real a, Real b, Real sum) { return _mm256_fmadd_ps(a, b, sum); }
#else
inline Real add_product(Real a, Real b, Real sum) { return fused(a, b, sum); }
#endif

typedef float Sums[kBlockOutputs];  // of a row and a block

// Adds the products of kRows rows and some groups of a block.
template <typename Values, int kHalves, Extra kExtra, int kRows>
void add_groups(Sums* to, const uint8_t* values, const Factors& factors, const RowGroup* rows, int64_t groups,
                int moved, const uint8_t* next) {
  constexpr int kBits = Values::kBits;
  Real sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) std::memcpy(sums[r], to[r], sizeof(sums[r]));
  for (int64_t group = 0; group < groups; group++, values += kBits * kStepBytes, rows += kRows) {
    if constexpr (kRows >= kLoadingRows)
#pragma GCC unroll 8
      for (int line = 0; line < kBits; line++) __builtin_prefetch(next + (group * kBits + line) * kStepBytes);
    GroupSums<kHalves, kRows> found;
    sum_group<Values, kHalves, kRows>(found, values, rows, moved);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; h++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        const Real scales = load<Real>(factors.scales[group * kHalves + h] + v * kSums);
        const Real extras = load<Real>(factors.extras[group * kHalves + h] + v * kSums);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
          Real& sum = sums[r][v];
          Real whole = __builtin_convertvector(found[h][r][v], Real);
          if constexpr (kExtra == kZeros) whole = add_product(extras, Real{} + rows[r].factors[h], whole);  // exact
          sum = add_product(scales * rows[r].scale, whole, sum);
          if constexpr (kExtra == kMinima) sum = add_product(extras, Real{} + rows[r].factors[h], sum);
        }
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) std::memcpy(to[r], sums[r], sizeof(sums[r]));
}

// `add_groups` for up to a tile of rows.
template <typename Values, int kHalves, Extra kExtra, int kRows = kTileRows>
void add_tile(Sums* to, const uint8_t* values, const Factors& factors, const RowGroup* rows, int64_t count, int64_t groups,
              int moved, const uint8_t* next) {
  if constexpr (kRows > 1)
    if (count < kRows)
      return add_tile<Values, kHalves, kExtra, kRows - 1>(to, values, factors, rows, count, groups, moved, next);
  add_groups<Values, kHalves, kExtra, kRows>(to, values, factors, rows, groups, moved, next);
}

using AddTile = decltype(&add_tile<Bytes, 1, kNothing>);

template <typename Values, int kHalves>
AddTile add_tile_with(Extra extra) {
  return extra == kMinima ? &add_tile<Values, kHalves, kMinima>
         : extra == kZeros ? &add_tile<Values, kHalves, kZeros>
                           : &add_tile<Values, kHalves, kNothing>;
}

// Values are rounded to the nearest, to even ones if two are as near. A group with what is not finite becomes NaN.
template <typename T>
void round_group(RowGroup& to, const T* from, int64_t count, const GroupFormat& format) {
  const Floats first = load_lanes(from, static_cast<int>(std::min<int64_t>(count, kLanes)));
  const Floats last = count > kLanes ? load_lanes(from + kLanes, static_cast<int>(count - kLanes)) : Floats{};
  // As integers sizes are in order, and NaN is the largest.
  const Ints mask = Ints{} + 0x7fffffff, one = (Ints)first & mask, other = (Ints)last & mask;
  const int32_t bits = reduce(one > other ? one : other, [](Ints a, Ints b) { return a > b ? a : b; });
  const float most = load<float>(&bits);
  to = RowGroup{};
  if (!(most >= kLeast && most <= std::numeric_limits<float>::max())) {
    if (!(most < kLeast)) to.scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float inverse = 127.0f / most, magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const auto round = [&](Floats values) { return (Ints)(values * inverse + magic) - static_cast<int32_t>(0x4b400000); };
  const Ints begin = round(first), end = round(last);
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes halves[] = {__builtin_convertvector(begin, Bytes), __builtin_convertvector(end, Bytes)};
  std::memcpy(to.values, halves, sizeof(halves));
  to.scale = most / 127.0f;
  const auto add = [](Ints a, Ints b) { return a + b; };
  const int32_t of_halves[] = {reduce(begin, add), reduce(end, add)};
  const int32_t sums[] = {of_halves[0] + (format.halves() == 2 ? 0 : of_halves[1]), of_halves[1]};
  for (int h = 0; h < 2; h++) {
    to.starts[h] = -moved_by(format) * sums[h];
    to.factors[h] = static_cast<float>(sums[h]) * (format.minima ? to.scale : 1.0f);
  }
}

// How rows are divided: into tiles that are as large as each other, but for the last one.
struct Tiles {
  int64_t count, size;

  explicit Tiles(int64_t rows) : count((rows + kTileRows - 1) / kTileRows), size((rows + count - 1) / count) {}
};

// What multiplies a weight, and whether it reads the values as they are stored, or unpacked.
struct Reader {
  AddTile add;
  bool plain;
};

Reader reader_of(const GroupFormat& format, int64_t tiles) {
  const Extra extra = extra_of(format);
  const bool halves = format.halves() == 2;
  if (format.bits == 8 || format.table)
    return {halves ? add_tile_with<Bytes, 2>(extra) : add_tile_with<Bytes, 1>(extra), format.bits == 8};
  if (format.bits == 4 && tiles <= kMostTilesOfHalves) return {add_tile_with<Nibbles, 1>(extra), true};
#if QUIRE_SUMS == 8
  if (format.bits == 6 && halves && tiles <= kMostTilesOfPlanes) return {add_tile_with<SixBits, 2>(extra), true};
  if (format.bits == 5 && !halves && tiles <= kMostTilesOfPlanes) return {add_tile_with<FiveBits, 1>(extra), true};
#endif
  return {halves ? add_tile_with<FewBits, 2>(extra) : add_tile_with<FewBits, 1>(extra), false};
}

// Adds the products of all rows and one block to `sums`, chunk after chunk.
template <typename T>
void add_block(const GroupedProducts<T>& products, Sums* sums, const uint8_t* chunk) {
  const GroupFormat& format = *products.format;
  const Tiles tiles(products.count);
  const int64_t groups = groups_of(products.inputs);
  const auto [add, plain] = reader_of(format, tiles.count);
  alignas(64) uint8_t unpacked[kChunkGroups * 8 * kStepBytes];
  Factors factors;
  for (int64_t group = 0; group < groups; group += kChunkGroups) {
    const int64_t taken = std::min(kChunkGroups, groups - group);
    const uint8_t *values = chunk + format.values_at(taken), *next = chunk + format.chunk_bytes(taken);
    find_factors(format, chunk, taken, factors);
    for (int pass = 0; pass <= format.has_wide_table(); pass++) {
      if (!plain) unpack(format, values, taken, unpacked, pass == 1);
      if (pass == 1)
        for (int64_t i = 0; i < taken; i++)
          for (float& scale : factors.scales[i]) scale *= 256.0f;
      for (int64_t tile = 0; tile < tiles.count; tile++) {
        const int64_t row = tile * tiles.size, size = std::min(tiles.size, products.count - row);
        add(sums + row, plain ? values : unpacked, factors, products.rounded + row * groups + group * size, size, taken,
            moved_by(format), next);
      }
    }
    chunk = next;
  }
}

template <typename T>
void write(const GroupedProducts<T>& products, const Sums& sums, int64_t row, int64_t block) {
  const int64_t output = block * kBlockOutputs;
  const int lanes = static_cast<int>(std::min(kBlockOutputs, products.outputs - output));
  Floats sum = load<Floats>(sums);
  if (products.bias != nullptr) sum += load_lanes(products.bias + output, lanes);
  store_lanes(products.results[row] + output, sum, lanes);
}

}  // namespace

template <typename T>
void GroupedProducts<T>::multiply_blocks(int64_t begin, int64_t end) const {
  const int64_t block_bytes = format->block_bytes(groups_of(inputs));
  for (int64_t block = begin; block < end; block++) {
    alignas(64) Sums sums[kRoundedRows];
    std::fill_n(sums[0], count * kBlockOutputs, 0.0f);
    add_block(*this, sums, static_cast<const uint8_t*>(weight) + block * block_bytes);
    for (int64_t row = 0; row < count; row++) write(*this, sums[row], row, block);
  }
}

template <typename T>
void round_group_of(RowGroup* rounded, int64_t row, int64_t count, int64_t group, const T* from, int64_t inputs,
                    const GroupFormat& format) {
  const Tiles tiles(count);
  const int64_t groups = groups_of(inputs), tile_row = row / tiles.size * tiles.size, input = group * kGroupInputs;
  const int64_t size = std::min(tiles.size, count - tile_row);
  round_group(rounded[tile_row * groups + group * size + row - tile_row], from + input,
              std::min(kGroupInputs, inputs - input), format);
}

template <typename T>
void grouped_linear(const LinearArguments& a, const GroupFormat& format, const Worker& worker) {
  if (!format.rounds_rows)
    return multiply_rows_of<T>(a, worker, [&](const Products<T>& all, int64_t begin, int64_t end) {
      multiply_dequantised(all, a.weight, format, begin, end);
    });
  RowGroup* rounded = static_cast<RowGroup*>(a.scratch);
  const int64_t groups = groups_of(a.inputs), blocks = blocks_of(a.outputs);
  for (int64_t first = 0; first < a.rows; first += kRoundedRows) {
    const int64_t count = std::min(kRoundedRows, a.rows - first);
    worker.for_shares(count * groups, [&](int64_t i) {
      const int64_t row = i / groups;
      round_group_of(rounded, row, count, i % groups, static_cast<const T*>(a.x) + (first + row) * a.x_stride,
                     a.inputs, format);
    });
    T* results[kRoundedRows];
    for (int64_t row = 0; row < count; row++) results[row] = static_cast<T*>(a.out) + (first + row) * a.out_stride;
    const GroupedProducts<T> products{a.weight, &format,  static_cast<const T*>(a.bias), rounded, results,
                                      count,    a.inputs, a.outputs};
    products.multiply_blocks(worker.begin_of(blocks), worker.end_of(blocks));
    worker.barrier();
  }
}

#define QUIRE_GROUPED(T)                                                                                            \
  template struct GroupedProducts<T>;                                                                               \
  template void round_group_of<T>(RowGroup*, int64_t, int64_t, int64_t, const T*, int64_t, const GroupFormat&);     \
  template void grouped_linear<T>(const LinearArguments&, const GroupFormat&, const Worker&);
QUIRE_GROUPED(Bf16)
QUIRE_GROUPED(float)

namespace {

template <typename T>
void run(const LinearArguments& a, const GroupFormat& format, int64_t threads) {
  const int64_t bytes = blocks_of(a.outputs) * format.block_bytes(groups_of(a.inputs));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) { grouped_linear<T>(a, format, worker); });
}

}  // namespace
}  // namespace quire

QUIRE_EXPORT(void, quire_grouped_linear, (const quire::LinearArguments* a, const quire::GroupFormat* format, int64_t threads),
             quire::run, (*a, *format, threads))
