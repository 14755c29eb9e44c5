// Causal attention of items with many new tokens (chunks of a prompt) over paged keys and values, as matrix products
// of 64 keys with 6 rows whose sums stay in registers. kernels/paged_attention.py has the formula, and checks the
// arguments.
//
// The keys and values of one key-value head are first copied into the order in which the products read them, once for
// all rows of the item. Then each task processes them for some rows with a running maximum (online softmax).
// Weights are rounded to bfloat16 before the product with values, as in torch's own attention; sums are float32.
//
// Letters as in kernels/paged_attention.py. A row is a token and one of the G query heads: row = token * G + head.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attention_arguments.h"
#include "attention_scores.h"
#include "attention_trees.h"
#include "threads.h"
#include "vectors.h"

#if defined(__AVX512BF16__)

namespace quire {
namespace {

constexpr int kBlockKeys = 64;
constexpr int kKeyVectors = kBlockKeys / kLanes;
constexpr int kTileRows = 6;
// The rows of a task: their sums stay in L2, while keys and values stream through L1.
constexpr int64_t kTaskRows = 16 * kTileRows;
// The bytes of keys and values that are copied at a time, over several heads. A head of a long sequence may need more.
constexpr int64_t kScratchBytes = 32 << 20;

inline __m512bh pairs_at(const void* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh pair_everywhere(const Bf16* from) {
  int32_t both;
  std::memcpy(&both, from, sizeof(both));
  return (__m512bh)_mm512_set1_epi32(both);
}

// The keys and values of one head of one item, starting at `begin` (a multiple of 64), in blocks of 64 positions.
struct Packed {
  uint32_t* keys;    // [blocks, D / 2, 64] pairs of elements of a key
  uint32_t* values;  // [blocks, 32, V] an element of the values of two adjacent keys
};

// One head of one item: the data that its tasks share.
struct Head {
  const AttentionArguments& a;
  int64_t index, kv_head;
  Item item;
  int64_t begin, blocks, group;

  Head(const AttentionArguments& arguments, int64_t an_index, int64_t a_kv_head)
      : a(arguments), index(an_index), kv_head(a_kv_head), item(a, an_index) {
    begin = item.oldest / kBlockKeys * kBlockKeys;
    blocks = (item.context - begin + kBlockKeys - 1) / kBlockKeys;
    group = a.heads / a.kv_heads;
  }

  int64_t keys_size() const { return blocks * kBlockKeys * a.width / 2; }
  int64_t values_size() const { return blocks * kBlockKeys * a.value_width / 2; }
  int64_t rows() const { return item.query_len * group; }
  // For a row of a tree this is its slot, not its position.
  int64_t position(int64_t row) const { return item.context - item.query_len + row / group; }
  TreeRow tree_row(int64_t row) const { return TreeRow(a, index, item.start + row / group); }

  int64_t head_of(int64_t row) const { return kv_head * group + row % group; }

  // A row of pages of this width; null if it is visible to no query, since such a slot may have any content.
  const Bf16* at(const void* pages, int64_t width, int64_t position) const {
    if (position < item.oldest || position >= item.context) return nullptr;
    const int64_t page = a.tables[index * a.table_stride + position / a.page_size];
    const int64_t slot = page * a.page_size + position % a.page_size;
    return static_cast<const Bf16*>(pages) + (slot * a.kv_heads + kv_head) * width;
  }

  const Bf16* query(int64_t row) const {
    const int64_t token = item.start + row / group;
    return static_cast<const Bf16*>(a.query) + token * a.query_stride + head_of(row) * a.head_stride;
  }
};

void pack_block(const Head& head, int64_t block, const Packed& packed) {
  const int64_t width = head.a.width, value_width = head.a.value_width, first = head.begin + block * kBlockKeys;
  uint32_t* keys = packed.keys + block * kBlockKeys * width / 2;
  for (int64_t i = 0; i < kBlockKeys; i++) {
    const Bf16* key = head.at(head.a.keys, width, first + i);
    for (int64_t pair = 0; pair < width / 2; pair++) {
      uint32_t both = 0;
      if (key != nullptr) std::memcpy(&both, key + 2 * pair, sizeof(both));
      keys[pair * kBlockKeys + i] = both;
    }
  }
  uint32_t* values = packed.values + block * kBlockKeys * value_width / 2;
  for (int64_t i = 0; i < kBlockKeys; i += 2) {
    const Bf16* low = head.at(head.a.values, value_width, first + i);
    const Bf16* high = head.at(head.a.values, value_width, first + i + 1);
    for (int64_t d = 0; d < value_width; d++)
      values[i / 2 * value_width + d] =
          (low == nullptr ? 0u : low[d].bits) | (high == nullptr ? 0u : static_cast<uint32_t>(high[d].bits) << 16);
  }
}

// The unnormalised rows of a task.
struct Sums {
  float* values;  // [kTaskRows, V]
  float maxima[kTaskRows], totals[kTaskRows];
};

// The scores of the block at `first` and some rows, as exponents of 2. Keys that a tree's row does not see are hidden.
template <bool kTrees, int kRows, Shaping kShaping>
void block_scores(Floats (&scores)[kRows][kKeyVectors], const Scores<kShaping>& shape, const Head& head, int64_t row,
                  const uint32_t* keys, int64_t first) {
  const Bf16* queries[kRows];
  for (int r = 0; r < kRows; r++) queries[r] = head.query(row + r);
  __m512 sums[kRows][kKeyVectors] = {};
  for (int64_t pair = 0; pair < head.a.width / 2; pair++) {
    __m512bh block[kKeyVectors];
    for (int v = 0; v < kKeyVectors; v++) block[v] = pairs_at(keys + pair * kBlockKeys + v * kLanes);
    for (int r = 0; r < kRows; r++) {
      const __m512bh both = pair_everywhere(queries[r] + 2 * pair);
      for (int v = 0; v < kKeyVectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], block[v], both);
    }
  }
  for (int r = 0; r < kRows; r++) {
    if constexpr (kTrees) {
      const TreeRow tree = head.tree_row(row + r);
      if (tree.is_in_tree()) {
        for (int v = 0; v < kKeyVectors; v++) {
          const Ints ahead = tree.aheads(first + v * kLanes);
          const Floats score = shape((Floats)sums[r][v], head.head_of(row + r), ahead);
          scores[r][v] = seen_of(ahead, head.a.window) ? score : splat(kHidden);
        }
        continue;
      }
    }
    for (int v = 0; v < kKeyVectors; v++)
      scores[r][v] = shape((Floats)sums[r][v], head.head_of(row + r), first + v * kLanes - head.position(row + r));
  }
}

// Hides the keys of the block at `first` that are not visible to a row.
inline void hide(Floats (&scores)[kKeyVectors], const Head& head, int64_t row, int64_t first) {
  const Ints lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t own = head.position(row), oldest = head.a.window ? own - head.a.window + 1 : 0;
  for (int v = 0; v < kKeyVectors; v++) {
    const int64_t base = first + v * kLanes;
    const int32_t low = static_cast<int32_t>(std::clamp<int64_t>(oldest - base, 0, kLanes));
    const int32_t high = static_cast<int32_t>(std::clamp<int64_t>(own + 1 - base, 0, kLanes));
    scores[v] = (lanes >= low) & (lanes < high) ? scores[v] : splat(kHidden);
  }
}

// Turns a row's scores into weights relative to its running maximum, and returns the factor for its sums so far.
inline float block_weights(Bf16* weights, Floats (&scores)[kKeyVectors], Sums& sums, int64_t row) {
  const float before = sums.maxima[row];
  const float highest = std::max(
      before, reduce(larger(larger(scores[0], scores[1]), larger(scores[2], scores[3])), larger));
  if (highest == kHidden) {  // nothing visible yet: there is no maximum to subtract
    std::memset(weights, 0, kBlockKeys * sizeof(Bf16));
    return 1.0f;
  }
  Floats total{};
  for (int v = 0; v < kKeyVectors; v++) {
    const Floats weight = power_of_two(scores[v] - highest);
    total += weight;
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)weight);
    std::memcpy(weights + v * kLanes, &narrow, sizeof(narrow));
  }
  const float shrink = highest > before ? std::exp2(before - highest) : 1.0f;  // 0 for the first visible block
  sums.totals[row] = sums.totals[row] * shrink + reduce(total, [](Floats a, Floats b) { return a + b; });
  sums.maxima[row] = highest;
  return shrink;
}

// sums = sums * shrink + weights * values, for `kVectors` vectors of columns, starting at `column`.
template <int kRows, int kVectors>
void add_values(float* sums, const float* shrink, const Bf16* weights, const uint32_t* values, int64_t width,
                int64_t column) {
  __m512 totals[kRows][kVectors];
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++)
      totals[r][v] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * width + column + v * kLanes), _mm512_set1_ps(shrink[r]));
  for (int64_t pair = 0; pair < kBlockKeys / 2; pair++) {
    __m512bh block[kVectors];
    for (int v = 0; v < kVectors; v++) block[v] = pairs_at(values + pair * width + column + v * kLanes);
    for (int r = 0; r < kRows; r++) {
      const __m512bh both = pair_everywhere(weights + r * kBlockKeys + 2 * pair);
      for (int v = 0; v < kVectors; v++) totals[r][v] = _mm512_dpbf16_ps(totals[r][v], block[v], both);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++) _mm512_storeu_ps(sums + r * width + column + v * kLanes, totals[r][v]);
}

// One block of keys and the rows row..row + kRows of the item, which are the rows from `into` on of the task.
template <bool kTrees, int kRows, Shaping kShaping>
void attend_tile(const Head& head, const Scores<kShaping>& shape, int64_t row, const Packed& packed, int64_t block,
                 Sums& sums, int64_t into) {
  const int64_t width = head.a.value_width, first = head.begin + block * kBlockKeys;
  Floats scores[kRows][kKeyVectors];
  block_scores<kTrees, kRows>(scores, shape, head, row, packed.keys + block * kBlockKeys * head.a.width / 2, first);
  Bf16 weights[kRows * kBlockKeys];
  float shrink[kRows];
  for (int r = 0; r < kRows; r++) {
    const int64_t own = head.position(row + r);
    const bool is_hidden = kTrees && head.tree_row(row + r).is_in_tree();  // with the scores
    if (!is_hidden && (own < first + kBlockKeys - 1 || (head.a.window && own - head.a.window + 1 > first)))
      hide(scores[r], head, row + r, first);
    shrink[r] = block_weights(weights + r * kBlockKeys, scores[r], sums, into + r);
  }
  const uint32_t* values = packed.values + block * kBlockKeys * width / 2;
  float* to = sums.values + into * width;
  int64_t column = 0;
  for (; column + 4 * kLanes <= width; column += 4 * kLanes)
    add_values<kRows, 4>(to, shrink, weights, values, width, column);
  if (column < width) add_values<kRows, 2>(to, shrink, weights, values, width, column);
}

template <Shaping kShaping>
using AttendTile = void (*)(const Head&, const Scores<kShaping>&, int64_t, const Packed&, int64_t, Sums&, int64_t);
template <bool kTrees, Shaping kShaping>
constexpr AttendTile<kShaping> kAttendTile[kTileRows] = {
    attend_tile<kTrees, 1, kShaping>, attend_tile<kTrees, 2, kShaping>, attend_tile<kTrees, 3, kShaping>,
    attend_tile<kTrees, 4, kShaping>, attend_tile<kTrees, 5, kShaping>, attend_tile<kTrees, 6, kShaping>};

// Rows first..last of a head, over all blocks with visible keys. Writes the result to `out`.
template <bool kTrees, Shaping kShaping>
void attend_rows(const Head& head, int64_t first, int64_t last, const Packed& packed, Sums& sums) {
  const int64_t width = head.a.value_width;
  const Scores<kShaping> shape(head.a);
  std::fill(sums.values, sums.values + (last - first) * width, 0.0f);
  std::fill(sums.maxima, sums.maxima + kTaskRows, kHidden);
  std::fill(sums.totals, sums.totals + kTaskRows, 0.0f);
  int64_t oldest = head.a.window ? std::max<int64_t>(0, head.position(first) - head.a.window + 1) : 0;
  if (kTrees && head.tree_row(first).is_in_tree()) oldest = head.item.oldest;  // rows are not in order of positions
  const int64_t begin = std::max<int64_t>(0, oldest - head.begin) / kBlockKeys;
  const int64_t end = (head.position(last - 1) - head.begin) / kBlockKeys + 1;
  for (int64_t block = begin; block < end; block++)
    for (int64_t row = first; row < last; row += kTileRows) {
      const int64_t count = std::min<int64_t>(kTileRows, last - row);
      if (head.position(row + count - 1) < head.begin + block * kBlockKeys) continue;  // all keys are later
      kAttendTile<kTrees, kShaping>[count - 1](head, shape, row, packed, block, sums, row - first);
    }
  for (int64_t row = first; row < last; row++) {
    const int64_t token = head.item.start + row / head.group, q_head = head.head_of(row);
    Bf16* out = static_cast<Bf16*>(head.a.out) + (token * head.a.heads + q_head) * width;
    const float factor = 1.0f / (sums.totals[row - first] + sink_weight(head.a, q_head, sums.maxima[row - first]));
    for_lanes(width, [&](int64_t d, int count) {
      store_lanes(out + d, load_lanes(sums.values + (row - first) * width + d, count) * factor, count);
    });
  }
}

// The attention of some heads of one item: copies their keys and values, then divides their rows among threads.
template <bool kTrees, Shaping kShaping>
void attend_heads(const AttentionArguments& a, int64_t index, int64_t first_head, int64_t num_heads,
                  uint32_t* scratch) {
  const Head any(a, index, first_head);
  const int64_t tasks = (any.rows() + kTaskRows - 1) / kTaskRows;
  auto packed_of = [&](int64_t head) {
    uint32_t* keys = scratch + head * (any.keys_size() + any.values_size());
    return Packed{keys, keys + any.keys_size()};
  };
#pragma omp parallel num_threads(static_cast<int>(std::max<int64_t>(1, a.threads)))
  {
    std::vector<float> memory(kTaskRows * a.value_width);
    Sums sums{memory.data(), {}, {}};
#pragma omp for schedule(static)
    for (int64_t task = 0; task < num_heads * any.blocks; task++)
      pack_block(Head(a, index, first_head + task / any.blocks), task % any.blocks, packed_of(task / any.blocks));
    // The last rows have the most visible keys. They come first, so that the threads end at about the same time.
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = num_heads * tasks - 1; task >= 0; task--) {
      const int64_t head = task % num_heads, first = task / num_heads * kTaskRows;
      attend_rows<kTrees, kShaping>(Head(a, index, first_head + head), first, std::min(first + kTaskRows, any.rows()),
                            packed_of(head), sums);
    }
  }
}

template <bool kTrees, Shaping kShaping>
void attend_items(const AttentionArguments& a) {
  for (int64_t index = 0; index < a.items; index++) {
    const Head any(a, index, 0);
    if (any.item.query_len <= a.max_query || any.item.context == 0) continue;
    const int64_t size = any.keys_size() + any.values_size();
    const int64_t room = kScratchBytes / static_cast<int64_t>(sizeof(uint32_t));
    const int64_t heads = std::clamp<int64_t>(room / size, 1, a.kv_heads);
    const std::unique_ptr<uint32_t[]> scratch(new uint32_t[heads * size]);
    for (int64_t head = 0; head < a.kv_heads; head += heads)
      attend_heads<kTrees, kShaping>(a, index, head, std::min(heads, a.kv_heads - head), scratch.get());
  }
}

template <bool kTrees>
void attend_as_shaped(const AttentionArguments& a) {
  if (a.softcap > 0) return attend_items<kTrees, Shaping::kSoftcap>(a);
  if (a.slopes != nullptr) return attend_items<kTrees, Shaping::kAlibi>(a);
  attend_items<kTrees, Shaping::kNone>(a);
}

}  // namespace
}  // namespace quire

extern "C" void quire_chunk_attention_bf16(const quire::AttentionArguments* a) {
  if (a->ancestors != nullptr) return quire::attend_as_shaped<true>(*a);
  quire::attend_as_shaped<false>(*a);
}

#endif
