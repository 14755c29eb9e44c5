// Products of bfloat16 with the tiles of AMX: see packed_product.h.
//
// The order of a sum is that of the instruction for tiles. From zero, the even inputs of a group of 32 are multiplied and
// added one after the other, and so are the odd ones; even + odd is then added to the sum of the groups before. All of it
// is in float32, rounded to nearest, with denormals as zero. So the bits are the same for any number of rows, and wherever
// sums are in between.

#if defined(QUIRE_AMX)

#include <algorithm>
#include <vector>

#include "amx_tiles.h"
#include "denormals.h"
#include "packed_product.h"

namespace quire {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kGroupPairs = kGroupInputs / 2;
constexpr int64_t kTileElements = kGroupInputs * kBlockOutputs;  // of weights
// The inputs of a panel: what stays of two blocks in the L1 cache while all rows are multiplied, which prefetch the next.
constexpr int64_t kPanelGroups = 8;

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

// They are copied unless they are in memory as tiles can be loaded: at equal distances, in whole groups. Less than a group
// is a tile that is narrower.
RowGroups find_groups(const Bf16* const* rows, int64_t count, int64_t inputs) {
  const auto address = [&](int64_t row) { return reinterpret_cast<const char*>(rows[row]); };
  const int64_t distance = count > 1 ? address(1) - address(0) : 0;
  bool loadable = inputs % (inputs < kGroupInputs ? 2 : kGroupInputs) == 0;
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

// Tiles 0 to 3 are sums [pair of row tiles][pair of blocks], 4 and 5 are rows, 6 and 7 are weights.
void configure_tiles(int64_t rows, int64_t inputs) {
  const int64_t pairs = std::min(kGroupPairs, (inputs + 1) / 2);
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    const bool of_rows = tile == 4 || tile == 5;
    config.row_bytes[tile] = static_cast<uint16_t>(of_rows ? pairs * 2 * sizeof(Bf16) : sizeof(Group));
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : pairs);
  }
  configure_tiles(config);
}

// Some rows of a product. They are divided into pairs of tiles, which are multiplied by pairs of blocks. Tiles are configured
// once, so all have the same number of rows, and the last two may have rows in common.
class Pass {
 public:
  Pass(const Products<Bf16>& products, int64_t first, int64_t count)
      : products_(products), first_(first), count_(count), pairs_((count + 2 * kTileRows - 1) / (2 * kTileRows)),
        tile_rows_((count + 2 * pairs_ - 1) / (2 * pairs_)),
        inputs_(find_groups(products.rows + first, count, products.inputs)), groups_(groups_of(products.inputs)),
        block_size_(block_size_of<Bf16>(products.inputs)), small_blocks_(are_small<Bf16>(products.inputs)) {}

  __attribute__((noinline)) void multiply_blocks(int64_t begin, int64_t end) const {
    configure_tiles(tile_rows_, products_.inputs);
    for (int64_t block = begin; block < end; block += 2) multiply_pair(block, std::min<int64_t>(2, end - block));
    _tile_release();
  }

 private:
  // Of a tile of rows and a pair of blocks.
  using Sums = Floats[kTileRows][2];

  // A block without a second one is multiplied twice.
  void multiply_pair(int64_t block, int64_t blocks) const {
    Sums sums[kPassRows / kTileRows];
    const int64_t panel = pairs_ == 1 ? groups_ : kPanelGroups;
    for (int64_t group = 0; group < groups_; group += panel) {
      const int64_t end = std::min(group + panel, groups_);
      const int64_t second = (blocks - 1) * block_size_;
      const Bf16* weights = weights_at(block, group);
      // The next panel, of which each pair of tiles prefetches a part. One pair needs no panels, but the next group,
      // or blocks.
      const Bf16* next = pairs_ == 1     ? weights + (small_blocks_ ? kAheadBytes / sizeof(Bf16) : kTileElements)
                         : end < groups_ ? weights_at(block, end)
                                         : weights_at(block + blocks, 0);
      for (int64_t pair = 0; pair < pairs_; pair++) {
        add_products(&sums[2 * pair], 2 * pair, group, end, weights, second, next + panel * kTileElements * pair / pairs_);
        if (end < groups_) continue;
        write(sums[2 * pair], 2 * pair, block, blocks);
        write(sums[2 * pair + 1], 2 * pair + 1, block, blocks);
      }
    }
  }

  int64_t row_of(int64_t tile) const { return std::min(tile * tile_rows_, count_ - tile_rows_); }

  // Adds the products of the groups group..end of two tiles and two blocks; `second` is the distance between the blocks.
  // Sums begin with zero in the first group.
  void add_products(Sums* sums, int64_t tile, int64_t group, int64_t end, const Bf16* weights, int64_t second,
                    const Bf16* next) const {
    if (group == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, &sums[0][0][0], sizeof(sums[0][0]));
      _tile_loadd(1, &sums[0][0][1], sizeof(sums[0][0]));
      _tile_loadd(2, &sums[1][0][0], sizeof(sums[0][0]));
      _tile_loadd(3, &sums[1][0][1], sizeof(sums[0][0]));
    }
    const int64_t next_elements = kTileElements / pairs_;
    for (; group < end; group++) {
      _tile_loadd(4, inputs_.at(row_of(tile), group), inputs_.between_rows);
      _tile_loadd(6, weights, sizeof(Group));
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + second, sizeof(Group));
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, inputs_.at(row_of(tile + 1), group), inputs_.between_rows);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      weights += kTileElements;
      for (const Bf16* line = next; line < next + next_elements; line += kGroupInputs) {
        __builtin_prefetch(line);
        __builtin_prefetch(line + second);
      }
      next += next_elements;
    }
    _tile_stored(0, &sums[0][0][0], sizeof(sums[0][0]));
    _tile_stored(1, &sums[0][0][1], sizeof(sums[0][0]));
    _tile_stored(2, &sums[1][0][0], sizeof(sums[0][0]));
    _tile_stored(3, &sums[1][0][1], sizeof(sums[0][0]));
  }

  const Bf16* weights_at(int64_t block, int64_t group) const {
    return products_.weight + block * block_size_ + group * kTileElements;
  }

  // Rows that are in two tiles are written once, since they may be added to what is there.
  void write(const Sums& sums, int64_t tile, int64_t block, int64_t blocks) const {
    const int64_t row = row_of(tile);
    const int64_t output = block * kBlockOutputs, width = std::min(blocks * kBlockOutputs, products_.outputs - output);
    Floats bias[2]{};
    if (products_.bias != nullptr)
      for_lanes(width, [&](int64_t i, int lanes) { bias[i / kBlockOutputs] = load_lanes(products_.bias + output + i, lanes); });
    for (int64_t r = tile * tile_rows_ - row; r < tile_rows_; r++) {
      Bf16* to = products_.results[first_ + row + r] + output;
      Floats results[2]{sums[r][0] + bias[0], sums[r][1] + bias[1]};
      if (products_.adds)
        for_lanes(width, [&](int64_t i, int lanes) { results[i / kBlockOutputs] += load_lanes(to + i, lanes); });
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)results[1], (__m512)results[0]);
      if (width == 2 * kBlockOutputs) std::memcpy(to, &both, sizeof(both));
      else std::memcpy(to, &both, width * sizeof(Bf16));
    }
  }

  const Products<Bf16>& products_;
  int64_t first_, count_, pairs_, tile_rows_;
  RowGroups inputs_;
  int64_t groups_, block_size_;
  bool small_blocks_;
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
