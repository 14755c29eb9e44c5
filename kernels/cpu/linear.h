// x W^T + b with a packed weight: see packed_product.h.
#pragma once

#include "threads.h"

namespace quire {

// The rows that are copied at a time, where they have to be: a matter of memory, and of no consequence for bits.
constexpr int64_t kCopiedRows = 256;  // _COPIED_ROWS of linear.py

// Plain data, filled by kernels/cpu/linear.py: the fields must agree. Strides are in elements.
struct LinearArguments {
  void* out;           // [T, O]
  const void* x;       // [T, I]
  const void* weight;  // packed [O, I]
  const void* bias;    // [O], or null
  void* scratch;       // space for min(T, 256) copied rows; unused if rows need no copy
  int64_t rows, inputs, outputs, x_stride, out_stride;
};

template <typename T>
void linear(const LinearArguments& a, const Worker& worker);

}  // namespace quire
