// x W^T + b with a packed weight: see packed_product.h.

#include "linear.h"
#include "packed_product.h"

namespace quire {

template <typename T>
void linear(const LinearArguments& a, const Worker& worker) {
  multiply_rows_of<T>(a, worker, [&](Products<T> products, int64_t begin, int64_t end) {
    products.weight = static_cast<const T*>(a.weight);
    products.multiply_blocks(begin, end);
  });
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

QUIRE_EXPORT(void, quire_linear, (const quire::LinearArguments* a, int64_t threads), quire::run, (*a, threads))
