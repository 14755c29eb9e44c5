// Which keys a row of a token tree attends to, and their distances. kernels/attention_trees.py describes trees.
//
// Whether a batch has trees is a template parameter of the kernels, so that other batches have no extra cost.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_arguments.h"
#include "vectors.h"

namespace quire {

constexpr int64_t kTreeTokens = 64;

// A row of a tree. For any other row `ancestors` is 0.
struct TreeRow {
  uint64_t ancestors;
  int64_t root;

  TreeRow(const AttentionArguments& a, int64_t item, int64_t token) : ancestors(a.ancestors[token]), root(a.roots[item]) {}

  bool is_in_tree() const { return ancestors != 0; }
  int64_t position() const { return root + __builtin_popcountll(ancestors) - 1; }

  // By how many positions the keys in slots from `first` on are ahead of the row; 1 for keys that are not visible.
  PartInts aheads(int64_t first) const {
    PartInts ahead = part_places() + static_cast<int32_t>(first - position());
    for (int i = static_cast<int>(std::max<int64_t>(0, root - first)); i < kPartLanes; i++) {
      const int64_t place = first + i - root;
      const uint64_t later = place < kTreeTokens ? ancestors >> place : 0;
      ahead[i] = later & 1 ? 1 - __builtin_popcountll(later) : 1;
    }
    return ahead;
  }
};

// Which of these keys are in the window of a row; 0: unlimited.
inline PartInts seen_of(PartInts ahead, int64_t window) {
  const PartInts seen = ahead <= 0;
  return window == 0 ? seen : seen & (ahead > static_cast<int32_t>(-window));
}

}  // namespace quire
