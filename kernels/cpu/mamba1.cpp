// Mamba 1: the convolution before its inner projections, and the scan and gate after them. kernels/mamba1.py has the
// formulas.
//
// Letters: T rows; I channels, H heads of P of them; N elements of a channel's state; L taps.

#include <memory>

#include "state_scan.h"

namespace quire {
namespace {

// Plain data, filled by kernels/cpu/state_scan.py: the fields of these two must agree.

struct SiluConvWeights {
  const void *taps, *bias;  // [L, I] and [I], or null; of the type of rows
  int64_t width, num_taps, stride;
};

struct Mamba1Weights {
  const float *dt_bias, *decays, *direct;  // [I], [H, N, P] and [I]
  int64_t heads, head_width, state_width;

  int64_t inner() const { return heads * head_width; }
  int64_t state_size() const { return state_width * head_width; }  // of a head
  int64_t stride() const { return 3 * inner() + 2 * state_width; }
};

template <typename T>
void convolve(const ScanArguments& a, int64_t threads) {
  const SiluConvWeights& w = *static_cast<const SiluConvWeights*>(a.weights);
  const int64_t bytes = a.rows * w.width * w.num_taps * static_cast<int64_t>(sizeof(float));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) {
    CausalConv<T, PlainInput<T>>{static_cast<T*>(a.out), static_cast<const T*>(w.taps), static_cast<const T*>(w.bias),
                                 static_cast<T*>(a.inputs), {static_cast<const T*>(a.projected), w.stride, 0}, a.at,
                                 a.rows, w.width, w.num_taps}
        .run(worker);
  });
}

// The next state of a head, and what is read of it. A row has x, dt and gates [I] each, then B and C.
template <typename T>
void step(const Mamba1Weights& w, const T* row, int64_t h, T* out, const float* from, float* to) {
  const int64_t inner = w.inner(), first = h * w.head_width;
  const T *into = row + 3 * inner, *out_of = into + w.state_width;
  for_lanes(w.head_width, [&](int64_t p, int count) {
    const int64_t d = first + p;
    float steps[kLanes] = {};
    for (int i = 0; i < count; i++) steps[i] = softplus(load_one(row + inner + d + i) + w.dt_bias[d + i]);
    const Floats x = load_lanes(row + d, count), dt = load_lanes(steps, count), change = x * dt;
    Floats sum = x * load_lanes(w.direct + d, count);
    for (int64_t n = 0; n < w.state_width; n++) {
      const int64_t place = n * w.head_width + p;
      const Floats decay =
          power_of_two(dt * load_lanes(w.decays + h * w.state_size() + place, count) * splat(kLog2E));
      const Floats next = fused(load_lanes(from + place, count), decay, change * splat(load_one(into + n)));
      store_lanes(to + place, next, count);
      sum = fused(next, splat(load_one(out_of + n)), sum);
    }
    store_lanes(out + d, sum * Silu::of(load_lanes(row + 2 * inner + d, count)), count);
  });
}

template <typename T>
void scan(const ScanArguments& a, int64_t threads) {
  const T* rows = static_cast<const T*>(a.projected);
  run_scan<Mamba1Weights>(a, threads, [&](const Worker& worker, const Mamba1Weights& w) {
    const std::unique_ptr<float[]> state(new float[w.state_size()]);
    worker.for_shares(w.heads, [&](int64_t h) {
      scan_rows(state.get(), w.state_size(), a.states, w.heads, h, a.at, a.rows,
                [&](int64_t row, const float* from, float* to) {
                  step(w, rows + row * w.stride(), h, static_cast<T*>(a.out) + row * w.inner(), from, to);
                });
    });
  });
}

}  // namespace
}  // namespace quire

QUIRE_EXPORT(void, quire_silu_conv, (const quire::ScanArguments* a, int64_t threads), quire::convolve, (*a, threads))
QUIRE_EXPORT(void, quire_mamba1, (const quire::ScanArguments* a, int64_t threads), quire::scan, (*a, threads))
