// Residual add and RMSNorm. kernels/rms_norm.py has the formula, and checks the arguments.

#include "rms_norm.h"
#include "threads.h"

namespace quire {
namespace {

template <typename T, typename W>
void add_rms_norm(T* out, const T* x, T* residual, const W* weight, int64_t rows, int64_t width, int64_t x_stride,
                  int64_t residual_stride, double eps, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(rows * width * 3 * static_cast<int64_t>(sizeof(T)), threads))
  for (int64_t row = 0; row < rows; row++) {
    T* sum = residual + row * residual_stride;
    const T* added = x + row * x_stride;
    for_lanes(width, [&](int64_t d, int count) {
      store_lanes(sum + d, load_lanes(sum + d, count) + load_lanes(added + d, count), count);
    });
    const float factor = inverse_rms(sum, width, static_cast<float>(eps));
    for_lanes(width, [&](int64_t d, int count) {
      store_lanes(out + row * width + d, normalised(sum, weight, factor, d, count), count);
    });
  }
}

}  // namespace
}  // namespace quire

#define QUIRE_ADD_RMS_NORM(NAME, T, W)                                                                           \
  extern "C" void NAME(void* out, const void* x, void* residual, const void* weight, int64_t rows, int64_t width, \
                       int64_t x_stride, int64_t residual_stride, double eps, int64_t threads) {                  \
    quire::add_rms_norm(static_cast<T*>(out), static_cast<const T*>(x), static_cast<T*>(residual),                \
                        static_cast<const W*>(weight), rows, width, x_stride, residual_stride, eps, threads);     \
  }
QUIRE_ADD_RMS_NORM(quire_add_rms_norm_bf16, quire::Bf16, quire::Bf16)
QUIRE_ADD_RMS_NORM(quire_add_rms_norm_bf16_f32, quire::Bf16, float)
QUIRE_ADD_RMS_NORM(quire_add_rms_norm_f32, float, float)
