// Causal attention over paged keys and values. kernels/paged_attention.py has the formula.
#pragma once

#include "attention_plan.h"
#include "threads.h"

namespace quire {

// Memory that all workers of an attention share. It may be kept for the next one.
struct AttentionWork {
  AttentionPlan plan;
  std::vector<float> partials;  // the unmerged rows of splits
};

template <typename T>
void paged_attention(const AttentionArguments& a, AttentionWork& work, const Worker& worker);

}  // namespace quire
