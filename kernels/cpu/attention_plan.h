// How the attention of items with few tokens is divided into tasks.
#pragma once

#include <vector>

#include "attention_arguments.h"

namespace quire {

// Long enough that the cost of merging is negligible, short enough that one long sequence uses many cores.
constexpr int64_t kSplitKeys = 512;
// Items with more tokens are divided by rows.
constexpr int64_t kFewTokens = 16;

// A split of an item, for some heads.
struct AttentionTask {
  int64_t item, kv_head, num_heads, split;
  int64_t partial_row;  // its first row among the unmerged ones; -1: it is the only split of the item

  bool is_whole() const { return partial_row < 0; }
  bool continues(const AttentionTask& other) const { return item == other.item && kv_head == other.kv_head; }
};

struct AttentionPlan {
  std::vector<AttentionTask> tasks;
  std::vector<size_t> merged;  // the first task of each item and heads with several splits
  int64_t partial_rows, most_rows, heads_per_task;

  void make(const AttentionArguments& a, int64_t threads) {
    fill(a, a.kv_heads);
    // Heads are divided only if there are threads without work: together they read memory in order.
    while (static_cast<int64_t>(tasks.size()) < 2 * threads && heads_per_task > 1 && threads > 1)
      fill(a, (heads_per_task + 1) / 2);
  }

 private:
  void fill(const AttentionArguments& a, int64_t heads) {
    tasks.clear();
    merged.clear();
    partial_rows = most_rows = 0;
    heads_per_task = heads;
    for (int64_t index = 0; index < a.items; index++) {
      const Item item(a, index);
      if (item.query_len == 0 || item.query_len > kFewTokens || item.context == 0) continue;
      const int64_t first = item.oldest / kSplitKeys, last = (item.context - 1) / kSplitKeys;
      const int64_t rows = a.heads / a.kv_heads * item.query_len;
      most_rows = std::max(most_rows, rows);
      for (int64_t kv_head = 0; kv_head < a.kv_heads; kv_head += heads) {
        const int64_t num_heads = std::min(heads, a.kv_heads - kv_head);
        if (last > first) merged.push_back(tasks.size());
        for (int64_t split = first; split <= last; split++) {
          tasks.push_back({index, kv_head, num_heads, split, last > first ? partial_rows : -1});
          if (last > first) partial_rows += num_heads * rows;
        }
      }
    }
  }
};

}  // namespace quire
