// Causal attention over paged keys and values. kernels/paged_attention.py has the formula, and checks the arguments.
//
// Both products, of queries and keys and of weights and values, are those of packed_product.h: pages have its layout
// (kv_pages.h). A row goes through blocks of 64 positions with a running maximum (online softmax). The softmax's weights are
// rounded to bfloat16 before the product with bfloat16 values, as torch's own attention does.
//
// Blocks, and the splits of 512 positions after which sums are merged, are at fixed positions of the sequence. So the
// bits of a row depend only on its own sequence: not on the batch, nor on how many tokens an item has, nor on threads. Nor
// do they depend on the instruction set, but that AMX has products of its own.
//
// Items with few tokens are divided among threads by split, items with many by rows.
//
// Letters as in kernels/paged_attention.py. A row of a head is a token and one of its G query heads: token * G + head.

#include "attention.h"

#include <algorithm>
#include <vector>

#include "attention_product.h"
#include "attention_scores.h"
#include "attention_trees.h"
#include "denormals.h"
#if defined(QUIRE_AMX)
#include "amx_attention_product.h"
#endif

namespace quire {
namespace {

using Arguments = AttentionArguments;

// The rows of a task of a long item: their sums stay in L2, while keys and values stream through L1.
constexpr int64_t kTaskRows = 96;

template <typename T>
void grow(std::vector<T>& memory, size_t size) {
  if (memory.size() < size) memory.resize(size);
}

// One key-value head of one item.
template <typename T>
struct Head {
  const Arguments& a;
  int64_t index, kv_head;
  Item item;
  int64_t group;

  Head(const Arguments& arguments, int64_t an_index, int64_t a_kv_head)
      : a(arguments), index(an_index), kv_head(a_kv_head), item(a, an_index), group(a.heads / a.kv_heads) {}

  int64_t rows() const { return item.query_len * group; }
  int64_t token(int64_t row) const { return item.start + row / group; }
  int64_t head_of(int64_t row) const { return kv_head * group + row % group; }
  // For a row of a tree this is its slot, not its position.
  int64_t position(int64_t row) const { return item.context - item.query_len + row / group; }
  TreeRow tree_row(int64_t row) const { return TreeRow(a, index, token(row)); }
  int64_t query_at(int64_t row) const { return token(row) * a.query_stride + head_of(row) * a.head_stride; }

  // The first visible block of any row, and the one after the last.
  int64_t first_block() const { return item.oldest / kBlockKeys; }
  int64_t end_block() const { return (item.context + kBlockKeys - 1) / kBlockKeys; }

  int64_t slot(int64_t position) const {
    const int64_t page = a.tables[index * a.table_stride + position / a.page_size];
    return page * a.page_size + position % a.page_size;
  }
};

// The elements that `block_of` may need.
template <typename T>
int64_t scratch_size(const Arguments& a) {
  constexpr int64_t kScales = 2 * static_cast<int64_t>(sizeof(float) / sizeof(T));
  return kBlockKeys * (a.is_quantised ? a.width + a.value_width + kScales : a.value_width);
}

// Where `block_of` puts what it does not leave in the pages.
template <typename T>
struct BlockScratch {
  T *values, *keys;                   // [64, V], [64, D]
  float *key_scales, *value_scales;  // [64] each; the last three are there for pages of 8 bits only

  BlockScratch(const Arguments& a, T* memory)
      : values(memory),
        keys(values + kBlockKeys * a.value_width),
        key_scales(reinterpret_cast<float*>(keys + kBlockKeys * a.width)),
        value_scales(key_scales + kBlockKeys) {}
};

// Decodes a part of a block, whose first position is `first`, and copies the scales of the visible positions.
template <typename T>
void decode_block_part(Block<T>& block, const BlockScratch<T>& scratch, const Head<T>& head, int64_t part, int64_t first,
                       int64_t page_part) {
  const int64_t oldest = std::clamp<int64_t>(head.item.oldest - first, 0, kPartPositions);
  const int64_t visible = std::min(head.item.context - first, kPartPositions) - oldest;
  const auto decode = [&](T* to, float* scales, const void* pages, int64_t width) {
    const int8_t* codes = static_cast<const int8_t*>(pages) + page_part * quantised_part_bytes(width);
    to += part * kPartPositions * width;
    decode_part(to, codes, width);
    std::memcpy(scales + part * kPartPositions + oldest, codes + kPartPositions * width + oldest * sizeof(float),
                visible * sizeof(float));
    return to;
  };
  block.keys[part] = decode(scratch.keys, scratch.key_scales, head.a.keys, head.a.width);
  if (head.a.values == nullptr) return;
  block.values[part] = decode(scratch.values, scratch.value_scales, head.a.values, head.a.value_width);
}

// Slots that are visible to no row may have any content, so their values are copied to `memory` as zeros. Pages of 8 bits
// are decoded there; such slots have the scale 0. So are values that are a part of keys.
template <typename T>
Block<T> block_of(const Head<T>& head, int64_t index, T* memory) {
  const Arguments& a = head.a;
  const BlockScratch<T> scratch(a, memory);
  Block<T> block;
  block.index = index;
  const int64_t begin = index * kBlockKeys;
  block.parts = (std::min(kBlockKeys, head.item.context - begin) + kPartPositions - 1) / kPartPositions;
  if (a.is_quantised) {
    std::fill_n(scratch.key_scales, 2 * kBlockKeys, 0.0f);
    block.key_scales = scratch.key_scales;
    block.value_scales = a.values == nullptr ? scratch.key_scales : scratch.value_scales;
  }
  for (int64_t part = 0; part < kBlockParts; part++) {
    if (part >= block.parts) {
      block.keys[part] = block.keys[part - 1];
      continue;
    }
    const int64_t first = begin + part * kPartPositions, page_part = part_of(head.slot(first), a.kv_heads, head.kv_head);
    if (a.is_quantised) decode_block_part(block, scratch, head, part, first, page_part);
    else block.keys[part] = static_cast<const T*>(a.keys) + page_part * kPartPositions * a.width;
    if (a.values == nullptr) {
      T* values = scratch.values + part * kPartPositions * a.value_width;
      values_of_keys(values, block.keys[part], head.item.oldest - first, head.item.context - first, a.value_width);
      block.values[part] = values;
      continue;
    }
    if (a.is_quantised) continue;
    block.values[part] = static_cast<const T*>(a.values) + page_part * kPartPositions * a.value_width;
    if (first >= head.item.oldest && first + kPartPositions <= head.item.context) continue;
    T* copy = scratch.values + part * kPartPositions * a.value_width;
    copy_values(copy, block.values[part], head.item.oldest - first, head.item.context - first, a.value_width);
    block.values[part] = copy;
  }
  return block;
}

// The unnormalised rows of a task.
struct Rows {
  float *sums, *maxima, *totals;
  int64_t count, width;

  static int64_t size(int64_t count, int64_t width) { return count * (width + 2); }
  Rows(float* memory, int64_t a_count, int64_t a_width)
      : sums(memory), maxima(memory + a_count * a_width), totals(maxima + a_count), count(a_count), width(a_width) {}

  void clear() const {
    std::fill_n(sums, count * width, 0.0f);
    std::fill_n(maxima, count, kHidden);
    std::fill_n(totals, count, 0.0f);
  }

  // Merges the rows of a later split into these.
  void merge(const Rows& from) const {
    for (int64_t row = 0; row < count; row++) {
      const float highest = std::max(maxima[row], from.maxima[row]);
      if (highest == kHidden) continue;
      const float mine = power_of_two(maxima[row] - highest), theirs = power_of_two(from.maxima[row] - highest);
      for (int64_t d = row * width; d < (row + 1) * width; d++)
        sums[d] = std::fma(sums[d], mine, from.sums[d] * theirs);
      totals[row] = std::fma(totals[row], mine, from.totals[row] * theirs);
      maxima[row] = highest;
    }
  }
};

// Turns the products of a row and a block into weights relative to its running maximum, which is updated as its sums
// are. Not inlined: each size of a tile calls it for each of its rows.
template <bool kTrees, typename T, Shaping kShaping>
__attribute__((noinline)) void weigh(InputOf<T>* weights, const float* products, const Scores<kShaping>& shape,
                                     const Head<T>& head, int64_t row, const Block<T>& block, const Rows& rows,
                                     int64_t into) {
  const int64_t own = head.position(row), window = head.a.window, q_head = head.head_of(row);
  constexpr int kParts = kBlockKeys / kPartLanes;
  Part scores[kParts], most[kLaneParts], total[kLaneParts]{};
  std::fill_n(most, kLaneParts, splat<Part>(kHidden));
#pragma GCC unroll 8
  for (int v = 0; v < kParts; v++) {
    const int64_t first = block.index * kBlockKeys + v * kPartLanes;
    Part product = load<Part>(products + v * kPartLanes);
    if (block.key_scales != nullptr) product *= load<Part>(block.key_scales + v * kPartLanes);
    const bool in_tree = kTrees && head.tree_row(row).is_in_tree();
    const PartInts ahead = in_tree ? head.tree_row(row).aheads(first) : part_places() + static_cast<int32_t>(first - own);
    scores[v] = seen_of(ahead, window) ? shape(product, q_head, ahead) : splat<Part>(kHidden);
    most[v % kLaneParts] = larger(scores[v], most[v % kLaneParts]);
  }
  const float before = rows.maxima[into], highest = std::max(before, reduce(most, larger<Part>));
#pragma GCC unroll 8
  for (int v = 0; v < kParts; v++) {
    // Without a visible key so far there is no maximum to subtract.
    Part weight = highest == kHidden ? Part{} : power_of_two(scores[v] - highest);
    total[v % kLaneParts] += weight;
    if (block.value_scales != nullptr) weight *= load<Part>(block.value_scales + v * kPartLanes);
    const Part stored = std::is_same_v<T, InputOf<T>> ? weight : rounded(weight, static_cast<const T*>(nullptr));
    store_lanes(weights + v * kPartLanes, stored, kPartLanes);
  }
  if (highest > before) {
    const float shrink = power_of_two(before - highest);  // 0 for the first visible block
    for (int64_t d = into * rows.width; d < (into + 1) * rows.width; d++) rows.sums[d] *= shrink;
    rows.totals[into] *= shrink;
    rows.maxima[into] = highest;
  }
  rows.totals[into] += reduce(total, [](auto a, auto b) { return a + b; });
}

// One block and `count` rows of the head from `row` on, which are the rows from `into` on of the task. If there are fewer
// than kRows, the others are undefined, and so are their products.
template <bool kTrees, int kRows, typename T, Shaping kShaping>
void attend_tile(const Head<T>& head, const Scores<kShaping>& shape, const InputOf<T>* queries, int64_t row, int64_t count,
                 const Block<T>& block, const Block<T>& next, const Rows& rows, int64_t into) {
  float products[kRows * kBlockKeys];
  InputOf<T> weights[kRows * kBlockKeys];
  multiply_keys<T, kRows>(products, queries + into * head.a.width, head.a.width, block);
  for (int64_t r = 0; r < count; r++)
    weigh<kTrees, T, kShaping>(weights + r * kBlockKeys, products + r * kBlockKeys, shape, head, row + r, block, rows,
                               into + r);
  float* sums = rows.sums + into * rows.width;
  if (kFillsUpRows<T> && count < kRows) {
    float copies[kRows * kMaxHeadWidth];
    std::copy_n(sums, count * rows.width, copies);
    add_values<T, kRows>(copies, weights, rows.width, block, next);
    std::copy_n(copies, count * rows.width, sums);
  } else {
    add_values<T, kRows>(sums, weights, rows.width, block, next);
  }
}

// One block and `rows.count` rows of the head, from `first` on.
template <bool kTrees, typename T, Shaping kShaping, int kRows = kProductRows<T>>
void attend_block(const Head<T>& head, const Scores<kShaping>& shape, const InputOf<T>* queries, int64_t first,
                  const Block<T>& block, const Block<T>& next, const Rows& rows, int64_t into = 0) {
  constexpr int kLeast = kFillsUpRows<T> ? 1 : kRows;
  for (; into + kLeast <= rows.count; into += kRows) {
    const int64_t count = std::min<int64_t>(kRows, rows.count - into);
    // All keys are later than these rows.
    if (head.position(first + into + count - 1) < block.index * kBlockKeys) continue;
    attend_tile<kTrees, kRows>(head, shape, queries, first + into, count, block, next, rows, into);
  }
  if constexpr (kLeast > 1)
    if (into < rows.count)
      attend_block<kTrees, T, kShaping, kRows - 1>(head, shape, queries, first, block, next, rows, into);
}

template <typename T>
void copy_queries(const Head<T>& head, InputOf<T>* queries, int64_t first, int64_t count) {
  const int64_t width = head.a.width;
  for (int64_t row = 0; row < count; row++, queries += width) {
    const int64_t at = head.query_at(first + row);
    if (!head.a.is_wide) {
      copy_row(queries, static_cast<const T*>(head.a.query) + at, width);
    } else {
      const float* query = static_cast<const float*>(head.a.query) + at;
      for_lanes(width, [&](int64_t d, int n) {
        store_lanes(queries + d, rounded(load_lanes(query + d, n), static_cast<const T*>(nullptr)), n);
      });
    }
  }
}

// Normalises rows of a head, from `first` on, and writes them to `out`.
template <typename T>
__attribute__((noinline)) void write_rows(const Head<T>& head, int64_t first, const Rows& rows) {
  for (int64_t row = 0; row < rows.count; row++) {
    const int64_t q_head = head.head_of(first + row);
    const int64_t at = (head.token(first + row) * head.a.heads + q_head) * rows.width;
    const float factor = 1.0f / (rows.totals[row] + sink_weight(head.a, q_head, rows.maxima[row]));
    for_parts(rows.width, [&](int64_t d, int count) {
      // Which zero a sum is depends on how many keys of no weight were added: +0 makes it the positive one.
      const Part result = load<Part>(rows.sums + row * rows.width + d) * factor + 0.0f;
      if (head.a.is_wide) store_lanes(static_cast<float*>(head.a.out) + at + d, result, count);
      else store_lanes(static_cast<T*>(head.a.out) + at + d, result, count);
    });
  }
}

// The unmerged rows of a split of one of its heads.
template <typename T>
Rows partial_rows(AttentionWork& work, const AttentionTask& task, int64_t n, const Head<T>& head) {
  const int64_t first = task.partial_row + n * head.rows(), width = head.a.value_width;
  return Rows(work.partials.data() + first * Rows::size(1, width), head.rows(), width);
}

template <typename T>
void merge_splits(const Arguments& a, AttentionWork& work, const Worker& worker) {
  const std::vector<AttentionTask>& tasks = work.plan.tasks;
  worker.for_each(static_cast<int64_t>(work.plan.merged.size()), [&](int64_t index) {
    const size_t begin = work.plan.merged[index];
    const AttentionTask& task = tasks[begin];
    for (int64_t n = 0; n < task.num_heads; n++) {
      const Head<T> head(a, task.item, task.kv_head + n);
      const Rows merged = partial_rows(work, task, n, head);
      for (size_t next = begin + 1; next < tasks.size() && tasks[next].continues(task); next++)
        merged.merge(partial_rows(work, tasks[next], n, head));
      write_rows(head, 0, merged);
    }
  });
}

// Some splits of items with few tokens, one task after the other.
template <bool kTrees, typename T, Shaping kShaping>
void attend_few(const Arguments& a, AttentionWork& work, const Worker& worker) {
  if (worker.index == 0) {
    work.plan.make(a, worker.count);
    grow(work.partials, work.plan.partial_rows * Rows::size(1, a.value_width));
  }
  worker.barrier();
  const std::vector<AttentionTask>& tasks = work.plan.tasks;
  if (tasks.empty()) return;
  const Scores<kShaping> shape(a);
  const int64_t most_heads = work.plan.heads_per_task, queries_size = work.plan.most_rows * a.width;
  // Kept for the next call, as long as the thread.
  thread_local std::vector<float> own;
  thread_local std::vector<InputOf<T>> queries;
  thread_local std::vector<T> scratch;
  thread_local std::vector<Head<T>> heads;
  thread_local std::vector<Rows> rows;
  grow(own, most_heads * Rows::size(work.plan.most_rows, a.value_width));
  grow(queries, most_heads * queries_size + kProductRows<T> * a.width);
  grow(scratch, 2 * scratch_size<T>(a));
  worker.for_each(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
    const ProductScope<T> scope;
    const AttentionTask& task = tasks[index];
    heads.clear();
    rows.clear();
    for (int64_t n = 0; n < task.num_heads; n++) {
      const Head<T>& head = heads.emplace_back(a, task.item, task.kv_head + n);
      float* at = own.data() + n * Rows::size(head.rows(), a.value_width);
      rows.push_back(task.is_whole() ? Rows(at, head.rows(), a.value_width) : partial_rows(work, task, n, head));
      rows.back().clear();
      copy_queries(head, queries.data() + n * queries_size, 0, head.rows());
    }
    const int64_t begin = std::max(task.split * kSplitKeys / kBlockKeys, heads[0].first_block());
    const int64_t end = std::min((task.split + 1) * kSplitKeys / kBlockKeys, heads[0].end_block());
    // The heads of a part are next to each other, so memory is read in order.
    const int64_t places = (end - begin) * task.num_heads;
    const auto block_at = [&](int64_t place) {
      return block_of(heads[place % task.num_heads], begin + place / task.num_heads,
                      scratch.data() + place % 2 * scratch_size<T>(a));
    };
    Block<T> here = block_at(0);
    for (int64_t place = 0; place < places; place++) {
      const int64_t n = place % task.num_heads;
      const Block<T> next = place + 1 < places ? block_at(place + 1) : here;
      attend_block<kTrees>(heads[n], shape, queries.data() + n * queries_size, 0, here, next, rows[n]);
      here = next;
    }
    for (int64_t n = 0; task.is_whole() && n < task.num_heads; n++) write_rows(heads[n], 0, rows[n]);
  });
  merge_splits<T>(a, work, worker);
}

// Some rows of a head.
template <bool kTrees, typename T, Shaping kShaping>
void attend_rows(const Head<T>& head, const Scores<kShaping>& shape, int64_t first, const Rows& rows,
                 const Rows& split_rows, InputOf<T>* queries, T* scratch) {
  copy_queries(head, queries, first, rows.count);
  // Blocks before the window of the first row are not visible to the later rows either. Rows of trees are in no order.
  const int64_t oldest = head.a.window ? std::max<int64_t>(0, head.position(first) - head.a.window + 1) : 0;
  const bool in_tree = kTrees && head.tree_row(first).is_in_tree();
  const int64_t begin = in_tree ? head.first_block() : std::max(head.first_block(), oldest / kBlockKeys);
  const int64_t end = head.position(first + rows.count - 1) / kBlockKeys + 1;
  for (int64_t block = begin; block < end;) {
    // The first split is that of `rows`, as it is where splits are computed one by one.
    const Rows& into = block == begin ? rows : split_rows;
    const int64_t split_end = std::min(end, (block * kBlockKeys / kSplitKeys + 1) * (kSplitKeys / kBlockKeys));
    into.clear();
    for (; block < split_end; block++) {
      const Block<T> here = block_of(head, block, scratch);
      attend_block<kTrees>(head, shape, queries, first, here, here, into);
    }
    if (into.sums != rows.sums) rows.merge(into);
  }
  write_rows(head, first, rows);
}

template <bool kTrees, typename T, Shaping kShaping>
void attend_many(const Arguments& a, const Worker& worker) {
  const Scores<kShaping> shape(a);
  thread_local std::vector<float> memory;
  thread_local std::vector<InputOf<T>> queries;
  thread_local std::vector<T> scratch;
  grow(memory, 2 * Rows::size(kTaskRows, a.value_width));
  grow(queries, (kTaskRows + kProductRows<T>) * a.width);
  grow(scratch, scratch_size<T>(a));
  for (int64_t index = 0; index < a.items; index++) {
    const Head<T> any(a, index, 0);
    if (any.item.query_len <= kFewTokens || any.item.context == 0) continue;
    const int64_t tasks = (any.rows() + kTaskRows - 1) / kTaskRows;
    worker.for_each(a.kv_heads * tasks, [&](int64_t place) {
      const ProductScope<T> scope;
      // The last rows have the most visible keys. They come first, so that the threads end at about the same time.
      const int64_t task = a.kv_heads * tasks - 1 - place, first = task / a.kv_heads * kTaskRows;
      const int64_t count = std::min(kTaskRows, any.rows() - first);
      const Rows rows(memory.data(), count, a.value_width);
      const Rows split_rows(memory.data() + Rows::size(kTaskRows, a.value_width), count, a.value_width);
      attend_rows<kTrees>(Head<T>(a, index, task % a.kv_heads), shape, first, rows, split_rows, queries.data(),
                          scratch.data());
    });
  }
}

template <bool kTrees, typename T, Shaping kShaping>
void attend(const Arguments& a, AttentionWork& work, const Worker& worker) {
  attend_few<kTrees, T, kShaping>(a, work, worker);
  attend_many<kTrees, T, kShaping>(a, worker);
}

template <bool kTrees, typename T>
__attribute__((noinline)) void attend_as_shaped(const Arguments& a, AttentionWork& work, const Worker& worker) {
  if (a.softcap > 0) return attend<kTrees, T, Shaping::kSoftcap>(a, work, worker);
  if (a.slopes != nullptr) return attend<kTrees, T, Shaping::kAlibi>(a, work, worker);
  attend<kTrees, T, Shaping::kNone>(a, work, worker);
}

}  // namespace

template <typename T>
void paged_attention(const AttentionArguments& a, AttentionWork& work, const Worker& worker) {
  const DenormalsOf<T> mode;
  if (a.ancestors != nullptr) return attend_as_shaped<true, T>(a, work, worker);
  attend_as_shaped<false, T>(a, work, worker);
}

template void paged_attention<Bf16>(const AttentionArguments&, AttentionWork&, const Worker&);
template void paged_attention<float>(const AttentionArguments&, AttentionWork&, const Worker&);

namespace {

template <typename T>
void run(const AttentionArguments& a, int64_t threads) {
  int64_t positions = 0;
  for (int64_t index = 0; index < a.items; index++) {
    const Item item(a, index);
    positions += (item.context - item.oldest) * std::max<int64_t>(item.query_len / kFewTokens, 1);
  }
  const int64_t bytes = positions * a.kv_heads * (a.width + a.value_width) * static_cast<int64_t>(sizeof(T));
  AttentionWork work;
  run_together(threads_for(bytes, threads), [&](const Worker& worker) { paged_attention<T>(a, work, worker); });
}

}  // namespace
}  // namespace quire

QUIRE_EXPORT(void, quire_paged_attention, (const quire::AttentionArguments* a, int64_t threads),
             quire::run, (*a, threads))
