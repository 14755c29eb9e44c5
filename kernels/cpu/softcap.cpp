// Divides logits, and bounds them. kernels/softcap.py has the formulas, and checks the arguments.

#include "attention_scores.h"
#include "threads.h"

namespace quire {
namespace {

// Replaces each x by change(x), on threads.
template <typename T, typename Change>
void run(T* x, int64_t count, int64_t threads, Change change) {
  constexpr int64_t kStretch = 4096;
  const int64_t stretches = (count + kStretch - 1) / kStretch;
  run_together(threads_for(count * static_cast<int64_t>(sizeof(T)), threads), [&](const Worker& worker) {
    worker.for_shares(stretches, [&](int64_t stretch) {
      T* from = x + stretch * kStretch;
      for_parts(std::min(kStretch, count - stretch * kStretch), [&](int64_t i, int lanes) {
        store_lanes(from + i, change(load_lanes<Part>(from + i, lanes)), lanes);
      });
    });
  });
}

template <typename T>
void softcap(T* x, int64_t count, float cap, int64_t threads) {
  run(x, count, threads, [&](Part logits) { return rounded(hyperbolic_tangent(rounded(logits / cap, x)), x) * cap; });
}

template <typename T>
void divide(T* x, int64_t count, float by, int64_t threads) {
  run(x, count, threads, [&](Part logits) { return logits / by; });
}

}  // namespace
}  // namespace quire

extern "C" void quire_softcap_bf16(quire::Bf16* x, int64_t count, float cap, int64_t threads) {
  quire::softcap(x, count, cap, threads);
}
extern "C" void quire_softcap_f32(float* x, int64_t count, float cap, int64_t threads) {
  quire::softcap(x, count, cap, threads);
}
extern "C" void quire_divide_bf16(quire::Bf16* x, int64_t count, float by, int64_t threads) {
  quire::divide(x, count, by, threads);
}
extern "C" void quire_divide_f32(float* x, int64_t count, float by, int64_t threads) {
  quire::divide(x, count, by, threads);
}
