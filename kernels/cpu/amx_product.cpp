// Products of bfloat16 with the tiles of AMX: see packed_product.h.
//
// The order of a sum is that of the instruction for tiles. From zero, the even inputs of a group of 32 are multiplied and
// added one after the other, and so are the odd ones; even + odd is then added to the sum of the groups before. All of it
// is in float32, rounded to nearest, with denormals as zero. One or two rows do the same with AVX-512, which reads weights
// faster. So the bits are the same for any number of rows.

#if defined(QUIRE_AMX)

#include <algorithm>
#include <vector>

#include "intrinsics.h"
#include "packed_product.h"

namespace quire {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kGroupPairs = kGroupInputs / 2;
// The rows for which a weight is read once, which limits the memory for copies.
constexpr int64_t kPassRows = 256;

// A row of a tile.
struct alignas(64) Group {
  Bf16 inputs[kGroupInputs];
};

int64_t groups_of(int64_t inputs) { return (inputs + kGroupInputs - 1) / kGroupInputs; }

// The groups of some rows; distances are in bytes.
struct RowGroups {
  const char* first;
  int64_t between_rows, between_groups;

  const char* at(int64_t row, int64_t group) const { return first + row * between_rows + group * between_groups; }
};

// They are copied unless they are in memory as tiles can be loaded: at equal distances, in whole groups.
RowGroups find_groups(const Bf16* const* rows, int64_t count, int64_t inputs) {
  const auto address = [&](int64_t row) { return reinterpret_cast<const char*>(rows[row]); };
  const int64_t distance = count > 1 ? address(1) - address(0) : 0;
  bool loadable = inputs % kGroupInputs == 0;
  for (int64_t row = 0; row < count; row++) loadable &= address(row) - address(0) == row * distance;
  if (loadable) return {address(0), distance, sizeof(Group)};
  thread_local std::vector<Group> copies;  // [groups, rows]
  copies.assign(groups_of(inputs) * count, {});
  for (int64_t row = 0; row < count; row++)
    for (int64_t input = 0; input < inputs; input += kGroupInputs)
      std::memcpy(&copies[input / kGroupInputs * count + row], rows[row] + input,
                  std::min(kGroupInputs, inputs - input) * sizeof(Bf16));
  return {reinterpret_cast<const char*>(copies.data()), sizeof(Group), count * static_cast<int64_t>(sizeof(Group))};
}

// While it exists, all instructions of this thread treat denormals as those for tiles do. What depends on it has to be in
// functions that are not inlined, since compilers do not know that it matters.
class DenormalsAsZero {
 public:
  DenormalsAsZero() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~DenormalsAsZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// What LDTILECFG reads.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums [pair of row tiles][pair of blocks], 4 and 5 are rows, 6 and 7 are weights.
void configure_tiles(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.row_bytes[tile] = sizeof(Group);
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kGroupPairs);
  }
  // GCC's intrinsics do not tell the compiler all the memory that they read: neither this one nor those that load tiles.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Some rows of a product.
class Pass {
 public:
  Pass(const Products<Bf16>& products, int64_t first, int64_t count)
      : products_(products), first_(first), count_(count), inputs_(find_groups(products.rows + first, count, products.inputs)),
        groups_(groups_of(products.inputs)), block_size_(block_size_of<Bf16>(products.inputs)) {}

  __attribute__((noinline)) void multiply_blocks(int64_t begin, int64_t end) const {
    if (count_ == 1) return multiply_few<1, 4>(begin, end);
    if (count_ == 2) return multiply_few<2, 2>(begin, end);
    // Tiles are configured once, so all have the same number of rows, and the last two may have rows in common.
    const int64_t tiles = (count_ + kTileRows - 1) / kTileRows, tile_rows = (count_ + tiles - 1) / tiles;
    const auto row_of = [&](int64_t tile) { return std::min(tile * tile_rows, count_ - tile_rows); };
    configure_tiles(tile_rows);
    for (int64_t block = begin; block < end; block += 2)
      for (int64_t tile = 0; tile < tiles; tile += 2) {
        const bool two_tiles = tile + 1 < tiles, two_blocks = block + 1 < end;
        const auto multiply = two_tiles    ? two_blocks ? &Pass::multiply_tiles<2, 2> : &Pass::multiply_tiles<2, 1>
                              : two_blocks ? &Pass::multiply_tiles<1, 2>
                                           : &Pass::multiply_tiles<1, 1>;
        (this->*multiply)({row_of(tile), row_of(tile + 1)}, tile_rows, block);
      }
    _tile_release();
  }

 private:
  struct TilePair {
    int64_t first, second;  // their first rows
  };

  // One or two tiles of rows, and one or two blocks.
  template <int kTiles, int kBlocks>
  void multiply_tiles(TilePair tiles, int64_t tile_rows, int64_t block) const {
    _tile_zero(0);
    if constexpr (kBlocks == 2) _tile_zero(1);
    if constexpr (kTiles == 2) _tile_zero(2);
    if constexpr (kTiles == 2 && kBlocks == 2) _tile_zero(3);
    for (int64_t group = 0; group < groups_; group++) {
      _tile_loadd(4, inputs_.at(tiles.first, group), inputs_.between_rows);
      _tile_loadd(6, weights_at(block, group), sizeof(Group));
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kBlocks == 2) {
        _tile_loadd(7, weights_at(block + 1, group), sizeof(Group));
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTiles == 2) {
        _tile_loadd(5, inputs_.at(tiles.second, group), inputs_.between_rows);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kBlocks == 2) _tile_dpbf16ps(3, 5, 7);
      }
    }
    Floats sums[kTiles][kTileRows][kBlocks];
    _tile_stored(0, &sums[0][0][0], sizeof(sums[0][0]));
    if constexpr (kBlocks == 2) _tile_stored(1, &sums[0][0][1], sizeof(sums[0][0]));
    if constexpr (kTiles == 2) _tile_stored(2, &sums[1][0][0], sizeof(sums[1][0]));
    if constexpr (kTiles == 2 && kBlocks == 2) _tile_stored(3, &sums[1][0][1], sizeof(sums[1][0]));
    write<kBlocks>(sums[0], tiles.first, tile_rows, block);
    if constexpr (kTiles == 2) write<kBlocks>(sums[1], tiles.second, tile_rows, block);
  }

  template <int kRows, int kBlocks>
  void multiply_few(int64_t block, int64_t end) const {
    for (; block + kBlocks <= end; block += kBlocks) multiply_vectors<kRows, kBlocks>(block);
    for (; block < end; block++) multiply_vectors<kRows, 1>(block);
  }

  // All rows and some blocks, without tiles.
  template <int kRows, int kBlocks>
  void multiply_vectors(int64_t block) const {
    Floats sums[kRows][kBlocks] = {};
    for (int64_t group = 0; group < groups_; group++) {
      Floats even_inputs[kRows], odd_inputs[kRows], even[kRows][kBlocks] = {}, odd[kRows][kBlocks] = {};
      for (int r = 0; r < kRows; r++) split(load<Words>(inputs_.at(r, group)), even_inputs[r], odd_inputs[r]);
      for (int64_t pair = 0; pair < kGroupPairs; pair++)
        for (int b = 0; b < kBlocks; b++) {
          Floats even_weights, odd_weights;
          split(load<Words>(weights_at(block + b, group) + pair * 2 * kBlockOutputs), even_weights, odd_weights);
          for (int r = 0; r < kRows; r++) {
            add_product(even[r][b], even_weights, even_inputs[r][pair]);
            add_product(odd[r][b], odd_weights, odd_inputs[r][pair]);
          }
        }
      for (int r = 0; r < kRows; r++)
        for (int b = 0; b < kBlocks; b++) sums[r][b] += even[r][b] + odd[r][b];
    }
    write<kBlocks>(sums, 0, kRows, block);
  }

  static void split(Words pairs, Floats& even, Floats& odd) {
    even = (Floats)(pairs << 16);
    odd = (Floats)(pairs & 0xffff0000u);
  }

  static void add_product(Floats& sum, Floats a, float b) {
    sum = (Floats)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)sum);
  }

  const Bf16* weights_at(int64_t block, int64_t group) const {
    return products_.weight + block * block_size_ + group * kGroupInputs * kBlockOutputs;
  }

  // Not inlined: it is called for each pair of tiles.
  template <int kBlocks>
  __attribute__((noinline)) void write(const Floats (*sums)[kBlocks], int64_t row, int64_t rows, int64_t block) const {
    for (int b = 0; b < kBlocks; b++) {
      const int64_t output = (block + b) * kBlockOutputs;
      const int lanes = static_cast<int>(std::min(kBlockOutputs, products_.outputs - output));
      const Floats bias = products_.bias == nullptr ? Floats{} : load_lanes(products_.bias + output, lanes);
      for (int64_t r = 0; r < rows; r++)
        store_lanes(products_.results[first_ + row + r] + output, sums[r][b] + bias, lanes);
    }
  }

  const Products<Bf16>& products_;
  int64_t first_, count_;
  RowGroups inputs_;
  int64_t groups_, block_size_;
};

}  // namespace

template <>
void Products<Bf16>::multiply_blocks(int64_t begin, int64_t end) const {
  const DenormalsAsZero mode;
  for (int64_t first = 0; first < count; first += kPassRows)
    Pass(*this, first, std::min(kPassRows, count - first)).multiply_blocks(begin, end);
}

}  // namespace quire

#endif
