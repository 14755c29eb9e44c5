// The gated delta rule between its projections: convolution, scan, and the norm of each head, with a gate.

#include "gated_delta.h"

#include <cmath>

#include "rms_norm.h"

namespace quire {
namespace {

// Of a query or key, in float: divided by its length. `scale` multiplies it.
template <typename T>
void make_unit(float* out, const T* from, int64_t width, float scale) {
  constexpr float kEps = 1e-6f;  // added to the sum of squares
  const float factor = scale * inverse_rms(from, width, kEps / static_cast<float>(width)) /
                       std::sqrt(static_cast<float>(width));
  for_parts(width, [&](int64_t d, int count) { store_lanes(out + d, load_lanes<Part>(from + d, count) * factor, count); });
}

// What heads need of a row, in this order. If each element of a key has a decay of its own, J = H.
struct Prepared {
  float *queries, *keys;  // [J, K]
  float *decays;          // [H], or [H, K]
  float *betas;           // [H]

  Prepared(float* from, const GatedDeltaWeights& w)
      : queries(from), keys(queries + w.keys()), decays(keys + w.keys()), betas(decays + w.steps()) {}
};

template <typename T>
struct Scan {
  const T* projected;
  const GatedDeltaWeights& w;
  const ScanSpace<T>& space;

  Prepared prepared(int64_t row) const { return {space.prepared + row * w.stride(), w}; }

  // The query and the key of a key head.
  void prepare_keys(int64_t row, int64_t head) const {
    const Prepared to = prepared(row);
    const T* query = space.convolved + row * w.convolved() + head * w.key_width;
    make_unit(to.queries + head * w.key_width, query, w.key_width, 1.0f / std::sqrt(static_cast<float>(w.key_width)));
    make_unit(to.keys + head * w.key_width, query + w.keys(), w.key_width, 1.0f);
  }

  // decays: exp(decays * softplus(a + dt_bias)); betas: sigmoid(b).
  void prepare_steps(int64_t row) const {
    const Prepared to = prepared(row);
    const T* betas = projected + row * w.stride() + w.inner() + w.convolved();
    const T* steps = betas + w.heads;
    for_parts(w.heads, [&](int64_t h, int count) {
      store_lanes(to.betas + h, Sigmoid::of(load_lanes<Part>(betas + h, count)), count);
    });
    const auto decay = [&](int64_t a, int count, Part rates) {
      const Part step = softplus(load_lanes<Part>(steps + a, count) + load_lanes<Part>(w.dt_bias + a, count));
      store_lanes(to.decays + a, exponential(step * rates), count);
    };
    if (!w.is_wide)
      return for_parts(w.heads, [&](int64_t h, int count) { decay(h, count, load_lanes<Part>(w.decays + h, count)); });
    for (int64_t h = 0; h < w.heads; h++)
      for_parts(w.key_width, [&](int64_t k, int count) { decay(h * w.key_width + k, count, splat<Part>(w.decays[h])); });
  }

  template <bool kWide, int kParts>
  void step(int64_t row, int64_t h, int64_t first, int count, const Columns& state) const {
    const Prepared of_row = prepared(row);
    const int64_t key_head = w.key_head_of(h) * w.key_width, column = h * w.head_width + first;
    const float *key = of_row.keys + key_head, *query = of_row.queries + key_head;
    const float* decays = of_row.decays + (kWide ? key_head : h);
    Part held[kParts] = {}, changes[kParts], sums[kParts] = {};
    for (int64_t k = 0; k < w.key_width; k++) {
      const Part by = splat<Part>(kWide ? key[k] * decays[k] : key[k]);
      for (int v = 0; v < kParts; v++)
        held[v] = fused(load_lanes<Part>(state.from + k * state.from_stride + v * kPartLanes, count), by, held[v]);
    }
    const T* values = space.convolved + row * w.convolved() + 2 * w.keys() + column;
    for (int v = 0; v < kParts; v++) {
      const Part value = load_lanes<Part>(values + v * kPartLanes, count);
      changes[v] = (value - (kWide ? held[v] : held[v] * decays[0])) * of_row.betas[h];
    }
    for (int64_t k = 0; k < w.key_width; k++) {
      const float* from = state.from + k * state.from_stride;
      float* to = state.to + k * state.to_stride;
      const Part decay = splat<Part>(decays[kWide ? k : 0]), by = splat<Part>(key[k]), of = splat<Part>(query[k]);
      for (int v = 0; v < kParts; v++) {
        const Part left = load_lanes<Part>(from + v * kPartLanes, count) * decay;
        const Part next = fused(by, changes[v], left);
        store_lanes(to + v * kPartLanes, next, count);
        sums[v] = fused(next, of, sums[v]);
      }
    }
    float* y = space.scanned + row * w.inner() + column;
    for (int v = 0; v < kParts; v++) store_lanes(y + v * kPartLanes, sums[v], count);
  }
};

// weight * rms_norm(y) * silu(gate), or sigmoid(gate), each head by itself.
template <typename T>
void normalise(T* out, const float* y, const T* gate, const GatedDeltaWeights& w) {
  const T* weight = static_cast<const T*>(w.norm);
  for (int64_t first = 0; first < w.inner(); first += w.head_width) {
    const float factor = inverse_rms(y + first, w.head_width, static_cast<float>(w.eps));
    for_parts(w.head_width, [&](int64_t d, int count) {
      const Part normed = load_lanes<Part>(weight + d, count) * (load_lanes<Part>(y + first + d, count) * factor);
      const Part opening = load_lanes<Part>(gate + first + d, count);
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
  const Scan<T> scan{projected, w, space};
  worker.for_shares(rows * (w.key_heads + 1), [&](int64_t task) {
    const int64_t row = task / (w.key_heads + 1), head = task % (w.key_heads + 1);
    if (head < w.key_heads) scan.prepare_keys(row, head);
    else scan.prepare_steps(row);
  });
  Tile tile;
  worker.for_shares(w.heads, [&](int64_t h) {
    scan_rows({states, w.heads, h, w.key_width, w.head_width}, at, rows, tile,
              [&](auto parts, int64_t row, int64_t first, int count, const Columns& columns) {
                constexpr int kParts = decltype(parts)::value;
                if (w.is_wide) scan.template step<true, kParts>(row, h, first, count, columns);
                else scan.template step<false, kParts>(row, h, first, count, columns);
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
