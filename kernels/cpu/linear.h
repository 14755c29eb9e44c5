// x W^T + b with a packed weight: see packed_product.h.
#pragma once

#include "threads.h"

namespace quire {

// Plain data, filled by kernels/cpu/linear.py: the fields must agree. Strides are in elements.
struct LinearArguments {
  void* out;           // [T, O] contiguous
  const void* x;       // [T, I]
  const void* weight;  // packed [O, I]
  const void* bias;    // [O], or null
  void* scratch;       // space for min(T, 256) copied rows; unused if rows need no copy
  int64_t rows, inputs, outputs, x_stride;
};

template <typename T>
void linear(const LinearArguments& a, const Worker& worker);

}  // namespace quire
