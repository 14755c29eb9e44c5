// Residual add and RMSNorm. kernels/rms_norm.py checks the arguments.

#include "rms_norm.h"

namespace quire {
namespace {

template <typename W, typename T>
void normalise(T* out, const T* row, const NormArguments& a) {
  const float factor = inverse_rms(row, a.width, static_cast<float>(a.eps));
  const W* weight = static_cast<const W*>(a.weight);
  for_parts(a.width, [&](int64_t d, int count) { store_lanes(out + d, normalised(row, weight, factor, d, count), count); });
}

}  // namespace

template <typename T>
void add_rms_norm(const NormArguments& a, const Worker& worker) {
  worker.for_shares(a.rows, [&](int64_t index) {
    const T* row = static_cast<const T*>(a.x) + index * a.x_stride;
    if (a.residual != nullptr) {
      T* sum = static_cast<T*>(a.residual) + index * a.residual_stride;
      for_parts(a.width, [&](int64_t d, int count) {
        store_lanes(sum + d, load_lanes<Part>(sum + d, count) + load_lanes<Part>(row + d, count), count);
      });
      row = sum;
    }
    if (a.weight == nullptr) return;
    T* out = static_cast<T*>(a.out) + index * a.out_stride;
    if (a.wide_weight) normalise<float>(out, row, a);
    else normalise<T>(out, row, a);
  });
}

template void add_rms_norm<Bf16>(const NormArguments&, const Worker&);
template void add_rms_norm<float>(const NormArguments&, const Worker&);

namespace {

template <typename T>
void run(const NormArguments& a, int64_t threads) {
  const int64_t bytes = a.rows * a.width * 3 * static_cast<int64_t>(sizeof(T));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) { add_rms_norm<T>(a, worker); });
}

}  // namespace
}  // namespace quire

QUIRE_EXPORT(void, quire_rms_norm, (const quire::NormArguments* a, int64_t threads), quire::run, (*a, threads))
