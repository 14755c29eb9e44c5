// QK-norm, rotation and KV write. kernels/rope_kv_write.py has the formula.
#pragma once

#include "threads.h"

namespace quire {

// Plain data, filled by kernels/rope_kv_write.py: the fields must agree. Strides are in elements.
struct RopeArguments {
  void* query;              // [T, H, D] contiguous
  const void* qkv;          // [T, (H + 2 * K) * D]
  const void* qk_norm;      // [H + K, D] contiguous, of the type of qkv or float; or null
  const float* cos_sin;     // [T, R]; null where R is 0
  const int64_t* slots;     // [T]
  void *k_pages, *v_pages;  // packed: see kv_pages.h
  int64_t tokens, heads, kv_heads, width, rotary_dim, qkv_stride, cos_sin_stride;
  int64_t wide_norm;     // whether qk_norm is float
  int64_t is_quantised, is_wide;  // of pages: see SlotOfHead
  double eps;
};

// Requires `slots_exist`.
template <typename T>
void rope_kv_write(const RopeArguments& a, const Worker& worker);

}  // namespace quire
