// Mamba 2 between its projections: convolution, scan, and the norm of what is gated.

#include "mamba2.h"

#include "rms_norm.h"

namespace quire {
namespace {

// What heads need of a row, in this order.
struct Prepared {
  float *steps, *decays;   // [H]
  float *into, *out_of;    // [G, N]

  Prepared(float* from, const Mamba2Weights& w)
      : steps(from), decays(steps + w.heads), into(decays + w.heads), out_of(into + w.groups * w.state_width) {}
};

template <typename T>
struct Scan {
  const T* projected;
  const Mamba2Weights& w;
  const ScanSpace<T>& space;

  Prepared prepared(int64_t row) const { return {space.prepared + row * w.stride(), w}; }

  void prepare(int64_t row) const {
    const int64_t inner = w.inner(), width = w.convolved();
    const T* raw = projected + row * w.stride() + inner + width;
    const Prepared to = prepared(row);
    for_parts(w.heads, [&](int64_t h, int count) {
      const Part step = softplus(load_lanes<Part>(raw + h, count) + load_lanes<Part>(w.dt_bias + h, count));
      const Part dt = larger(step, splat<Part>(static_cast<float>(w.least_step)));
      store_lanes(to.steps + h, dt, count);
      store_lanes(to.decays + h, exponential(dt * load_lanes<Part>(w.decays + h, count)), count);
    });
    const T* states = space.convolved + row * width + inner;
    for_parts(width - inner, [&](int64_t d, int count) { store_lanes(to.into + d, load_lanes<Part>(states + d, count), count); });
  }

  template <int kParts>
  void step(int64_t row, int64_t h, int64_t first, int count, const Columns& state) const {
    const Prepared of_row = prepared(row);
    const int64_t group = h / (w.heads / w.groups) * w.state_width, column = h * w.head_width + first;
    const float *into = of_row.into + group, *out_of = of_row.out_of + group;
    const T* x = space.convolved + row * w.convolved() + column;
    const Part decay = splat<Part>(of_row.decays[h]);
    Part steps[kParts], sums[kParts];
    for (int v = 0; v < kParts; v++) {
      const Part inputs = load_lanes<Part>(x + v * kPartLanes, count);
      steps[v] = inputs * of_row.steps[h];
      sums[v] = inputs * w.direct[h];
    }
    for (int64_t n = 0; n < w.state_width; n++) {
      const float* from = state.from + n * state.from_stride;
      float* to = state.to + n * state.to_stride;
      for (int v = 0; v < kParts; v++) {
        const Part before = load_lanes<Part>(from + v * kPartLanes, count);
        const Part next = fused(before, decay, steps[v] * into[n]);
        store_lanes(to + v * kPartLanes, next, count);
        sums[v] = fused(next, splat<Part>(out_of[n]), sums[v]);
      }
    }
    float* y = space.scanned + row * w.inner() + column;
    for (int v = 0; v < kParts; v++) store_lanes(y + v * kPartLanes, sums[v], count);
  }
};

// weight * rms_norm(y * silu(gate)), each group by itself; without a norm y * silu(gate).
template <typename T>
void normalise(T* out, float* y, const T* gate, const Mamba2Weights& w) {
  const int64_t inner = w.inner(), width = inner / w.groups;
  const auto gated = [&](int64_t d, int count) { return load_lanes<Part>(y + d, count) * Silu::of(load_lanes<Part>(gate + d, count)); };
  if (w.norm == nullptr)
    return for_parts(inner, [&](int64_t d, int count) { store_lanes(out + d, gated(d, count), count); });
  for_parts(inner, [&](int64_t d, int count) { store_lanes(y + d, gated(d, count), count); });
  for (int64_t first = 0; first < inner; first += width) {
    const float factor = inverse_rms(y + first, width, static_cast<float>(w.eps));
    const T* weight = static_cast<const T*>(w.norm) + first;
    for_parts(width, [&](int64_t d, int count) {
      store_lanes(out + first + d, load_lanes<Part>(weight + d, count) * (load_lanes<Part>(y + first + d, count) * splat<Part>(factor)), count);
    });
  }
}

}  // namespace

template <typename T>
void mamba2(T* out, const T* projected, const Mamba2Weights& w, T* inputs, float* states, const StateRows& at,
            int64_t rows, const ScanSpace<T>& space, const Worker& worker) {
  const int64_t inner = w.inner(), width = w.convolved(), stride = w.stride();
  CausalConv<T, PlainInput<T>>{space.convolved, static_cast<const T*>(w.taps), static_cast<const T*>(w.bias), inputs,
                               {projected, stride, inner}, at, rows, width, w.num_taps}
      .run(worker);
  const Scan<T> scan{projected, w, space};
  worker.for_shares(rows, [&](int64_t row) { scan.prepare(row); });
  Tile tile;
  worker.for_shares(w.heads, [&](int64_t h) {
    scan_rows({states, w.heads, h, w.state_width, w.head_width}, at, rows, tile,
              [&](auto parts, int64_t row, int64_t first, int count, const Columns& columns) {
                scan.template step<decltype(parts)::value>(row, h, first, count, columns);
              });
  });
  worker.for_shares(rows, [&](int64_t row) {
    normalise(out + row * inner, space.scanned + row * inner, projected + row * stride, w);
  });
}

template void mamba2<Bf16>(Bf16*, const Bf16*, const Mamba2Weights&, Bf16*, float*, const StateRows&, int64_t,
                           const ScanSpace<Bf16>&, const Worker&);
template void mamba2<float>(float*, const float*, const Mamba2Weights&, float*, float*, const StateRows&, int64_t,
                            const ScanSpace<float>&, const Worker&);

namespace {

template <typename T>
void run(const ScanArguments& a, int64_t threads) {
  run_scan<Mamba2Weights>(a, threads, [&](const Worker& worker, const Mamba2Weights& w) {
    mamba2<T>(static_cast<T*>(a.out), static_cast<const T*>(a.projected), w, static_cast<T*>(a.inputs), a.states, a.at,
              a.rows, a.space<T>(), worker);
  });
}

}  // namespace
}  // namespace quire

QUIRE_EXPORT(void, quire_mamba2, (const quire::ScanArguments* a, int64_t threads), quire::run, (*a, threads))
