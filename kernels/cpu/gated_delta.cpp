// The gated delta rule between its projections: convolution, scan, and the norm of each head, with a gate.

#include "gated_delta.h"

#include <memory>

#include "rms_norm.h"

namespace quire {
namespace {

// Of a query or key, in float: divided by its length. `scale` multiplies it.
template <typename T>
void make_unit(float* out, const T* from, int64_t width, float scale) {
  constexpr float kEps = 1e-6f;  // added to the sum of squares
  const float factor = scale * inverse_rms(from, width, kEps / static_cast<float>(width)) /
                       std::sqrt(static_cast<float>(width));
  for_lanes(width, [&](int64_t d, int count) { store_lanes(out + d, load_lanes(from + d, count) * splat(factor), count); });
}

// One token of a head: what it has of `kVectors` * 16 columns of the state, or of `count` < 16.
template <bool kWide>
struct Columns {
  const float *key, *query;  // [K]
  const float* decays;       // [K], if each element of a key has its own
  const float* from;         // the state before [K, V], from the first column on
  float* to;                 // that after it
  int64_t key_width, head_width;
  Floats decay, beta;        // if all have the same

  template <int kVectors>
  void run(const Floats* value, Floats* out, int count) const {
    Floats held[kVectors] = {}, sums[kVectors] = {};
    for (int64_t k = 0; k < key_width; k++)
      for (int v = 0; v < kVectors; v++)
        held[v] = fused(load_lanes(from + place(k, v), count), splat(kWide ? key[k] * decays[k] : key[k]), held[v]);
    Floats change[kVectors];
    for (int v = 0; v < kVectors; v++) change[v] = (value[v] - (kWide ? held[v] : held[v] * decay)) * beta;
    for (int64_t k = 0; k < key_width; k++)
      for (int v = 0; v < kVectors; v++) {
        const Floats left = load_lanes(from + place(k, v), count) * (kWide ? splat(decays[k]) : decay);
        const Floats next = fused(splat(key[k]), change[v], left);
        store_lanes(to + place(k, v), next, count);
        sums[v] = fused(next, splat(query[k]), sums[v]);
      }
    for (int v = 0; v < kVectors; v++) out[v] = sums[v];
  }

 private:
  int64_t place(int64_t k, int v) const { return k * head_width + v * kLanes; }
};

template <typename T>
struct Scan {
  const T* projected;
  const GatedDeltaWeights& w;
  const ScanSpace<T>& space;

  // exp(decays * softplus(a + dt_bias)), of the a with this number.
  float decay(int64_t row, int64_t a, int64_t h) const {
    const T* steps = projected + row * w.stride() + w.inner() + w.convolved() + w.heads;
    return std::exp(softplus(load_one(steps + a) + w.dt_bias[a]) * w.decays[h]);
  }

  template <bool kWide>
  void step(int64_t row, int64_t h, const float* from, float* to) const {
    const int64_t inner = w.inner(), width = w.convolved(), key_head = w.key_head_of(h);
    const float beta = Sigmoid::of(splat(load_one(projected + row * w.stride() + inner + width + h)))[0];
    const float* query = space.unit + row * w.unit() + key_head * w.key_width;
    const float* key = query + w.keys();
    Columns<kWide> columns{key, query, key + w.keys(), from, to, w.key_width, w.head_width,
                           splat(kWide ? 1.0f : decay(row, h, h)), splat(beta)};
    const T* value = space.convolved + row * width + 2 * w.keys() + h * w.head_width;
    float* y = space.scanned + row * inner + h * w.head_width;
    int64_t first = 0;
    // Several vectors at once, since each sum waits for its last term.
    for (; first + kTogether * kLanes <= w.head_width; first += kTogether * kLanes)
      of_columns<kTogether>(columns, first, value, y, kLanes);
    for (; first < w.head_width; first += kLanes)
      of_columns<1>(columns, first, value, y, static_cast<int>(std::min<int64_t>(kLanes, w.head_width - first)));
  }

 private:
  static constexpr int kTogether = 4;

  template <int kVectors, bool kWide>
  static void of_columns(Columns<kWide> columns, int64_t first, const T* value, float* y, int count) {
    Floats values[kVectors], sums[kVectors];
    for (int v = 0; v < kVectors; v++) values[v] = load_lanes(value + first + v * kLanes, count);
    columns.from += first;
    columns.to += first;
    columns.template run<kVectors>(values, sums, count);
    for (int v = 0; v < kVectors; v++) store_lanes(y + first + v * kLanes, sums[v], count);
  }
};

// weight * rms_norm(y) * silu(gate), or sigmoid(gate), each head by itself.
template <typename T>
void normalise(T* out, const float* y, const T* gate, const GatedDeltaWeights& w) {
  const T* weight = static_cast<const T*>(w.norm);
  for (int64_t first = 0; first < w.inner(); first += w.head_width) {
    const Floats factor = splat(inverse_rms(y + first, w.head_width, static_cast<float>(w.eps)));
    for_lanes(w.head_width, [&](int64_t d, int count) {
      const Floats normed = load_lanes(weight + d, count) * (load_lanes(y + first + d, count) * factor);
      const Floats opening = load_lanes(gate + first + d, count);
      store_lanes(out + first + d, normed * (w.is_wide ? Sigmoid::of(opening) : Silu::of(opening)), count);
    });
  }
}

}  // namespace

template <typename T>
void gated_delta(T* out, const T* projected, const GatedDeltaWeights& w, T* inputs, float* states,
                 const StateRows& at, int64_t rows, const ScanSpace<T>& space, const Worker& worker) {
  const int64_t inner = w.inner(), width = w.convolved(), stride = w.stride();
  CausalConv<T, PlainInput<T>>{space.convolved, static_cast<const T*>(w.taps), nullptr, inputs,
                               {projected, stride, inner}, at, rows, width, w.num_taps}
      .run(worker);
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(w.key_width));
  const Scan<T> scan{projected, w, space};
  const int64_t parts = w.unit() / w.key_width;  // queries, keys, and decays if they are wide
  worker.for_shares(rows * parts, [&](int64_t task) {
    const int64_t row = task / parts, head = task % parts;
    float* unit = space.unit + row * w.unit() + head * w.key_width;
    if (head >= 2 * w.key_heads) {
      const int64_t h = head - 2 * w.key_heads;
      for (int64_t k = 0; k < w.key_width; k++) unit[k] = scan.decay(row, h * w.key_width + k, h);
      return;
    }
    make_unit(unit, space.convolved + row * width + head * w.key_width, w.key_width,
              head < w.key_heads ? query_scale : 1.0f);
  });
  const int64_t size = w.state_size();
  const std::unique_ptr<float[]> state(new float[size]);
  worker.for_shares(w.heads, [&](int64_t h) {
    scan_rows(state.get(), size, states, w.heads, h, at, rows, [&](int64_t row, const float* from, float* to) {
      if (w.is_wide) scan.template step<true>(row, h, from, to);
      else scan.template step<false>(row, h, from, to);
    });
  });
  worker.for_shares(rows, [&](int64_t row) {
    normalise(out + row * inner, space.scanned + row * inner, projected + row * stride, w);
  });
}

template void gated_delta<Bf16>(Bf16*, const Bf16*, const GatedDeltaWeights&, Bf16*, float*, const StateRows&, int64_t,
                                const ScanSpace<Bf16>&, const Worker&);
template void gated_delta<float>(float*, const float*, const GatedDeltaWeights&, float*, float*, const StateRows&,
                                 int64_t, const ScanSpace<float>&, const Worker&);

namespace {

template <typename T>
void run(const ScanArguments& a, int64_t threads) {
  run_scan<GatedDeltaWeights>(a, threads, [&](const Worker& worker, const GatedDeltaWeights& w) {
    gated_delta<T>(static_cast<T*>(a.out), static_cast<const T*>(a.projected), w, static_cast<T*>(a.inputs), a.states, a.at,
                   a.rows, a.space<T>(), worker);
  });
}

}  // namespace
}  // namespace quire

QUIRE_EXPORT(void, quire_gated_delta, (const quire::ScanArguments* a, int64_t threads), quire::run, (*a, threads))
