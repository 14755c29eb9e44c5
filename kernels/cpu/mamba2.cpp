// Mamba 2 between its projections: convolution, scan, and the norm of what is gated.

#include "mamba2.h"

#include <memory>

#include "rms_norm.h"

namespace quire {
namespace {

template <typename T>
struct Scan {
  const T* projected;
  const Mamba2Weights& w;
  const ScanSpace<T>& space;

  void step(int64_t row, int64_t h, const float* from, float* to) const {
    const int64_t inner = w.inner(), width = w.convolved(), group = h / (w.heads / w.groups);
    const T* x = space.convolved + row * width + h * w.head_width;
    const T* into = space.convolved + row * width + inner + group * w.state_width;
    const T* out_of = into + w.groups * w.state_width;
    const float raw = load_one(projected + row * (inner + width + w.heads) + inner + width + h);
    const float dt = std::max(softplus(raw + w.dt_bias[h]), static_cast<float>(w.least_step));
    const Floats decay = splat(std::exp(dt * w.decays[h]));
    float* y = space.scanned + row * inner + h * w.head_width;
    for_lanes(w.head_width, [&](int64_t p, int count) {
      const Floats inputs = load_lanes(x + p, count), steps = inputs * splat(dt);
      Floats sum = inputs * splat(w.direct[h]);
      for (int64_t n = 0; n < w.state_width; n++) {
        const int64_t place = n * w.head_width + p;
        const Floats next = fused(load_lanes(from + place, count), decay, steps * splat(load_one(into + n)));
        store_lanes(to + place, next, count);
        sum = fused(next, splat(load_one(out_of + n)), sum);
      }
      store_lanes(y + p, sum, count);
    });
  }
};

// weight * rms_norm(y * silu(gate)), each group by itself; without a norm y * silu(gate).
template <typename T>
void normalise(T* out, float* y, const T* gate, const Mamba2Weights& w) {
  const int64_t inner = w.inner(), width = inner / w.groups;
  const auto gated = [&](int64_t d, int count) { return load_lanes(y + d, count) * Silu::of(load_lanes(gate + d, count)); };
  if (w.norm == nullptr)
    return for_lanes(inner, [&](int64_t d, int count) { store_lanes(out + d, gated(d, count), count); });
  for_lanes(inner, [&](int64_t d, int count) { store_lanes(y + d, gated(d, count), count); });
  for (int64_t first = 0; first < inner; first += width) {
    const float factor = inverse_rms(y + first, width, static_cast<float>(w.eps));
    const T* weight = static_cast<const T*>(w.norm) + first;
    for_lanes(width, [&](int64_t d, int count) {
      store_lanes(out + first + d, load_lanes(weight + d, count) * (load_lanes(y + first + d, count) * splat(factor)), count);
    });
  }
}

}  // namespace

template <typename T>
void mamba2(T* out, const T* projected, const Mamba2Weights& w, T* inputs, float* states, const StateRows& at,
            int64_t rows, const ScanSpace<T>& space, const Worker& worker) {
  const int64_t inner = w.inner(), width = w.convolved(), stride = inner + width + w.heads;
  CausalConv<T, PlainInput<T>>{space.convolved, static_cast<const T*>(w.taps), static_cast<const T*>(w.bias), inputs,
                               {projected, stride, inner}, at, rows, width, w.num_taps}
      .run(worker);
  const Scan<T> scan{projected, w, space};
  const int64_t size = w.state_size();
  const std::unique_ptr<float[]> state(new float[size]);
  worker.for_shares(w.heads, [&](int64_t h) {
    scan_rows(state.get(), size, states, w.heads, h, at, rows,
              [&](int64_t row, const float* from, float* to) { scan.step(row, h, from, to); });
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
