// x W^T + b with a packed weight: see packed_product.h.

#include "linear.h"
#include "packed_product.h"

namespace quire {

template <typename T>
void linear(const LinearArguments& a, const Worker& worker) {
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
    const Products<T> products{static_cast<const T*>(a.weight), static_cast<const T*>(a.bias), rows, results, count,
                               a.inputs, a.outputs};
    products.multiply_blocks(worker.begin_of(blocks), worker.end_of(blocks));
    // Copies are in use, and results incomplete, until all are done.
    if (copied || first + count == a.rows) worker.barrier();
  }
}

template void linear<Bf16>(const LinearArguments&, const Worker&);
template void linear<float>(const LinearArguments&, const Worker&);

namespace {

template <typename T>
void run(const LinearArguments& a, int64_t threads) {
  const int64_t bytes = a.outputs * a.inputs * static_cast<int64_t>(sizeof(T));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) { linear<T>(a, worker); });
}

}  // namespace
}  // namespace quire

extern "C" void quire_linear_bf16(const quire::LinearArguments* a, int64_t threads) { quire::run<quire::Bf16>(*a, threads); }
extern "C" void quire_linear_f32(const quire::LinearArguments* a, int64_t threads) { quire::run<float>(*a, threads); }
