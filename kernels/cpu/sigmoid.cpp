// Sigmoids. kernels/sigmoid.py calls it.

#include "gates.h"
#include "threads.h"

namespace quire {
namespace {

template <typename T>
void run(T* out, const T* x, int64_t count, int64_t threads) {
  constexpr int64_t kStretch = 4096;
  const int64_t stretches = (count + kStretch - 1) / kStretch;
  run_together(threads_for(2 * count * static_cast<int64_t>(sizeof(T)), threads), [&](const Worker& worker) {
    worker.for_shares(stretches, [&](int64_t stretch) {
      const int64_t first = stretch * kStretch;
      for_lanes(std::min(kStretch, count - first), [&](int64_t i, int lanes) {
        store_lanes(out + first + i, sigmoid(load_lanes(x + first + i, lanes)), lanes);
      });
    });
  });
}

}  // namespace
}  // namespace quire

extern "C" void quire_sigmoid_bf16(quire::Bf16* out, const quire::Bf16* x, int64_t count, int64_t threads) {
  quire::run(out, x, count, threads);
}
extern "C" void quire_sigmoid_f32(float* out, const float* x, int64_t count, int64_t threads) {
  quire::run(out, x, count, threads);
}
