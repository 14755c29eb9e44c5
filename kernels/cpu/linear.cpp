// x W^T + b with a packed weight: see packed_product.h.

#include <omp.h>

#include "packed_product.h"
#include "threads.h"

namespace quire {
namespace {

// The rows that are copied at a time, where they have to be: a matter of memory, and of no consequence for bits.
constexpr int64_t kCopiedRows = 256;  // _COPIED_ROWS of linear.py

// Plain data, filled by kernels/cpu/linear.py: the fields must agree. Strides are in elements.
struct Arguments {
  void* out;           // [T, O] contiguous
  const void* x;       // [T, I]
  const void* weight;  // packed [O, I]
  const void* bias;    // [O], or null
  void* scratch;       // space for min(T, 256) copied rows; unused if rows need no copy
  int64_t rows, inputs, outputs, x_stride, threads;
};

template <typename T>
void linear(const Arguments& a) {
  const T* x = static_cast<const T*>(a.x);
  InputOf<T>* copies = static_cast<InputOf<T>*>(a.scratch);
  const bool copied = needs_copy<T>(a.inputs);
  const int64_t blocks = blocks_of(a.outputs);
#pragma omp parallel num_threads(threads_for(a.outputs * a.inputs * static_cast<int64_t>(sizeof(T)), a.threads))
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t first = 0; first < a.rows; first += kCopiedRows) {
      const int64_t count = std::min(kCopiedRows, a.rows - first);
      const InputOf<T>* rows[kCopiedRows];
      T* results[kCopiedRows];
      for (int64_t row = 0; row < count; row++) {
        rows[row] = copied ? copies + row * copied_row(a.inputs)
                           : reinterpret_cast<const InputOf<T>*>(x + (first + row) * a.x_stride);
        results[row] = static_cast<T*>(a.out) + (first + row) * a.outputs;
      }
      if (copied) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; row++)
          copy_row(copies + row * copied_row(a.inputs), x + (first + row) * a.x_stride, a.inputs);
      }
      const Products<T> products{static_cast<const T*>(a.weight), static_cast<const T*>(a.bias), rows, results, count,
                                 a.inputs, a.outputs};
      products.multiply_blocks(blocks * thread / threads, blocks * (thread + 1) / threads);
      // The copies are in use until all threads are done.
      if (copied) {
#pragma omp barrier
      }
    }
  }
}

}  // namespace
}  // namespace quire

#define QUIRE_LINEAR(NAME, T) \
  extern "C" void NAME(const void* arguments) { quire::linear<T>(*static_cast<const quire::Arguments*>(arguments)); }
QUIRE_LINEAR(quire_linear_bf16, quire::Bf16)
QUIRE_LINEAR(quire_linear_f32, float)
