// Causal attention of items with few new tokens over paged keys and values: each byte of the pages is read once.
// kernels/paged_attention.py has the formula, and checks the arguments.
//
// A task is one chunk of one sequence, for all or some key-value heads, with the query rows that share each head. It
// processes its keys in blocks of 16 with a running maximum (online softmax); chunks are merged at the end. Blocks and
// chunks are at fixed positions of the sequence, so the bits of a row depend only on its own sequence: not on the
// batch, not on the number of threads, not on how many tokens are verified at once.
//
// Letters as in kernels/paged_attention.py; R: query rows of a head, G * Q of them.

#include <algorithm>
#include <vector>

#include "attention_arguments.h"
#include "attention_block.h"
#include "attention_scores.h"
#include "attention_trees.h"
#include "threads.h"

namespace quire {
namespace {

// Long enough that the cost of merging is negligible, short enough that one long sequence uses many cores.
constexpr int64_t kChunkKeys = 512;

using Arguments = AttentionArguments;

struct Task {
  int64_t item, kv_head, num_heads, chunk;  // heads kv_head and following
  int64_t partial;  // the offset of its unmerged rows, in floats; -1: it is the only chunk and writes to `out`
};

// The data that a task reads.
template <typename T>
struct Source {
  const Arguments& a;
  const Task& task;
  Item item;
  int64_t kv_head, group, begin, end;

  Source(const Arguments& arguments, const Task& a_task)
      : a(arguments), task(a_task), item(a, task.item), kv_head(task.kv_head) {
    group = a.heads / a.kv_heads;
    begin = std::max(item.oldest, task.chunk * kChunkKeys);
    end = std::min(item.context, (task.chunk + 1) * kChunkKeys);
  }

  // The offset of a position's slot and this head, in heads.
  int64_t offset_of(int64_t position) const {
    const int64_t page = a.tables[task.item * a.table_stride + position / a.page_size];
    return (page * a.page_size + position % a.page_size) * a.kv_heads + kv_head;
  }

  Block<T> block_at(int64_t position) const {
    Block<T> block;
    const int64_t base = offset_of(position);
    for (int64_t i = 0; i < kBlockKeys; i++) {
      // Slots outside the range may have any content: a key inside replaces them, and its weight becomes 0.
      const int64_t inside = std::clamp(position + i, begin, end - 1) - position;
      const int64_t offset = base + inside * a.kv_heads;
      block.keys[i] = static_cast<const T*>(a.keys) + offset * a.width;
      block.values[i] = static_cast<const T*>(a.values) + offset * a.value_width;
    }
    return block;
  }

  const T* query(int64_t row) const {
    const int64_t token = item.start + row % item.query_len;
    return static_cast<const T*>(a.query) + token * a.query_stride + head_of(row) * a.head_stride;
  }

  TreeRow tree_row(int64_t row) const { return TreeRow(a, task.item, item.start + row % item.query_len); }
  int64_t head_of(int64_t row) const { return kv_head * group + row / item.query_len; }
  int64_t position_of(int64_t row) const { return item.context - item.query_len + row % item.query_len; }

  // `scores`, with kHidden for keys that are not visible to the row.
  Floats visible(Floats scores, int64_t row, int64_t position) const {
    const Ints lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t own = position_of(row);
    const int64_t first = a.window ? std::max(begin, own - a.window + 1) : begin;
    const int32_t low = static_cast<int32_t>(first - position);
    const int32_t high = static_cast<int32_t>(std::min(own + 1, end) - position);
    return (lanes >= low) & (lanes < high) ? scores : splat(kHidden);
  }

  // The same for a row of a tree; the keys are `ahead` of it.
  Floats visible_in_tree(Floats scores, Ints ahead, int64_t position) const {
    const Ints lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int32_t low = static_cast<int32_t>(begin - position), high = static_cast<int32_t>(end - position);
    return seen_of(ahead, a.window) & (lanes >= low) & (lanes < high) ? scores : splat(kHidden);
  }
};

// The scores of a row and 16 keys, from their products; kHidden for keys that are not visible to the row.
template <bool kTrees, typename T, Shaping kShaping>
Floats scores_of(const Source<T>& source, const Scores<kShaping>& shape, Floats products, int64_t row,
                 int64_t position) {
  if constexpr (kTrees) {
    const TreeRow tree = source.tree_row(row);
    if (tree.is_in_tree()) {
      const Ints ahead = tree.aheads(position);
      return source.visible_in_tree(shape(products, source.head_of(row), ahead), ahead, position);
    }
  }
  const Floats scores = shape(products, source.head_of(row), position - source.position_of(row));
  return source.visible(scores, row, position);
}

template <bool kTrees, int kRows, typename T, Shaping kShaping>
void attend_block(const Source<T>& source, const Scores<kShaping>& shape, const Rows& rows, int64_t row,
                  const Block<T>& block, int64_t position) {
  const T* queries[kRows];
  for (int r = 0; r < kRows; r++) queries[r] = source.query(row + r);
  Floats scores[kRows];
  block_scores<kRows, T>(scores, queries, block, source.a.width);
  float weights[kRows * kBlockKeys];
  for (int r = 0; r < kRows; r++) {
    const Floats seen = scores_of<kTrees>(source, shape, scores[r], row + r, position);
    const Floats weight = block_weights(seen, rows, row + r);
    std::memcpy(weights + r * kBlockKeys, &weight, sizeof(weight));
  }
  add_values<kRows>(rows.sums + row * rows.padded, rows.padded, weights, block.values, source.a.value_width);
}

template <bool kTrees, typename T, Shaping kShaping>
void attend_chunk(const Arguments& a, const Task& task, float* memory, T* copies) {
  Source<T> source(a, task);
  const Scores<kShaping> shape(a);
  const int64_t num_rows = source.group * source.item.query_len, size = Rows::size(num_rows, a.value_width);
  for (int64_t head = 0; head < task.num_heads; head++) {
    const Rows rows(memory + head * size, num_rows, a.value_width);
    std::fill(rows.sums, rows.maxima, 0.0f);
    std::fill(rows.maxima, rows.totals, kHidden);
    std::fill(rows.totals, rows.totals + num_rows, 0.0f);
  }
  for (int64_t at = source.begin / kBlockKeys * kBlockKeys; at < source.end; at += kBlockKeys)
    for (int64_t head = 0; head < task.num_heads; head++) {
      source.kv_head = task.kv_head + head;
      const Rows rows(memory + head * size, num_rows, a.value_width);
      Block<T> block = source.block_at(at);
      if (num_rows > 2) block.copy_to(copies, a.width, a.value_width);
      int64_t row = 0;
      for (; row + 2 <= num_rows; row += 2) attend_block<kTrees, 2>(source, shape, rows, row, block, at);
      if (row < num_rows) attend_block<kTrees, 1>(source, shape, rows, row, block, at);
    }
}

// Normalise the rows and write them.
template <typename T>
void write_rows(const Arguments& a, const Task& task, int64_t kv_head, const Rows& rows) {
  const Item item(a, task.item);
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t row = 0; row < group * item.query_len; row++) {
    const int64_t token = item.start + row % item.query_len;
    const int64_t head = kv_head * group + row / item.query_len;
    T* out = static_cast<T*>(a.out) + (token * a.heads + head) * a.value_width;
    const float factor = 1.0f / (rows.totals[row] + sink_weight(a, head, rows.maxima[row]));
    for (int64_t d = 0; d < a.value_width; d += kPair) {
      const float* sums = rows.sums + row * rows.padded + d;
      store_pair(out + d, Pair{load<Floats>(sums) * factor, load<Floats>(sums + kLanes) * factor},
                 static_cast<int>(std::min<int64_t>(kPair, a.value_width - d)));
    }
  }
}

// All tasks, and the amount of work in them.
struct Plan {
  std::vector<Task> tasks;
  std::vector<size_t> merged;  // the first task of each sequence and heads with several chunks
  int64_t partial_floats = 0, positions = 0, most_rows = 0, heads_per_task;

  Plan(const Arguments& a, int64_t heads) : heads_per_task(heads) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t index = 0; index < a.items; index++) {
      const Item item(a, index);
      if (item.query_len == 0 || item.query_len > a.max_query || item.context == 0) continue;
      const int64_t first = item.oldest / kChunkKeys, last = (item.context - 1) / kChunkKeys;
      const int64_t size = Rows::size(group * item.query_len, a.value_width);
      most_rows = std::max(most_rows, group * item.query_len);
      positions += item.context - item.oldest;
      for (int64_t kv_head = 0; kv_head < a.kv_heads; kv_head += heads) {
        const int64_t num_heads = std::min(heads, a.kv_heads - kv_head);
        if (last > first) merged.push_back(tasks.size());
        for (int64_t chunk = first; chunk <= last; chunk++) {
          tasks.push_back({index, kv_head, num_heads, chunk, last > first ? partial_floats : -1});
          if (last > first) partial_floats += num_heads * size;
        }
      }
    }
  }
};

template <bool kTrees, typename T, Shaping kShaping>
void attend(const Arguments& a) {
  const int64_t group = a.heads / a.kv_heads;
  Plan plan(a, a.kv_heads);
  // Heads are divided only if there are threads without work: together they read memory in order.
  while (static_cast<int64_t>(plan.tasks.size()) < 2 * a.threads && plan.heads_per_task > 1 && a.threads > 1)
    plan = Plan(a, (plan.heads_per_task + 1) / 2);
  const std::vector<Task>& tasks = plan.tasks;
  std::vector<float> partials(plan.partial_floats);
  const int64_t bytes = plan.positions * a.kv_heads * (a.width + a.value_width) * static_cast<int64_t>(sizeof(T));
  const int threads = threads_for(bytes, a.threads);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> own(plan.heads_per_task * Rows::size(plan.most_rows, a.value_width));
    std::vector<T> copies(kBlockKeys * (a.width + a.value_width));
#pragma omp for schedule(dynamic, 1)
    for (size_t index = 0; index < tasks.size(); index++) {
      const Task& task = tasks[index];
      const int64_t num_rows = group * Item(a, task.item).query_len, size = Rows::size(num_rows, a.value_width);
      const bool only = task.partial < 0;
      float* memory = only ? own.data() : partials.data() + task.partial;
      attend_chunk<kTrees, T, kShaping>(a, task, memory, copies.data());
      for (int64_t head = 0; only && head < task.num_heads; head++)
        write_rows<T>(a, task, task.kv_head + head, Rows(memory + head * size, num_rows, a.value_width));
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t index = 0; index < plan.merged.size(); index++) {
      const size_t first = plan.merged[index];
      const Task& task = tasks[first];
      const int64_t num_rows = group * Item(a, task.item).query_len, size = Rows::size(num_rows, a.value_width);
      for (int64_t head = 0; head < task.num_heads; head++) {
        const Rows rows(partials.data() + task.partial + head * size, num_rows, a.value_width);
        for (size_t next = first + 1; next < tasks.size() && tasks[next].item == task.item &&
                                      tasks[next].kv_head == task.kv_head; next++)
          merge_rows(rows, Rows(partials.data() + tasks[next].partial + head * size, num_rows, a.value_width),
                     num_rows);
        write_rows<T>(a, task, task.kv_head + head, rows);
      }
    }
  }
}

template <bool kTrees, typename T>
void attend_as_shaped(const Arguments& a) {
  if (a.softcap > 0) return attend<kTrees, T, Shaping::kSoftcap>(a);
  if (a.slopes != nullptr) return attend<kTrees, T, Shaping::kAlibi>(a);
  attend<kTrees, T, Shaping::kNone>(a);
}

template <typename T>
void attend_any(const Arguments& a) {
  if (a.ancestors != nullptr) return attend_as_shaped<true, T>(a);
  attend_as_shaped<false, T>(a);
}

}  // namespace
}  // namespace quire

extern "C" void quire_paged_attention_bf16(const quire::Arguments* a) { quire::attend_any<quire::Bf16>(*a); }
extern "C" void quire_paged_attention_f32(const quire::Arguments* a) { quire::attend_any<float>(*a); }
