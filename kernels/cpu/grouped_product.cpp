// x W^T + b with a quantised weight: see grouped_product.h.

#include "grouped_product.h"

#include <algorithm>
#include <limits>

#include "dequantised_product.h"
#include "group_sums.h"

namespace quire {
namespace {

#if defined(QUIRE_VNNI)
constexpr int kTileRows = 8;
// Fewer rows wait for memory all the time, which processors then foresee. More load the next chunk.
constexpr int kLoadingRows = 7;
// For more tiles, it is faster to unpack values of 4 bits once.
constexpr int64_t kMostTilesOfHalves = 2;
#elif QUIRE_SUMS == 8
constexpr int kTileRows = 4, kLoadingRows = 1;
constexpr int64_t kMostTilesOfPlanes = 2;  // likewise of 5 and 6 bits
constexpr int64_t kMostTilesOfHalves = kRoundedRows;
constexpr int64_t kMostTilesOfBytes = 2;  // for more, it is faster to split signs from sizes once
#else
constexpr int kTileRows = 4, kLoadingRows = 7;
constexpr int64_t kMostTilesOfHalves = kRoundedRows;
#endif
// What a row's values are below is lost: its inverse would overflow.
constexpr float kLeast = 1e-30f;

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
  // One vector after the other: of the whole array GCC would copy every part through memory.
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) sums[r][v] = load<Real>(to[r] + v * kSums);
  for (int64_t group = 0; group < groups; group++, values += Values::kGroupBytes, rows += kRows) {
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
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) std::memcpy(to[r] + v * kSums, &sums[r][v], sizeof(Real));
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

constexpr int kGroupParts = kGroupInputs / kPartLanes;

// Values are rounded to the nearest, to even ones if two are as near. A group with what is not finite becomes NaN.
template <typename T>
void round_group(RowGroup& to, const T* from, int64_t count, const GroupFormat& format) {
  Part values[kGroupParts]{};
  for_parts(count, [&](int64_t i, int lanes) { values[i / kPartLanes] = load_lanes<Part>(from + i, lanes); });
  // As integers sizes are in order, and NaN is the largest.
  PartInts largest{};
  for (const Part& part : values) largest = larger((PartInts)part & 0x7fffffff, largest);
  const int32_t bits = reduce(largest, larger<PartInts>);
  const float most = load<float>(&bits);
  to = RowGroup{};
  if (!(most >= kLeast && most <= std::numeric_limits<float>::max())) {
    if (!(most < kLeast)) to.scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float inverse = 127.0f / most, magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  typedef int8_t Bytes __attribute__((vector_size(kPartLanes)));
  PartInts sums_of_halves[2]{};
  for (int i = 0; i < kGroupParts; i++) {
    const PartInts whole = (PartInts)(values[i] * inverse + magic) - static_cast<int32_t>(0x4b400000);
    const Bytes bytes = __builtin_convertvector(whole, Bytes);
    std::memcpy(to.values + i * kPartLanes, &bytes, sizeof(bytes));
    sums_of_halves[i / (kGroupParts / 2)] += whole;
  }
  to.scale = most / 127.0f;
  const auto add = [](auto a, auto b) { return a + b; };
  const int32_t of_halves[] = {reduce(sums_of_halves[0], add), reduce(sums_of_halves[1], add)};
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

// What multiplies a weight, and whether it reads the values as they are stored, or unpacked, or with their signs apart.
struct Reader {
  AddTile add;
  bool plain, split = false;
};

Reader reader_of(const GroupFormat& format, int64_t tiles) {
  const Extra extra = extra_of(format);
  const bool halves = format.halves() == 2;
#if QUIRE_SUMS == 8
  if ((format.bits == 8 || format.table) && tiles > kMostTilesOfBytes)
    return {halves ? add_tile_with<Signs, 2>(extra) : add_tile_with<Signs, 1>(extra), format.bits == 8, true};
#endif
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
  const auto [add, plain, split] = reader_of(format, tiles.count);
  alignas(64) uint8_t unpacked[kChunkGroups * 8 * kStepBytes];
  Factors factors;
  for (int64_t group = 0; group < groups; group += kChunkGroups) {
    const int64_t taken = std::min(kChunkGroups, groups - group);
    const uint8_t *values = chunk + format.values_at(taken), *next = chunk + format.chunk_bytes(taken);
    find_factors(format, chunk, taken, factors);
    for (int pass = 0; pass <= format.has_wide_table(); pass++) {
      const uint8_t* read = plain ? values : unpacked;
      if (!plain) unpack(format, values, taken, unpacked, pass == 1);
#if QUIRE_SUMS == 8
      alignas(64) uint8_t signs[kChunkGroups * Signs::kGroupBytes];
      if (split) {
        (format.halves() == 2 ? split_signs<2> : split_signs<1>)(read, taken, moved_by(format), signs);
        read = signs;
      }
#endif
      if (pass == 1)
        for (int64_t i = 0; i < taken; i++)
          for (float& scale : factors.scales[i]) scale *= 256.0f;
      for (int64_t tile = 0; tile < tiles.count; tile++) {
        const int64_t row = tile * tiles.size, size = std::min(tiles.size, products.count - row);
        add(sums + row, read, factors, products.rounded + row * groups + group * size, size, taken,
            moved_by(format), next);
      }
    }
    chunk = next;
  }
}

template <typename T>
void write(const GroupedProducts<T>& products, const Sums& sums, int64_t row, int64_t block) {
  const int64_t output = block * kBlockOutputs;
  for_parts(std::min(kBlockOutputs, products.outputs - output), [&](int64_t i, int lanes) {
    Part sum = load<Part>(sums + i);
    if (products.bias != nullptr) sum += load_lanes<Part>(products.bias + output + i, lanes);
    store_lanes(products.results[row] + output + i, sum, lanes);
  });
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
