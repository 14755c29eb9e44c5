// Mamba 1: the convolution before its inner projections, and the scan and gate after them. kernels/mamba1.py has the
// formulas.
//
// Letters: T rows; I channels, H heads of P of them; N elements of a channel's state; L taps.

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

template <typename T>
struct Scan {
  const T* rows;  // a row has x, dt and gates [I] each, then B and C
  T* out;
  const Mamba1Weights& w;

  template <int kParts>
  void step(int64_t number, int64_t h, int64_t first, int count, const Columns& state) const {
    const int64_t inner = w.inner(), d = h * w.head_width + first;
    const T *row = rows + number * w.stride(), *into = row + 3 * inner, *out_of = into + w.state_width;
    const float* decays = w.decays + h * w.state_size() + first;
    Part times[kParts], changes[kParts], sums[kParts];
    for (int v = 0; v < kParts; v++) {
      const int64_t place = d + v * kPartLanes;
      const Part x = load_lanes<Part>(row + place, count);
      times[v] = softplus(load_lanes<Part>(row + inner + place, count) + load_lanes<Part>(w.dt_bias + place, count));
      changes[v] = x * times[v];
      sums[v] = x * load_lanes<Part>(w.direct + place, count);
    }
    for (int64_t n = 0; n < w.state_width; n++) {
      const float* from = state.from + n * state.from_stride;
      float* to = state.to + n * state.to_stride;
      const float in = load_one(into + n), of = load_one(out_of + n);
      for (int v = 0; v < kParts; v++) {
        const Part rate = load_lanes<Part>(decays + n * w.head_width + v * kPartLanes, count);
        const Part decay = power_of_two(times[v] * rate * kLog2E);
        const Part before = load_lanes<Part>(from + v * kPartLanes, count);
        const Part next = fused(before, decay, changes[v] * in);
        store_lanes(to + v * kPartLanes, next, count);
        sums[v] = fused(next, splat<Part>(of), sums[v]);
      }
    }
    for (int v = 0; v < kParts; v++) {
      const int64_t place = d + v * kPartLanes;
      const Part open = Silu::of(load_lanes<Part>(row + 2 * inner + place, count));
      store_lanes(out + number * inner + place, sums[v] * open, count);
    }
  }
};

template <typename T>
void scan(const ScanArguments& a, int64_t threads) {
  run_scan<Mamba1Weights>(a, threads, [&](const Worker& worker, const Mamba1Weights& w) {
    const Scan<T> scan{static_cast<const T*>(a.projected), static_cast<T*>(a.out), w};
    Tile tile;
    worker.for_shares(w.heads, [&](int64_t h) {
      scan_rows({a.states, w.heads, h, w.state_width, w.head_width}, a.at, a.rows, tile,
                [&](auto parts, int64_t row, int64_t first, int count, const Columns& columns) {
                  scan.template step<decltype(parts)::value>(row, h, first, count, columns);
                });
    });
  });
}

}  // namespace
}  // namespace quire

QUIRE_EXPORT(void, quire_silu_conv, (const quire::ScanArguments* a, int64_t threads), quire::convolve, (*a, threads))
QUIRE_EXPORT(void, quire_mamba1, (const quire::ScanArguments* a, int64_t threads), quire::scan, (*a, threads))
