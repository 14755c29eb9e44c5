// Bounds logits. kernels/softcap.py has the formula, and checks the arguments.

#include "attention_scores.h"
#include "threads.h"

namespace quire {
namespace {

template <typename T>
void run(T* x, int64_t count, float cap, int64_t threads) {
  constexpr int64_t kStretch = 4096;
  const int64_t stretches = (count + kStretch - 1) / kStretch;
  run_together(threads_for(count * static_cast<int64_t>(sizeof(T)), threads), [&](const Worker& worker) {
    worker.for_shares(stretches, [&](int64_t stretch) {
      T* from = x + stretch * kStretch;
      for_parts(std::min(kStretch, count - stretch * kStretch), [&](int64_t i, int lanes) {
        const Part scaled = rounded(load_lanes<Part>(from + i, lanes) / cap, x);
        store_lanes(from + i, rounded(hyperbolic_tangent(scaled), x) * cap, lanes);
      });
    });
  });
}

}  // namespace
}  // namespace quire

extern "C" void quire_softcap_bf16(quire::Bf16* x, int64_t count, float cap, int64_t threads) {
  quire::run(x, count, cap, threads);
}
extern "C" void quire_softcap_f32(float* x, int64_t count, float cap, int64_t threads) {
  quire::run(x, count, cap, threads);
}
