// silu(gate) * up. kernels/silu_mul.py has the checks; nothing is checked here.

#include "threads.h"
#include "vectors.h"

namespace quire {
namespace {

inline Floats silu(Floats x) {
  // By the exponential of -|x|, which cannot overflow.
  const Floats magnitude = larger(x, -x);
  const Floats small = power_of_two(magnitude * splat(-1.4426950408889634f));
  const Floats above = x >= 0.0f ? splat(1.0f) : small;
  const Floats value = x * above / (splat(1.0f) + small);
  return x == x ? value : x;
}

template <typename T>
void silu_mul(T* out, const T* gate_up, int64_t rows, int64_t width, int64_t stride, int64_t threads) {
  // Rows and stretches of a row alike are shared out, so that a single row occupies the threads too.
  constexpr int64_t kStretch = 1024;
  const int64_t stretches = (width + kStretch - 1) / kStretch;
#pragma omp parallel for num_threads(threads_for(rows * width * 3 * static_cast<int64_t>(sizeof(T)), threads))
  for (int64_t task = 0; task < rows * stretches; task++) {
    const int64_t row = task / stretches, first = task % stretches * kStretch;
    const T *gate = gate_up + row * stride + first, *up = gate + width;
    T* to = out + row * width + first;
    for_lanes(std::min(kStretch, width - first), [&](int64_t d, int count) {
      store_lanes(to + d, rounded(silu(load_lanes(gate + d, count)), to) * load_lanes(up + d, count), count);
    });
  }
}

}  // namespace
}  // namespace quire

extern "C" void quire_silu_mul_bf16(void* out, const void* gate_up, int64_t rows, int64_t width, int64_t stride,
                                    int64_t threads) {
  quire::silu_mul(static_cast<quire::Bf16*>(out), static_cast<const quire::Bf16*>(gate_up), rows, width, stride,
                  threads);
}

extern "C" void quire_silu_mul_f32(void* out, const void* gate_up, int64_t rows, int64_t width, int64_t stride,
                                   int64_t threads) {
  quire::silu_mul(static_cast<float*>(out), static_cast<const float*>(gate_up), rows, width, stride, threads);
}
