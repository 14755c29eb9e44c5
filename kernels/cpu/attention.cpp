// Causal attention over paged keys and values. kernels/paged_attention.py has the formula, and checks the arguments.
//
// Both products, of queries and keys and of weights and values, are those of packed_product.h: a block of 64 positions
// of a head is packed as two weights, its keys (64 outputs, D inputs) and its values (V outputs, 64 inputs). A row goes
// through its blocks with a running maximum (online softmax). With instructions for bfloat16, the softmax's weights are
// rounded to it before the product with bfloat16 values, as torch's own attention does.
//
// Blocks, and the splits of 512 positions after which sums are merged, are at fixed positions of the sequence. So the
// bits of a row depend only on its own sequence: not on the batch, nor on how many tokens an item has, nor on threads.
//
// Items with few tokens pack each block where they use it, and are divided among threads by split. Items with many pack
// all blocks of a head first, and are divided by rows.
//
// Letters as in kernels/paged_attention.py. A row of a head is a token and one of its G query heads: token * G + head.

#include "attention.h"

#include <algorithm>
#include <vector>

#include "attention_scores.h"
#include "attention_trees.h"
#include "product_tile.h"

namespace quire {
namespace {

using Arguments = AttentionArguments;

constexpr int64_t kBlockKeys = 64;
constexpr int64_t kKeyBlocks = kBlockKeys / kBlockOutputs;
// The inputs of a key whose products are summed one after the other.
constexpr int64_t kSummedInputs = 128;
// The rows of a task of a long item: their sums stay in L2, while keys and values stream through L1.
constexpr int64_t kTaskRows = 96;
// The bytes of keys and values that are packed at a time, over several heads. A head of a long sequence may need more.
constexpr int64_t kScratchBytes = 32 << 20;

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
  const T* query(int64_t row) const {
    return static_cast<const T*>(a.query) + token(row) * a.query_stride + head_of(row) * a.head_stride;
  }

  // The first visible block of any row, and the one after the last.
  int64_t first_block() const { return item.oldest / kBlockKeys; }
  int64_t end_block() const { return (item.context + kBlockKeys - 1) / kBlockKeys; }

  // The positions of a block that the context has, rounded up to 16.
  int64_t keys_in(int64_t block) const {
    const int64_t keys = std::min(kBlockKeys, item.context - block * kBlockKeys);
    return (keys + kBlockOutputs - 1) / kBlockOutputs * kBlockOutputs;
  }

  // The slot of a position, as an index of a page's elements [S, K].
  int64_t slot(int64_t position) const {
    const int64_t page = a.tables[index * a.table_stride + position / a.page_size];
    return (page * a.page_size + position % a.page_size) * a.kv_heads + kv_head;
  }
};

// A packed block of a head.
template <typename T>
struct PackedBlock {
  T *keys, *values;

  static int64_t size(const Arguments& a) { return kBlockKeys * (a.width + a.value_width); }
  PackedBlock(T* memory, const Arguments& a) : keys(memory), values(memory + kBlockKeys * a.width) {}

  void fill(const Head<T>& head, int64_t block) const {
    for (int64_t key = 0; key < head.keys_in(block); key += kBlockOutputs) fill(head, block, key);
  }

  // Packs 16 positions, from the key `from` of a block on: they are in one page. Slots that are visible to no row may
  // have any content, so they are read as zeros.
  void fill(const Head<T>& head, int64_t block, int64_t from) const {
    const Arguments& a = head.a;
    const int64_t first = block * kBlockKeys + from, slot = head.slot(first);
    // What one head has of a page is not in one piece, which the CPU would fetch ahead by itself.
    if (first + kBlockOutputs < head.item.context) fetch(head, head.slot(first + kBlockOutputs));
    const T *key_rows[kBlockOutputs], *value_rows[kBlockOutputs];
    for (int64_t key = 0; key < kBlockOutputs; key++) {
      const bool visible = first + key >= head.item.oldest && first + key < head.item.context;
      const int64_t offset = slot + key * a.kv_heads;
      key_rows[key] = visible ? static_cast<const T*>(a.keys) + offset * a.width : zeros();
      value_rows[key] = visible ? static_cast<const T*>(a.values) + offset * a.value_width : zeros();
    }
    pack_keys(key_rows, a.width, keys + from * a.width);
    pack_values(value_rows, a.value_width, values + from * kBlockOutputs);
  }

 private:
  static const T* zeros() {
    static const T row[kMaxHeadWidth] = {};
    return row;
  }

  static void fetch(const Head<T>& head, int64_t slot) {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t key = 0; key < kBlockOutputs; key++, slot += head.a.kv_heads) {
      for (int64_t d = 0; d < head.a.width; d += kLine)
        __builtin_prefetch(static_cast<const T*>(head.a.keys) + slot * head.a.width + d);
      for (int64_t d = 0; d < head.a.value_width; d += kLine)
        __builtin_prefetch(static_cast<const T*>(head.a.values) + slot * head.a.value_width + d);
    }
  }

  // A step of a key is 4 bytes for both types: two elements of bfloat16, or one float.
  static void pack_keys(const T* const (&rows)[kBlockOutputs], int64_t width, T* to) {
    const int64_t steps = width * static_cast<int64_t>(sizeof(T)) / 4;
    for (int64_t step = 0; step < steps; step += kLanes) {
      // Widths are multiples of 16, so of bfloat16 the last 8 steps may be half a square.
      const int64_t count = std::min<int64_t>(kLanes, steps - step);
      Words square[kLanes];
      for (int i = 0; i < kLanes; i++) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(rows[i]) + step;
        if (count == kLanes) square[i] = load<Words>(from);
        else std::memcpy(&(square[i] = Words{}), from, kLanes / 2 * sizeof(uint32_t));
      }
      transpose(square);
      std::memcpy(reinterpret_cast<uint32_t*>(to) + step * kBlockOutputs, square, count * sizeof(Words));
    }
  }

  // Row by row, since the distance between two of them is often a power of two, so that a cache could not hold them all.
  static void pack_values(const float* const (&rows)[kBlockOutputs], int64_t width, float* to) {
    for (int64_t i = 0; i < kBlockOutputs; i++)
      for (int64_t d = 0; d < width; d += kBlockOutputs) {
        const Floats row = load<Floats>(rows[i] + d);
        std::memcpy(to + d * kBlockKeys + i * kBlockOutputs, &row, sizeof(row));
      }
  }

  static void pack_values(const Bf16* const (&rows)[kBlockOutputs], int64_t width, Bf16* to) {
    for (int64_t i = 0; i < kBlockOutputs; i += 2)
      for (int64_t d = 0; d < width; d += kBlockOutputs) {
        const Words low = __builtin_convertvector(load<Halves>(rows[i] + d), Words);
        const Words both = low | (__builtin_convertvector(load<Halves>(rows[i + 1] + d), Words) << 16);
        std::memcpy(to + d * kBlockKeys + i * kBlockOutputs, &both, sizeof(both));
      }
  }
};

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
      const float mine = std::exp2(maxima[row] - highest), theirs = std::exp2(from.maxima[row] - highest);
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
                                     const Head<T>& head, int64_t row, int64_t block, const Rows& rows, int64_t into) {
  const Ints lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t own = head.position(row), window = head.a.window, q_head = head.head_of(row);
  Floats scores[kKeyBlocks], highest_lanes = splat(kHidden);
  for (int64_t v = 0; v < kKeyBlocks; v++) {
    const int64_t first = block * kBlockKeys + v * kLanes;
    const Floats product = load<Floats>(products + v * kLanes);
    Ints seen;
    if (kTrees && head.tree_row(row).is_in_tree()) {
      const Ints ahead = head.tree_row(row).aheads(first);
      scores[v] = shape(product, q_head, ahead);
      seen = seen_of(ahead, window);
    } else {
      scores[v] = shape(product, q_head, first - own);
      const Ints ahead = lanes + static_cast<int32_t>(first - own);
      seen = seen_of(ahead, window);
    }
    scores[v] = seen ? scores[v] : splat(kHidden);
    highest_lanes = larger(scores[v], highest_lanes);
  }
  const float before = rows.maxima[into], highest = std::max(before, reduce(highest_lanes, larger));
  Floats total{};
  for (int64_t v = 0; v < kKeyBlocks; v++) {
    // Without a visible key so far there is no maximum to subtract.
    const Floats weight = highest == kHidden ? Floats{} : power_of_two(scores[v] - highest);
    total += weight;
    store_lanes(weights + v * kLanes, weight, kLanes);
  }
  if (highest > before) {
    const float shrink = std::exp2(before - highest);  // 0 for the first visible block
    for (int64_t d = into * rows.width; d < (into + 1) * rows.width; d++) rows.sums[d] *= shrink;
    rows.totals[into] *= shrink;
    rows.maxima[into] = highest;
  }
  rows.totals[into] += reduce(total, [](Floats a, Floats b) { return a + b; });
}

// One packed block and the rows row..row + kRows of the head, which are the rows from `into` on of the task.
template <bool kTrees, int kRows, typename T, Shaping kShaping>
void attend_tile(const Head<T>& head, const Scores<kShaping>& shape, const InputOf<T>* queries, int64_t row,
                 const PackedBlock<T>& packed, int64_t block, const Rows& rows, int64_t into) {
  const int64_t keys = head.keys_in(block);
  const InputOf<T>*query_rows[kRows], *weight_rows[kRows];
  float products[kRows * kBlockKeys] = {};
  InputOf<T> weights[kRows * kBlockKeys];
  for (int r = 0; r < kRows; r++) weight_rows[r] = weights + r * kBlockKeys;
  // Long sums lose more than those of their parts.
  for (int64_t first = 0; first < head.a.width; first += kSummedInputs) {
    float part[kRows * kBlockKeys] = {};
    for (int r = 0; r < kRows; r++) query_rows[r] = queries + (into + r) * head.a.width + first;
    add_blocks<T, kRows>(part, kBlockKeys, packed.keys + first * kBlockOutputs, head.a.width * kBlockOutputs, keys / kBlockOutputs,
                         query_rows, std::min(kSummedInputs, head.a.width - first));
    for (int i = 0; i < kRows * kBlockKeys; i++) products[i] += part[i];
  }
  for (int r = 0; r < kRows; r++)
    weigh<kTrees, T, kShaping>(weights + r * kBlockKeys, products + r * kBlockKeys, shape, head, row + r, block, rows,
                               into + r);
  add_blocks<T, kRows>(rows.sums + into * rows.width, rows.width, packed.values, kBlockKeys * kBlockOutputs,
                       rows.width / kBlockOutputs, weight_rows, keys);
}

// One packed block and `rows.count` rows of the head, from `first` on.
template <bool kTrees, typename T, Shaping kShaping, int kRows = Product<T>::kTileRows>
void attend_block(const Head<T>& head, const Scores<kShaping>& shape, const InputOf<T>* queries, int64_t first,
                  const PackedBlock<T>& packed, int64_t block, const Rows& rows, int64_t into = 0) {
  for (; into + kRows <= rows.count; into += kRows) {
    // All keys are later than these rows.
    if (head.position(first + into + kRows - 1) < block * kBlockKeys) continue;
    attend_tile<kTrees, kRows>(head, shape, queries, first + into, packed, block, rows, into);
  }
  if constexpr (kRows > 1)
    if (into < rows.count)
      attend_block<kTrees, T, kShaping, kRows - 1>(head, shape, queries, first, packed, block, rows, into);
}

template <typename T>
void copy_queries(const Head<T>& head, InputOf<T>* queries, int64_t first, int64_t count) {
  for (int64_t row = 0; row < count; row++) copy_row(queries + row * head.a.width, head.query(first + row), head.a.width);
}

// Normalises rows of a head, from `first` on, and writes them to `out`.
template <typename T>
__attribute__((noinline)) void write_rows(const Head<T>& head, int64_t first, const Rows& rows) {
  for (int64_t row = 0; row < rows.count; row++) {
    const int64_t q_head = head.head_of(first + row);
    T* out = static_cast<T*>(head.a.out) + (head.token(first + row) * head.a.heads + q_head) * rows.width;
    const float factor = 1.0f / (rows.totals[row] + sink_weight(head.a, q_head, rows.maxima[row]));
    for_lanes(rows.width, [&](int64_t d, int count) {
      store_lanes(out + d, load<Floats>(rows.sums + row * rows.width + d) * factor, count);
    });
  }
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
  const auto partial_rows = [&](const AttentionTask& task, int64_t n, int64_t count) {
    return Rows(work.partials.data() + (task.partial_row + n * count) * Rows::size(1, a.value_width), count, a.value_width);
  };
  const int64_t most_heads = work.plan.heads_per_task, queries_size = work.plan.most_rows * a.width;
  // Kept for the next call, as long as the thread.
  thread_local std::vector<float> own;
  thread_local std::vector<InputOf<T>> queries;
  thread_local std::vector<T> memory;
  thread_local std::vector<Head<T>> heads;
  thread_local std::vector<Rows> rows;
  grow(own, most_heads * Rows::size(work.plan.most_rows, a.value_width));
  grow(queries, most_heads * queries_size);
  grow(memory, most_heads * PackedBlock<T>::size(a));
  worker.for_each(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
    const AttentionTask& task = tasks[index];
    heads.clear();
    rows.clear();
    for (int64_t n = 0; n < task.num_heads; n++) {
      const Head<T>& head = heads.emplace_back(a, task.item, task.kv_head + n);
      float* at = own.data() + n * Rows::size(head.rows(), a.value_width);
      rows.push_back(task.is_whole() ? Rows(at, head.rows(), a.value_width) : partial_rows(task, n, head.rows()));
      rows.back().clear();
      copy_queries(head, queries.data() + n * queries_size, 0, head.rows());
    }
    const int64_t first = task.split * kSplitKeys / kBlockKeys, end = first + kSplitKeys / kBlockKeys;
    const auto packed = [&](int64_t n) { return PackedBlock<T>(memory.data() + n * PackedBlock<T>::size(a), a); };
    for (int64_t block = std::max(first, heads[0].first_block()); block < std::min(end, heads[0].end_block()); block++) {
      // All heads of 16 positions are in one piece of a page.
      for (int64_t key = 0; key < heads[0].keys_in(block); key += kBlockOutputs)
        for (int64_t n = 0; n < task.num_heads; n++) packed(n).fill(heads[n], block, key);
      for (int64_t n = 0; n < task.num_heads; n++)
        attend_block<kTrees>(heads[n], shape, queries.data() + n * queries_size, 0, packed(n), block, rows[n]);
    }
    for (int64_t n = 0; task.is_whole() && n < task.num_heads; n++) write_rows(heads[n], 0, rows[n]);
  });
  worker.for_each(static_cast<int64_t>(work.plan.merged.size()), [&](int64_t index) {
    const size_t begin = work.plan.merged[index];
    const AttentionTask& task = tasks[begin];
    for (int64_t n = 0; n < task.num_heads; n++) {
      const Head<T> head(a, task.item, task.kv_head + n);
      const Rows merged = partial_rows(task, n, head.rows());
      for (size_t next = begin + 1; next < tasks.size() && tasks[next].continues(task); next++)
        merged.merge(partial_rows(tasks[next], n, head.rows()));
      write_rows(head, 0, merged);
    }
  });
}

// Some rows of a head, whose blocks are packed from `packed` on.
template <bool kTrees, typename T, Shaping kShaping>
void attend_rows(const Head<T>& head, const Scores<kShaping>& shape, int64_t first, T* packed, const Rows& rows,
                 const Rows& split_rows, InputOf<T>* queries) {
  copy_queries(head, queries, first, rows.count);
  const int64_t packed_begin = head.first_block(), size = PackedBlock<T>::size(head.a);
  // Blocks before the window of the first row are not visible to the later rows either. Rows of trees are in no order.
  const int64_t oldest = head.a.window ? std::max<int64_t>(0, head.position(first) - head.a.window + 1) : 0;
  const bool in_tree = kTrees && head.tree_row(first).is_in_tree();
  const int64_t begin = in_tree ? packed_begin : std::max(packed_begin, oldest / kBlockKeys);
  const int64_t end = head.position(first + rows.count - 1) / kBlockKeys + 1;
  for (int64_t block = begin; block < end;) {
    // The first split is that of `rows`, as it is where splits are computed one by one.
    const Rows& into = block == begin ? rows : split_rows;
    const int64_t split_end = std::min(end, (block * kBlockKeys / kSplitKeys + 1) * (kSplitKeys / kBlockKeys));
    into.clear();
    for (; block < split_end; block++)
      attend_block<kTrees>(head, shape, queries, first, PackedBlock<T>(packed + (block - packed_begin) * size, head.a), block,
                           into);
    if (into.sums != rows.sums) rows.merge(into);
  }
  write_rows(head, first, rows);
}

// The attention of some heads of an item with many tokens.
template <bool kTrees, typename T, Shaping kShaping>
void attend_heads(const Arguments& a, int64_t index, int64_t first_head, int64_t num_heads, T* scratch,
                  const Worker& worker) {
  const Head<T> any(a, index, first_head);
  const Scores<kShaping> shape(a);
  const int64_t begin = any.first_block(), blocks = any.end_block() - begin, size = PackedBlock<T>::size(a);
  const int64_t tasks = (any.rows() + kTaskRows - 1) / kTaskRows;
  thread_local std::vector<float> memory;
  thread_local std::vector<InputOf<T>> queries;
  grow(memory, 2 * Rows::size(kTaskRows, a.value_width));
  grow(queries, kTaskRows * a.width);
  worker.for_shares(num_heads * blocks, [&](int64_t task) {
    PackedBlock<T>(scratch + task * size, a).fill(Head<T>(a, index, first_head + task / blocks), begin + task % blocks);
  });
  worker.for_each(num_heads * tasks, [&](int64_t place) {
    // The last rows have the most visible keys. They come first, so that the threads end at about the same time.
    const int64_t task = num_heads * tasks - 1 - place, number = task % num_heads, first = task / num_heads * kTaskRows;
    const int64_t count = std::min(kTaskRows, any.rows() - first);
    const Rows rows(memory.data(), count, a.value_width);
    const Rows split_rows(memory.data() + Rows::size(kTaskRows, a.value_width), count, a.value_width);
    attend_rows<kTrees>(Head<T>(a, index, first_head + number), shape, first, scratch + number * blocks * size, rows,
                        split_rows, queries.data());
  });
}

template <bool kTrees, typename T, Shaping kShaping>
void attend_many(const Arguments& a, AttentionWork& work, const Worker& worker) {
  for (int64_t index = 0; index < a.items; index++) {
    const Head<T> any(a, index, 0);
    if (any.item.query_len <= kFewTokens || any.item.context == 0) continue;
    const int64_t size = (any.end_block() - any.first_block()) * PackedBlock<T>::size(a);
    const int64_t room = kScratchBytes / static_cast<int64_t>(sizeof(T));
    const int64_t heads = std::clamp<int64_t>(room / size, 1, a.kv_heads);
    if (worker.index == 0) work.reserve_packed(heads * size * sizeof(T));
    worker.barrier();
    for (int64_t head = 0; head < a.kv_heads; head += heads)
      attend_heads<kTrees, T, kShaping>(a, index, head, std::min(heads, a.kv_heads - head),
                                        reinterpret_cast<T*>(work.packed.get()), worker);
  }
}

template <bool kTrees, typename T, Shaping kShaping>
void attend(const Arguments& a, AttentionWork& work, const Worker& worker) {
  attend_few<kTrees, T, kShaping>(a, work, worker);
  attend_many<kTrees, T, kShaping>(a, work, worker);
}

template <bool kTrees, typename T>
void attend_as_shaped(const Arguments& a, AttentionWork& work, const Worker& worker) {
  if (a.softcap > 0) return attend<kTrees, T, Shaping::kSoftcap>(a, work, worker);
  if (a.slopes != nullptr) return attend<kTrees, T, Shaping::kAlibi>(a, work, worker);
  attend<kTrees, T, Shaping::kNone>(a, work, worker);
}

}  // namespace

template <typename T>
void paged_attention(const AttentionArguments& a, AttentionWork& work, const Worker& worker) {
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

extern "C" void quire_paged_attention_bf16(const quire::AttentionArguments* a, int64_t threads) {
  quire::run<quire::Bf16>(*a, threads);
}
extern "C" void quire_paged_attention_f32(const quire::AttentionArguments* a, int64_t threads) {
  quire::run<float>(*a, threads);
}
