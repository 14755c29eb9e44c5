// activation(gate) * up. kernels/gated_activation.py checks the arguments.

#include "gated_activation.h"

#include "gates.h"

namespace quire {
namespace {

template <typename Activation, typename T>
void gated(const GateArguments& a, const Worker& worker) {
  // Both rows and parts of a row are divided among threads, so that a single row uses all threads too.
  constexpr int64_t kStretch = 1024;
  const int64_t stretches = (a.width + kStretch - 1) / kStretch;
  worker.for_shares(a.rows * stretches, [&](int64_t task) {
    const int64_t row = task / stretches, first = task % stretches * kStretch;
    const T* gate = static_cast<const T*>(a.gate_up) + row * a.stride + first;
    T* out = static_cast<T*>(a.out) + row * a.width + first;
    const T* up = a.activation == kUngated ? gate : gate + a.width;
    multiply_gate<Activation>(out, gate, up, std::min(kStretch, a.width - first));
  });
}

}  // namespace

template <typename T>
void gated_activation(const GateArguments& a, const Worker& worker) {
  with_activation(a.activation, [&](auto activation) { gated<decltype(activation), T>(a, worker); });
}

template void gated_activation<Bf16>(const GateArguments&, const Worker&);
template void gated_activation<float>(const GateArguments&, const Worker&);

namespace {

template <typename T>
void run(const GateArguments& a, int64_t threads) {
  const int64_t bytes = a.rows * a.width * 3 * static_cast<int64_t>(sizeof(T));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) { gated_activation<T>(a, worker); });
}

}  // namespace
}  // namespace quire

QUIRE_EXPORT(void, quire_gated_activation, (const quire::GateArguments* a, int64_t threads), quire::run, (*a, threads))
