// Causal attention of items with few new tokens over paged keys and values: each byte of them is read once,
// where it lies. kernels/paged_attention.py has the formula and the checks; nothing is checked here.
//
// A task is one key-value head of one chunk of one sequence, with all the query rows that share the head. It
// goes through its keys in blocks of 16 with a running maximum (online softmax); chunks are merged at the end.
// Blocks and chunks lie at fixed positions of the sequence, so the bits of a row depend on nothing but its own
// sequence: not on the batch, not on the number of threads, not on how many tokens are verified at once.
//
// Letters as in kernels/paged_attention.py; R: query rows of a task, G * Q of them.

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace quire {
namespace {

constexpr int64_t kBlockKeys = kLanes;
// Long enough that merging costs nothing, short enough that one long sequence occupies many cores.
constexpr int64_t kChunkKeys = 512;
// Below this many bytes of keys and values waking the other threads costs more than they save.
constexpr int64_t kBytesPerThread = 64 << 10;

}  // namespace

// Plain data, filled by kernels/cpu/paged_attention.py: the fields must agree. Strides are in elements.
struct Arguments {
  void* out;          // [T, H, D] contiguous
  const void* query;  // [T, H, D]
  const void* keys;   // [pages, S, K, D] contiguous
  const void* values;
  const int32_t* tables;    // [N, P]
  const int32_t* starts;    // [N + 1]
  const int32_t* contexts;  // [N]
  int64_t items, table_stride, query_stride, head_stride;
  int64_t heads, kv_heads, width, page_size;
  int64_t max_query;  // longer items are left alone
  int64_t window;     // 0: unlimited
  int64_t threads;
  double scale;
};

namespace {

struct Task {
  int64_t item, kv_head, chunk;
  int64_t partial;  // where its unmerged rows are, in floats; -1: the only chunk, written to `out`
};

// The rows of a task, unnormalised: R sums of D rounded up to whole pairs, R maxima, R denominators.
struct Rows {
  float *sums, *maxima, *totals;
  int64_t padded;  // width of a row of sums
  Rows(float* memory, int64_t rows, int64_t width)
      : sums(memory), padded((width + kPair - 1) / kPair * kPair) {
    maxima = sums + rows * padded;
    totals = maxima + rows;
  }
  static int64_t size(int64_t rows, int64_t width) {
    return rows * ((width + kPair - 1) / kPair * kPair + 2);
  }
};

// Scores of 16 keys against a row.
template <typename T>
inline Floats block_scores(const T* query, const T* const (&keys)[kBlockKeys], int64_t width) {
  Floats sums[kLanes] = {};
  int64_t d = 0;
  for (; d + kPair <= width; d += kPair)
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) sums[i] = dot(sums[i], keys[i] + d, query + d, kPair);
  if (d < width)
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) sums[i] = dot(sums[i], keys[i] + d, query + d, kLanes);
  return sum_each(sums);
}

// sums[r] += weights[r][i] * values[i], for `kRows` rows, columns d up to `count` of `kPairs` pairs.
template <int kRows, int kPairs, typename T>
inline void add_columns(float* sums, int64_t padded, const float* weights, const T* const (&values)[kBlockKeys],
                        int64_t d, int count) {
  Floats total[kRows][2 * kPairs];
  for (int r = 0; r < kRows; r++)
    for (int j = 0; j < 2 * kPairs; j++) total[r][j] = load<Floats>(sums + r * padded + d + j * kLanes);
#pragma GCC unroll 4
  for (int i = 0; i < kBlockKeys; i++)
#pragma GCC unroll 2
    for (int j = 0; j < kPairs; j++) {
      Pair value = load_pair(values[i] + d + j * kPair, count);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        Floats weight = splat(weights[r * kBlockKeys + i]);
        total[r][2 * j] += weight * value.first;
        total[r][2 * j + 1] += weight * value.second;
      }
    }
  for (int r = 0; r < kRows; r++)
    for (int j = 0; j < 2 * kPairs; j++) std::memcpy(sums + r * padded + d + j * kLanes, &total[r][j], 64);
}

template <int kRows, typename T>
inline void add_values(float* sums, int64_t padded, const float* weights, const T* const (&values)[kBlockKeys],
                       int64_t width) {
  int64_t d = 0;
  for (; d + 2 * kPair <= width; d += 2 * kPair)
    add_columns<kRows, 2>(sums, padded, weights, values, d, kPair);
  if (d + kPair <= width) {
    add_columns<kRows, 1>(sums, padded, weights, values, d, kPair);
    d += kPair;
  }
  if (d < width) add_columns<kRows, 1>(sums, padded, weights, values, d, kLanes);
}

// Turn the scores of a block into weights against the row's running maximum, which rises where needed.
inline Floats block_weights(Floats scores, Rows rows, int64_t row) {
  float before = rows.maxima[row];
  float highest = std::max(before, reduce(scores, larger));
  if (highest == kHidden) return Floats{};  // nothing visible yet: there is no maximum to subtract
  Floats weights = power_of_two(scores - highest);
  float sum = reduce(weights, [](Floats a, Floats b) { return a + b; });
  if (highest > before) {
    float shrink = std::exp2(before - highest);  // 0 for the first visible block
    float* sums = rows.sums + row * rows.padded;
    for (int64_t d = 0; d < rows.padded; d++) sums[d] *= shrink;
    rows.totals[row] *= shrink;
    rows.maxima[row] = highest;
  }
  rows.totals[row] += sum;
  return weights;
}

// One item as a task sees it.
struct Item {
  int64_t start, query_len, context, oldest;  // `oldest`: first position that any of its queries sees
  Item(const Arguments& a, int64_t index) {
    start = a.starts[index];
    query_len = a.starts[index + 1] - start;
    context = a.contexts[index];
    oldest = a.window ? std::max<int64_t>(0, context - query_len - a.window + 1) : 0;
  }
};

template <typename T>
void attend_chunk(const Arguments& a, const Task& task, float* memory, float* weights) {
  const Item item(a, task.item);
  const int64_t group = a.heads / a.kv_heads, num_rows = group * item.query_len;
  const int32_t* table = a.tables + task.item * a.table_stride;
  const int64_t token_stride = a.kv_heads * a.width;
  const Rows rows(memory, num_rows, a.width);
  std::fill(rows.sums, rows.maxima, 0.0f);
  std::fill(rows.maxima, rows.totals, kHidden);
  std::fill(rows.totals, rows.totals + num_rows, 0.0f);
  const int64_t begin = std::max(item.oldest, task.chunk * kChunkKeys);
  const int64_t end = std::min(item.context, (task.chunk + 1) * kChunkKeys);
  const float scale = static_cast<float>(a.scale * 1.4426950408889634);  // in powers of two
  const Ints lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  auto offset_of = [&](int64_t position) {
    return (table[position / a.page_size] * a.page_size + position % a.page_size) * token_stride +
           task.kv_head * a.width;
  };
  for (int64_t block = begin / kBlockKeys * kBlockKeys; block < end; block += kBlockKeys) {
    const T *keys[kBlockKeys], *values[kBlockKeys];
    const int64_t base = offset_of(block);
    for (int64_t i = 0; i < kBlockKeys; i++) {
      // Slots outside the range may hold anything: a key inside stands in, and its weight becomes 0.
      const int64_t inside = std::clamp(block + i, begin, end - 1) - block;
      keys[i] = static_cast<const T*>(a.keys) + base + inside * token_stride;
      values[i] = static_cast<const T*>(a.values) + base + inside * token_stride;
    }
    if (block + kBlockKeys < end) {
      const int64_t next = offset_of(block + kBlockKeys);
      for (int64_t i = 0; i < kBlockKeys; i++)
        for (int64_t d = 0; d < a.width; d += 64 / sizeof(T)) {
          __builtin_prefetch(static_cast<const T*>(a.keys) + next + i * token_stride + d);
          __builtin_prefetch(static_cast<const T*>(a.values) + next + i * token_stride + d);
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
      const int64_t token = row % item.query_len, head = task.kv_head * group + row / item.query_len;
      const T* query = static_cast<const T*>(a.query) + (item.start + token) * a.query_stride + head * a.head_stride;
      const int64_t own = item.context - item.query_len + token;
      const int64_t first = a.window ? std::max<int64_t>(begin, own - a.window + 1) : begin;
      const int32_t low = static_cast<int32_t>(first - block);
      const int32_t high = static_cast<int32_t>(std::min(own + 1, end) - block);
      Floats scores = block_scores(query, keys, a.width) * scale;
      scores = (lanes >= low) & (lanes < high) ? scores : splat(kHidden);
      const Floats weight = block_weights(scores, rows, row);
      std::memcpy(weights + row * kBlockKeys, &weight, sizeof(weight));
    }
    int64_t row = 0;
    for (; row + 2 <= num_rows; row += 2)
      add_values<2>(rows.sums + row * rows.padded, rows.padded, weights + row * kBlockKeys, values, a.width);
    if (row < num_rows)
      add_values<1>(rows.sums + row * rows.padded, rows.padded, weights + row * kBlockKeys, values, a.width);
  }
}

// Normalise the rows and write them.
template <typename T>
void write_rows(const Arguments& a, const Task& task, const Rows& rows) {
  const Item item(a, task.item);
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t row = 0; row < group * item.query_len; row++) {
    const int64_t token = item.start + row % item.query_len;
    const int64_t head = task.kv_head * group + row / item.query_len;
    T* out = static_cast<T*>(a.out) + (token * a.heads + head) * a.width;
    const float factor = 1.0f / rows.totals[row];
    for (int64_t d = 0; d < a.width; d += kPair) {
      const float* sums = rows.sums + row * rows.padded + d;
      store_pair(out + d, Pair{load<Floats>(sums) * factor, load<Floats>(sums + kLanes) * factor},
                 static_cast<int>(std::min<int64_t>(kPair, a.width - d)));
    }
  }
}

// Fold the rows of a later chunk into those of the first.
void merge_rows(const Rows& into, const Rows& from, int64_t num_rows) {
  for (int64_t row = 0; row < num_rows; row++) {
    const float highest = std::max(into.maxima[row], from.maxima[row]);
    if (highest == kHidden) continue;
    const float mine = std::exp2(into.maxima[row] - highest), theirs = std::exp2(from.maxima[row] - highest);
    for (int64_t d = row * into.padded; d < (row + 1) * into.padded; d++)
      into.sums[d] = into.sums[d] * mine + from.sums[d] * theirs;
    into.totals[row] = into.totals[row] * mine + from.totals[row] * theirs;
    into.maxima[row] = highest;
  }
}

template <typename T>
void attend(const Arguments& a) {
  const int64_t group = a.heads / a.kv_heads;
  std::vector<Task> tasks;
  std::vector<int64_t> merged;  // the first task of each (item, head) with several chunks
  int64_t partial_floats = 0, positions = 0, most_rows = 0;
  for (int64_t index = 0; index < a.items; index++) {
    const Item item(a, index);
    if (item.query_len == 0 || item.query_len > a.max_query || item.context == 0) continue;
    const int64_t first = item.oldest / kChunkKeys, last = (item.context - 1) / kChunkKeys;
    const int64_t size = Rows::size(group * item.query_len, a.width);
    most_rows = std::max(most_rows, group * item.query_len);
    positions += item.context - item.oldest;
    for (int64_t kv_head = 0; kv_head < a.kv_heads; kv_head++) {
      if (last > first) merged.push_back(static_cast<int64_t>(tasks.size()));
      for (int64_t chunk = first; chunk <= last; chunk++) {
        tasks.push_back({index, kv_head, chunk, last > first ? partial_floats : -1});
        if (last > first) partial_floats += size;
      }
    }
  }
  std::vector<float> partials(partial_floats);
  const int64_t bytes = 2 * positions * a.kv_heads * a.width * static_cast<int64_t>(sizeof(T));
  const int threads = static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerThread, 1, a.threads));
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> own(Rows::size(most_rows, a.width)), weights(most_rows * kBlockKeys);
#pragma omp for schedule(dynamic, 1)
    for (size_t index = 0; index < tasks.size(); index++) {
      const Task& task = tasks[index];
      const bool only = task.partial < 0;
      float* memory = only ? own.data() : partials.data() + task.partial;
      attend_chunk<T>(a, task, memory, weights.data());
      if (only) write_rows<T>(a, task, Rows(memory, group * Item(a, task.item).query_len, a.width));
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t index = 0; index < merged.size(); index++) {
      const Task& task = tasks[merged[index]];
      const int64_t num_rows = group * Item(a, task.item).query_len;
      const Rows rows(partials.data() + task.partial, num_rows, a.width);
      for (size_t next = merged[index] + 1; next < tasks.size() && tasks[next].kv_head == task.kv_head &&
                                            tasks[next].item == task.item; next++)
        merge_rows(rows, Rows(partials.data() + tasks[next].partial, num_rows, a.width), num_rows);
      write_rows<T>(a, task, rows);
    }
  }
}

}  // namespace
}  // namespace quire

extern "C" void quire_paged_attention_bf16(const quire::Arguments* a) { quire::attend<quire::Bf16>(*a); }
extern "C" void quire_paged_attention_f32(const quire::Arguments* a) { quire::attend<float>(*a); }
