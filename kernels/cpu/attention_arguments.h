// The arguments of attention.cpp, and one item of them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

// Plain data, filled by kernels/cpu/paged_attention.py: the fields must agree. Strides are in elements.
struct AttentionArguments {
  void* out;          // [T, H, V] contiguous
  const void* query;  // [T, H, D]
  const void *keys, *values;  // pages: see kv_pages.h; values null: each is the first elements of its key
  const int32_t* tables;    // [N, P]
  const int32_t* starts;    // [N + 1]
  const int32_t* contexts;  // [N]
  const float* sinks;       // [H]; null: none
  const float* slopes;      // [H]; null: none
  const int32_t* roots;       // [N]; null: no item is a tree
  const uint64_t* ancestors;  // [T]; null: no item is a tree
  int64_t items, table_stride, query_stride, head_stride;
  int64_t heads, kv_heads, width, value_width, page_size;
  int64_t window;     // 0: unlimited
  int64_t is_quantised;  // whether pages have 8 bits
  int64_t is_wide;       // whether query and out are float, and keys and values bfloat16
  double scale, softcap;  // softcap 0: none
};

// The numbers of one item.
struct Item {
  int64_t start, query_len, context, oldest;  // `oldest`: the first position that is visible to any of its queries
  Item(const AttentionArguments& a, int64_t index) {
    start = a.starts[index];
    query_len = a.starts[index + 1] - start;
    context = a.contexts[index];
    const int64_t first = a.roots == nullptr ? context - query_len : std::min<int64_t>(context - query_len, a.roots[index]);
    oldest = a.window ? std::max<int64_t>(0, first - a.window + 1) : 0;
  }
};

}  // namespace quire
