// x W^T + b with a weight of 8-bit floats: see float8_product.h.

#include "float8_product.h"

#include <algorithm>

#include "denormals.h"
#include "intrinsics.h"
#include "product_tile.h"

namespace quire {
namespace {

// The blocks that are multiplied side by side: memory is faster at several places at once.
constexpr int64_t kBesideBlocks = 4;
// The inputs that a single tile of rows multiplies at a time; and how far ahead bytes are loaded.
constexpr int64_t kFewInputs = 32, kLoadedAhead = 1 << 9;

// 16 values of e4m3, exact: the sign, 4 bits of exponent from 2^-7 on, and 3 bits of fraction. The smallest have no
// leading one. float16 has one bit of exponent more, which counts from 256 times as little.
#if defined(__F16C__) && !defined(QUIRE_INTRINSICS)

inline Floats values_of(const uint8_t* from) {
  // Moved up by 7 bits, the sign is twice there: in its place, and in that of the bit of exponent.
  const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(from)), 7);
  const __m256i halves = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(halves) * 256.0f;
#else
  const __m256 parts[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  return load<Floats>(parts) * 256.0f;
#endif
}

#else

inline Floats values_of(const uint8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  const Words bits = __builtin_convertvector(load<Bytes>(from), Words);
  const Words size = bits & 0x7fu, sign = (bits & 0x80u) << 24;
  const Ints is_small = size < 8u;
  const Words exponents = Words{} + (120u << 23), of_small = Words{} + (121u << 23);
  const Floats leading = is_small ? splat(0x1p-6f) : Floats{};
  const Floats value = (Floats)((size << 20) + (is_small ? of_small : exponents)) - leading;
  return (Floats)((Words)value | sign);
}

#endif

// Values of e4m3 to elements of a product, exact. The number of values is a multiple of 16, of bfloat16 of 32.
inline void expand(float* to, const uint8_t* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store_lanes(to + i, values_of(from + i), kLanes);
}

// As bfloat16 the fraction is followed by four zeros, and 120 is added to the exponent. Values without a leading one are rare
// in real weights, and replaced afterwards. Instructions that interleave bytes do so in each 16 of them, so eights are put in
// their places before.
#if defined(QUIRE_AVX512) && !defined(QUIRE_INTRINSICS)

constexpr int64_t kExpanded = 64;

struct Expanded {
  __m512i first, last;  // 32 values each
  bool has_small;
};

inline Expanded expanded(const uint8_t* from) {
  const __m512i places = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), zero = _mm512_setzero_si512();
  const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(0x87f0)), added = _mm512_set1_epi16(120 << 7);
  const __m512i values = _mm512_permutexvar_epi64(places, load<__m512i>(from));
  const __m512i first = _mm512_srai_epi16(_mm512_unpacklo_epi8(zero, values), 4);
  const __m512i last = _mm512_srai_epi16(_mm512_unpackhi_epi8(zero, values), 4);
  return {_mm512_add_epi16(_mm512_and_si512(first, kept), added), _mm512_add_epi16(_mm512_and_si512(last, kept), added),
          _mm512_testn_epi8_mask(values, _mm512_set1_epi8(0x78)) != 0};
}

inline bool expand_some(Bf16* to, const uint8_t* from) {
  const Expanded found = expanded(from);
  _mm512_storeu_si512(to, found.first);
  _mm512_storeu_si512(to + 32, found.last);
  return found.has_small;
}

#elif defined(__AVX2__) && !defined(QUIRE_INTRINSICS)

constexpr int64_t kExpanded = 32;

inline bool expand_some(Bf16* to, const uint8_t* from) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i kept = _mm256_set1_epi16(static_cast<int16_t>(0x87f0)), added = _mm256_set1_epi16(120 << 7);
  const __m256i values = _mm256_permute4x64_epi64(load<__m256i>(from), 0xd8);  // 0, 2, 1, 3
  const __m256i first = _mm256_srai_epi16(_mm256_unpacklo_epi8(zero, values), 4);
  const __m256i last = _mm256_srai_epi16(_mm256_unpackhi_epi8(zero, values), 4);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_add_epi16(_mm256_and_si256(first, kept), added));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16), _mm256_add_epi16(_mm256_and_si256(last, kept), added));
  const __m256i exponents = _mm256_and_si256(values, _mm256_set1_epi8(0x78));
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(exponents, zero)) != 0;
}

#else

constexpr int64_t kExpanded = kLanes;

inline bool expand_some(Bf16* to, const uint8_t* from) {
  store_lanes(to, values_of(from), kLanes);
  return false;
}

#endif

// Values without a leading one are replaced: those of 0 to 7 times 2^-9.
__attribute__((noinline)) void replace_small(Bf16* to, const uint8_t* from) {
  constexpr uint16_t kSmall[] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  for (int64_t i = 0; i < kExpanded; i++) {
    if ((from[i] & 0x78) != 0) continue;
    const uint16_t bits = static_cast<uint16_t>(kSmall[from[i] & 7] | (from[i] & 0x80) << 8);
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

inline void expand(Bf16* to, const uint8_t* from, int64_t count) {
  int64_t i = 0;
  for (; i + kExpanded <= count; i += kExpanded) {
    __builtin_prefetch(from + i + kLoadedAhead);
    if (__builtin_expect(expand_some(to + i, from + i), 0)) replace_small(to + i, from + i);
  }
  if (i == count) return;
  uint8_t last[kExpanded] = {};
  Bf16 expanded[kExpanded];
  std::memcpy(last, from + i, count - i);
  if (expand_some(expanded, last)) replace_small(expanded, last);
  std::memcpy(to + i, expanded, (count - i) * sizeof(Bf16));
}

// Spans of some blocks, one after the other.
template <typename T>
struct Spans {
  const Float8Weight& weight;
  int64_t block, blocks;

  // A line between blocks: otherwise these would be in the same places of the cache.
  static constexpr int64_t kLine = 64 / sizeof(T);
  alignas(64) T values[(Float8Weight::kMostSpan * kBlockOutputs + kLine) * kBesideBlocks];
  int64_t stride = 0;  // of the blocks of `values`

  Spans(const Float8Weight& a_weight, int64_t a_block, int64_t count) : weight(a_weight), block(a_block), blocks(count) {}

  const uint8_t* start(int64_t b) const {
    const int64_t bytes = weight.scale_floats() * sizeof(float) + block_size_of<T>(weight.inputs);
    return weight.data + (block + b) * bytes;
  }

  Floats scales(int64_t b, int64_t input) const {
    return load<Floats>(start(b) + input / weight.scale_inputs * kBlockOutputs * sizeof(float));
  }

  // The values of these inputs, each block filled up to a step.
  void expand_inputs(int64_t input, int64_t count) {
    constexpr int64_t kStep = Product<T>::kStepInputs;
    const int64_t size = (count + kStep - 1) / kStep * kStep * kBlockOutputs;
    stride = size + kLine;
    for (int64_t b = 0; b < blocks; b++)
      expand(values + b * stride, values_at(b, input), size);
  }

  const uint8_t* values_at(int64_t b, int64_t input) const {
    return start(b) + weight.scale_floats() * sizeof(float) + input * kBlockOutputs;
  }
};

constexpr int64_t kStride = kBesideBlocks * kBlockOutputs;

#if defined(QUIRE_AVX512_BF16) && !defined(QUIRE_INTRINSICS)

// Values without a leading one, put in their places.
__attribute__((noinline)) Expanded with_small(Expanded found, const uint8_t* from) {
  Bf16 values[kExpanded];
  _mm512_storeu_si512(values, found.first);
  _mm512_storeu_si512(values + 32, found.last);
  replace_small(values, from);
  return {load<__m512i>(values), load<__m512i>(values + 32), false};
}

// The same sums as by `add_tile`, of the values of kBesideBlocks blocks that are expanded in registers.
template <int kRows>
void add_expanded(float* sums, const uint8_t* const* values, const Bf16* const* rows, int64_t inputs) {
  Vector tile[kRows][kBesideBlocks];
  std::memcpy(tile, sums, sizeof(tile));
  for (int64_t input = 0; input < inputs; input += kExpanded / kBlockOutputs) {
#pragma GCC unroll 4
    for (int b = 0; b < kBesideBlocks; b++) {
      const uint8_t* from = values[b] + input * kBlockOutputs;
      __builtin_prefetch(from + kLoadedAhead);
      Expanded found = expanded(from);
      if (__builtin_expect(found.has_small, 0)) found = with_small(found, from);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        const auto add = [&](__m512i weights, int64_t at) {
          tile[r][b] = Product<Bf16>::add((__m512bh)weights, Product<Bf16>::inputs(rows[r] + at, 0), tile[r][b]);
        };
        add(found.first, input);
        add(found.last, input + 2);
      }
    }
  }
  std::memcpy(sums, tile, sizeof(tile));
}

// For more tiles, it is faster to expand values once.
constexpr int64_t kRowsOfBytes = Product<Bf16>::kTileRows, kTilesOfBytes = 3;

template <int kRows = kRowsOfBytes>
void add_from_bytes(const Spans<Bf16>& spans, float* sums, const Bf16* const* rows, int64_t count, int64_t begin,
                    int64_t end) {
  if constexpr (kRows > 1)
    if (count < kRows) return add_from_bytes<kRows - 1>(spans, sums, rows, count, begin, end);
  const uint8_t* values[kBesideBlocks];
  for (int64_t b = 0; b < kBesideBlocks; b++) values[b] = spans.values_at(b, begin);
  add_expanded<kRows>(sums, values, rows, end - begin);
}

#else

constexpr int64_t kRowsOfBytes = 0, kTilesOfBytes = 0;

inline void add_from_bytes(const Spans<Bf16>&, float*, const void*, int64_t, int64_t, int64_t) {}

#endif

// sums[r] += the products of one of the tiles of rows and the inputs of a span.
template <typename T>
void add_span(Spans<T>& spans, float* sums, const InputOf<T>* const* rows, int64_t count, int64_t begin, int64_t end,
              int64_t tile, int64_t tiles) {
  const InputOf<T>* from[Product<T>::kTileRows];
  // A tile alone waits for memory: so little is expanded at a time that processors load what comes next meanwhile.
  const int64_t part = tiles == 1 ? kFewInputs : end - begin;
  for (int64_t input = begin; input < end; input += part) {
    const int64_t taken = std::min(part, end - input);
    for (int64_t r = 0; r < count; r++) from[r] = rows[r] + input;
    if constexpr (std::is_same_v<InputOf<T>, Bf16>)
      if (tiles <= kTilesOfBytes && count <= kRowsOfBytes && spans.blocks == kBesideBlocks && (end - begin) % kFewInputs == 0)
        return add_from_bytes(spans, sums, from, count, begin, end);
    if (tiles == 1 || tile == 0) spans.expand_inputs(input, taken);
    add_tile<T>(sums, kStride, spans.values, spans.stride, spans.blocks, from, count, taken, {});
  }
}

// The results of some rows and up to kBesideBlocks blocks from `block` on.
template <typename T>
__attribute__((noinline)) void multiply_rows(const Products<T>& all, const Float8Weight& weight, int64_t first_row,
                                             int64_t count, int64_t block, int64_t blocks) {
  constexpr int64_t kTileRows = Product<T>::kTileRows;
  alignas(64) float sums[kTileRows * kStride], totals[kPassRows * kStride];
  Spans<T> spans(weight, block, blocks);
  const int64_t span = weight.span(), tiles = (count + kTileRows - 1) / kTileRows;
  std::fill_n(totals, count * kStride, 0.0f);
  for (int64_t input = 0; input < weight.inputs; input += span) {
    const int64_t end = std::min(input + span, weight.inputs);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = count * tile / tiles, number = count * (tile + 1) / tiles - row;
      std::fill_n(sums, number * kStride, 0.0f);
      add_span(spans, sums, all.rows + first_row + row, number, input, end, tile, tiles);
      for (int64_t r = 0; r < number; r++)
        for (int64_t b = 0; b < blocks; b++) {
          float* total = totals + (row + r) * kStride + b * kBlockOutputs;
          const Floats sum = load<Floats>(sums + r * kStride + b * kBlockOutputs);
          store_lanes(total, fused(sum, spans.scales(b, input), load<Floats>(total)), kLanes);
        }
    }
  }
  for (int64_t row = 0; row < count; row++)
    write_results(all, first_row + row, block, blocks, totals + row * kStride);
}

}  // namespace

template <typename T>
void multiply_float8(const Products<T>& all, const Float8Weight& weight, int64_t begin, int64_t end) {
  const DenormalsOf<T> mode;
  for (int64_t row = 0; row < all.count; row += kPassRows)
    for (int64_t block = begin; block < end; block += kBesideBlocks)
      multiply_rows(all, weight, row, std::min(kPassRows, all.count - row), block, std::min(kBesideBlocks, end - block));
}

template <typename T>
void float8_linear(const LinearArguments& a, const Float8Weight& weight, const Worker& worker) {
  multiply_rows_of<T>(a, worker, [&](const Products<T>& all, int64_t begin, int64_t end) {
    multiply_float8(all, weight, begin, end);
  });
}

#define QUIRE_FLOAT8(T)                                                                          \
  template void multiply_float8<T>(const Products<T>&, const Float8Weight&, int64_t, int64_t);   \
  template void float8_linear<T>(const LinearArguments&, const Float8Weight&, const Worker&);
QUIRE_FLOAT8(Bf16)
QUIRE_FLOAT8(float)

namespace {

template <typename T>
void run(const LinearArguments& a, int64_t scale_inputs, int64_t threads) {
  const Float8Weight weight{static_cast<const uint8_t*>(a.weight), a.inputs, scale_inputs};
  run_together(threads_for(a.outputs * a.inputs, threads),
               [&](const Worker& worker) { float8_linear<T>(a, weight, worker); });
}

}  // namespace
}  // namespace quire

QUIRE_EXPORT(void, quire_float8_linear, (const quire::LinearArguments* a, int64_t scale_inputs, int64_t threads),
             quire::run, (*a, scale_inputs, threads))
