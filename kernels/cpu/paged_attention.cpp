// Causal attention of items with few new tokens over paged keys and values: each byte of them is read once,
// where it lies. kernels/paged_attention.py has the formula and the checks; nothing is checked here.
//
// A task is one chunk of one sequence, for all key-value heads or some, with the query rows that share each. It
// goes through its keys in blocks of 16 with a running maximum (online softmax); chunks are merged at the end.
// Blocks and chunks lie at fixed positions of the sequence, so the bits of a row depend on nothing but its own
// sequence: not on the batch, not on the number of threads, not on how many tokens are verified at once.
//
// Letters as in kernels/paged_attention.py; R: query rows of a head, G * Q of them.

#include <algorithm>
#include <vector>

#include "attention_arguments.h"
#include "attention_block.h"
#include "threads.h"

namespace quire {
namespace {

// Long enough that merging costs nothing, short enough that one long sequence occupies many cores.
constexpr int64_t kChunkKeys = 512;

using Arguments = AttentionArguments;

struct Task {
  int64_t item, kv_head, num_heads, chunk;  // heads kv_head and following
  int64_t partial;  // where its unmerged rows are, in floats; -1: the only chunk, written to `out`
};

// What a task reads, resolved.
template <typename T>
struct Source {
  const Arguments& a;
  const Task& task;
  Item item;
  int64_t kv_head, group, token_stride, begin, end;

  Source(const Arguments& arguments, const Task& a_task)
      : a(arguments), task(a_task), item(a, task.item), kv_head(task.kv_head) {
    group = a.heads / a.kv_heads;
    token_stride = a.kv_heads * a.width;
    begin = std::max(item.oldest, task.chunk * kChunkKeys);
    end = std::min(item.context, (task.chunk + 1) * kChunkKeys);
  }

  int64_t offset_of(int64_t position) const {
    const int64_t page = a.tables[task.item * a.table_stride + position / a.page_size];
    return (page * a.page_size + position % a.page_size) * token_stride + kv_head * a.width;
  }

  Block<T> block_at(int64_t position) const {
    Block<T> block;
    const int64_t base = offset_of(position);
    for (int64_t i = 0; i < kBlockKeys; i++) {
      // Slots outside the range may hold anything: a key inside stands in, and its weight becomes 0.
      const int64_t inside = std::clamp(position + i, begin, end - 1) - position;
      block.keys[i] = static_cast<const T*>(a.keys) + base + inside * token_stride;
      block.values[i] = static_cast<const T*>(a.values) + base + inside * token_stride;
    }
    return block;
  }

  const T* query(int64_t row) const {
    const int64_t token = item.start + row % item.query_len, head = kv_head * group + row / item.query_len;
    return static_cast<const T*>(a.query) + token * a.query_stride + head * a.head_stride;
  }

  // `scores` where the row sees the key, else kHidden.
  Floats visible(Floats scores, int64_t row, int64_t position) const {
    const Ints lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t own = item.context - item.query_len + row % item.query_len;
    const int64_t first = a.window ? std::max(begin, own - a.window + 1) : begin;
    const int32_t low = static_cast<int32_t>(first - position);
    const int32_t high = static_cast<int32_t>(std::min(own + 1, end) - position);
    return (lanes >= low) & (lanes < high) ? scores : splat(kHidden);
  }
};

template <int kRows, typename T>
void attend_block(const Source<T>& source, const Rows& rows, int64_t row, const Block<T>& block, int64_t position) {
  const float scale = static_cast<float>(source.a.scale * 1.4426950408889634);  // in powers of two
  const T* queries[kRows];
  for (int r = 0; r < kRows; r++) queries[r] = source.query(row + r);
  Floats scores[kRows];
  block_scores<kRows, T>(scores, queries, block, source.a.width);
  float weights[kRows * kBlockKeys];
  for (int r = 0; r < kRows; r++) {
    const Floats weight = block_weights(source.visible(scores[r] * scale, row + r, position), rows, row + r);
    std::memcpy(weights + r * kBlockKeys, &weight, sizeof(weight));
  }
  add_values<kRows>(rows.sums + row * rows.padded, rows.padded, weights, block.values, source.a.width);
}

template <typename T>
void attend_chunk(const Arguments& a, const Task& task, float* memory, T* copies) {
  Source<T> source(a, task);
  const int64_t num_rows = source.group * source.item.query_len, size = Rows::size(num_rows, a.width);
  for (int64_t head = 0; head < task.num_heads; head++) {
    const Rows rows(memory + head * size, num_rows, a.width);
    std::fill(rows.sums, rows.maxima, 0.0f);
    std::fill(rows.maxima, rows.totals, kHidden);
    std::fill(rows.totals, rows.totals + num_rows, 0.0f);
  }
  for (int64_t at = source.begin / kBlockKeys * kBlockKeys; at < source.end; at += kBlockKeys)
    for (int64_t head = 0; head < task.num_heads; head++) {
      source.kv_head = task.kv_head + head;
      const Rows rows(memory + head * size, num_rows, a.width);
      Block<T> block = source.block_at(at);
      if (num_rows > 2) block.copy_to(copies, a.width);
      int64_t row = 0;
      for (; row + 2 <= num_rows; row += 2) attend_block<2>(source, rows, row, block, at);
      if (row < num_rows) attend_block<1>(source, rows, row, block, at);
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
    T* out = static_cast<T*>(a.out) + (token * a.heads + head) * a.width;
    const float factor = 1.0f / rows.totals[row];
    for (int64_t d = 0; d < a.width; d += kPair) {
      const float* sums = rows.sums + row * rows.padded + d;
      store_pair(out + d, Pair{load<Floats>(sums) * factor, load<Floats>(sums + kLanes) * factor},
                 static_cast<int>(std::min<int64_t>(kPair, a.width - d)));
    }
  }
}

// All tasks, and the work in them.
struct Plan {
  std::vector<Task> tasks;
  std::vector<size_t> merged;  // the first task of each sequence and heads that have several chunks
  int64_t partial_floats = 0, positions = 0, most_rows = 0, heads_per_task;

  Plan(const Arguments& a, int64_t heads) : heads_per_task(heads) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t index = 0; index < a.items; index++) {
      const Item item(a, index);
      if (item.query_len == 0 || item.query_len > a.max_query || item.context == 0) continue;
      const int64_t first = item.oldest / kChunkKeys, last = (item.context - 1) / kChunkKeys;
      const int64_t size = Rows::size(group * item.query_len, a.width);
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

template <typename T>
void attend(const Arguments& a) {
  const int64_t group = a.heads / a.kv_heads;
  Plan plan(a, a.kv_heads);
  // Heads are taken apart only to occupy the threads: together they read memory in order.
  while (static_cast<int64_t>(plan.tasks.size()) < 2 * a.threads && plan.heads_per_task > 1 && a.threads > 1)
    plan = Plan(a, (plan.heads_per_task + 1) / 2);
  const std::vector<Task>& tasks = plan.tasks;
  std::vector<float> partials(plan.partial_floats);
  const int64_t bytes = 2 * plan.positions * a.kv_heads * a.width * static_cast<int64_t>(sizeof(T));
  const int threads = threads_for(bytes, a.threads);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> own(plan.heads_per_task * Rows::size(plan.most_rows, a.width));
    std::vector<T> copies(2 * kBlockKeys * a.width);
#pragma omp for schedule(dynamic, 1)
    for (size_t index = 0; index < tasks.size(); index++) {
      const Task& task = tasks[index];
      const int64_t num_rows = group * Item(a, task.item).query_len, size = Rows::size(num_rows, a.width);
      const bool only = task.partial < 0;
      float* memory = only ? own.data() : partials.data() + task.partial;
      attend_chunk<T>(a, task, memory, copies.data());
      for (int64_t head = 0; only && head < task.num_heads; head++)
        write_rows<T>(a, task, task.kv_head + head, Rows(memory + head * size, num_rows, a.width));
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t index = 0; index < plan.merged.size(); index++) {
      const size_t first = plan.merged[index];
      const Task& task = tasks[first];
      const int64_t num_rows = group * Item(a, task.item).query_len, size = Rows::size(num_rows, a.width);
      for (int64_t head = 0; head < task.num_heads; head++) {
        const Rows rows(partials.data() + task.partial + head * size, num_rows, a.width);
        for (size_t next = first + 1; next < tasks.size() && tasks[next].item == task.item &&
                                      tasks[next].kv_head == task.kv_head; next++)
          merge_rows(rows, Rows(partials.data() + tasks[next].partial + head * size, num_rows, a.width), num_rows);
        write_rows<T>(a, task, task.kv_head + head, rows);
      }
    }
  }
}

}  // namespace
}  // namespace quire

extern "C" void quire_paged_attention_bf16(const quire::Arguments* a) { quire::attend<quire::Bf16>(*a); }
extern "C" void quire_paged_attention_f32(const quire::Arguments* a) { quire::attend<float>(*a); }
