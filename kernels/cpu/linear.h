// x W^T + b with a packed weight: see packed_product.h.
#pragma once

#include <algorithm>

#include "packed_product.h"
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

// Calls multiply(products, begin, end) for some rows after the other, in the form that products need, and this worker's
// share of the blocks. The products have no weight yet. Returns when all workers are done.
template <typename T, typename Multiply>
void multiply_rows_of(const LinearArguments& a, const Worker& worker, Multiply multiply) {
  const T* x = static_cast<const T*>(a.x);
  InputOf<T>* copies = static_cast<InputOf<T>*>(a.scratch);
  const bool copied = needs_copy<T>(a.inputs);
  const int64_t blocks = blocks_of(a.outputs);
  for (int64_t first = 0; first < a.rows; first += kCopiedRows) {
    const int64_t count = std::min(kCopiedRows, a.rows - first);
    const InputOf<T>* rows[kCopiedRows];
    T* results[kCopiedRows];
    for (int64_t row = 0; row < count; row++) {
      rows[row] = copied ? copies + row * copied_row(a.inputs)
                         : reinterpret_cast<const InputOf<T>*>(x + (first + row) * a.x_stride);
      results[row] = static_cast<T*>(a.out) + (first + row) * a.out_stride;
    }
    if (copied) {
      worker.for_shares(count, [&](int64_t row) {
        copy_row(copies + row * copied_row(a.inputs), x + (first + row) * a.x_stride, a.inputs);
      });
    }
    const Products<T> products{nullptr, static_cast<const T*>(a.bias), rows, results, count, a.inputs, a.outputs};
    multiply(products, worker.begin_of(blocks), worker.end_of(blocks));
    // Copies are in use, and results incomplete, until all are done.
    if (copied || first + count == a.rows) worker.barrier();
  }
}

template <typename T>
void linear(const LinearArguments& a, const Worker& worker);

}  // namespace quire
