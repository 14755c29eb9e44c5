// Causal attention over paged keys and values. kernels/paged_attention.py has the formula.
#pragma once

#include <memory>

#include "attention_plan.h"
#include "threads.h"

namespace quire {

// Memory that all workers of an attention share. It may be kept for the next one.
struct AttentionWork {
  AttentionPlan plan;
  std::vector<float> partials;     // the unmerged rows of splits
  std::unique_ptr<char[]> packed;  // blocks of items with many tokens
  int64_t packed_bytes = 0;

  void reserve_packed(int64_t bytes) {
    if (bytes <= packed_bytes) return;
    packed.reset();
    packed.reset(new char[bytes]);
    packed_bytes = bytes;
  }
};

template <typename T>
void paged_attention(const AttentionArguments& a, AttentionWork& work, const Worker& worker);

}  // namespace quire
