// activation(gate) * up. kernels/gated_activation.py checks the arguments.

#include "gates.h"
#include "threads.h"

namespace quire {
namespace {

template <typename Activation, typename T>
void gated(T* out, const T* gate_up, int64_t rows, int64_t width, int64_t stride, int64_t threads) {
  // Both rows and parts of a row are divided among threads, so that a single row uses all threads too.
  constexpr int64_t kStretch = 1024;
  const int64_t stretches = (width + kStretch - 1) / kStretch;
#pragma omp parallel for num_threads(threads_for(rows * width * 3 * static_cast<int64_t>(sizeof(T)), threads))
  for (int64_t task = 0; task < rows * stretches; task++) {
    const int64_t row = task / stretches, first = task % stretches * kStretch;
    const T* gate = gate_up + row * stride + first;
    multiply_gate<Activation>(out + row * width + first, gate, gate + width, std::min(kStretch, width - first));
  }
}

}  // namespace
}  // namespace quire

#define QUIRE_GATED(NAME, ACTIVATION, T)                                                                         \
  extern "C" void NAME(void* out, const void* gate_up, int64_t rows, int64_t width, int64_t stride,              \
                       int64_t threads) {                                                                        \
    quire::gated<quire::ACTIVATION>(static_cast<T*>(out), static_cast<const T*>(gate_up), rows, width, stride,   \
                                    threads);                                                                    \
  }
QUIRE_GATED(quire_silu_mul_bf16, Silu, quire::Bf16)
QUIRE_GATED(quire_silu_mul_f32, Silu, float)
QUIRE_GATED(quire_gelu_tanh_mul_bf16, GeluTanh, quire::Bf16)
QUIRE_GATED(quire_gelu_tanh_mul_f32, GeluTanh, float)
QUIRE_GATED(quire_gelu_mul_bf16, Gelu, quire::Bf16)
QUIRE_GATED(quire_gelu_mul_f32, Gelu, float)
