// Mamba 2 between its projections: convolution, scan, and the norm of what is gated. Tokens are scanned one by one, so
// bits do not depend on how a text is cut into chunks.

#include "mamba2.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "gates.h"
#include "rms_norm.h"

namespace quire {
namespace {

// The inputs of the convolution in a row of projections: gates [I], inputs [D], steps [H].
template <typename T>
struct PlainInput {
  const T* projected;
  int64_t stride, first;

  Floats input(int64_t row, int64_t d, int count) const { return load_lanes(projected + row * stride + first + d, count); }
  Floats output(Floats sum, int64_t, int64_t, int) const { return Silu::of(rounded(sum, projected)); }
};

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
struct Scan {
  const T* projected;
  const Mamba2Weights& w;
  float* states;  // [slots, H, N, P]
  const StateRows& at;
  const Mamba2Space<T>& space;
  int64_t rows;

  // All rows of one head; `state`: [N, P], for the current item.
  void head(int64_t h, float* state) const {
    const int64_t size = w.state_width * w.head_width;
    int64_t write = 0;
    for (int64_t row = 0; row < rows; row++) {
      if (row == at.begins[row]) {
        const int64_t source = at.sources[row];
        if (source < 0) std::fill_n(state, size, 0.0f);
        else std::copy_n(states + (source * w.heads + h) * size, size, state);
      }
      step(row, h, state);
      // Those of an item are in order, as the items are.
      for (; write < at.count && at.write_ends[write] == row + 1; write++)
        std::copy_n(state, size, states + (at.write_slots[write] * w.heads + h) * size);
    }
  }

 private:
  void step(int64_t row, int64_t h, float* state) const {
    const int64_t inner = w.inner(), width = w.convolved(), group = h / (w.heads / w.groups);
    const T* x = space.convolved + row * width + h * w.head_width;
    const T* into = space.convolved + row * width + inner + group * w.state_width;
    const T* out_of = into + w.groups * w.state_width;
    float raw;
    load_one(&raw, projected + row * (inner + width + w.heads) + inner + width + h);
    const float dt = softplus(raw + w.dt_bias[h]);
    const Floats decay = splat(std::exp(dt * w.decays[h]));
    float* y = space.scanned + row * inner + h * w.head_width;
    for_lanes(w.head_width, [&](int64_t p, int count) {
      const Floats inputs = load_lanes(x + p, count), steps = inputs * splat(dt);
      Floats sum = inputs * splat(w.direct[h]);
      for (int64_t n = 0; n < w.state_width; n++) {
        float in, out;
        load_one(&in, into + n);
        load_one(&out, out_of + n);
        float* place = state + n * w.head_width + p;
        const Floats next = fused(load_lanes(place, count), decay, steps * splat(in));
        store_lanes(place, next, count);
        sum = fused(next, splat(out), sum);
      }
      store_lanes(y + p, sum, count);
    });
  }

  static void load_one(float* to, const float* from) { *to = *from; }
  static void load_one(float* to, const Bf16* from) {
    const uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
    std::memcpy(to, &bits, sizeof(bits));
  }
};

// weight * rms_norm(y * silu(gate)), each group by itself.
template <typename T>
void normalise(T* out, float* y, const T* gate, const Mamba2Weights& w) {
  const int64_t inner = w.inner(), width = inner / w.groups;
  for_lanes(inner, [&](int64_t d, int count) {
    store_lanes(y + d, load_lanes(y + d, count) * Silu::of(load_lanes(gate + d, count)), count);
  });
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
            int64_t rows, const Mamba2Space<T>& space, const Worker& worker) {
  const int64_t inner = w.inner(), width = w.convolved(), stride = inner + width + w.heads;
  CausalConv<T, PlainInput<T>>{space.convolved, static_cast<const T*>(w.taps), static_cast<const T*>(w.bias), inputs,
                               {projected, stride, inner}, at, rows, width, w.num_taps}
      .run(worker);
  const Scan<T> scan{projected, w, states, at, space, rows};
  const std::unique_ptr<float[]> state(new float[w.state_width * w.head_width]);
  worker.for_shares(w.heads, [&](int64_t h) { scan.head(h, state.get()); });
  worker.for_shares(rows, [&](int64_t row) {
    normalise(out + row * inner, space.scanned + row * inner, projected + row * stride, w);
  });
}

template void mamba2<Bf16>(Bf16*, const Bf16*, const Mamba2Weights&, Bf16*, float*, const StateRows&, int64_t,
                           const Mamba2Space<Bf16>&, const Worker&);
template void mamba2<float>(float*, const float*, const Mamba2Weights&, float*, float*, const StateRows&, int64_t,
                            const Mamba2Space<float>&, const Worker&);

namespace {

// Plain data, filled by kernels/cpu/mamba2.py: the fields must agree.
struct Arguments {
  void* out;
  const void* projected;
  const Mamba2Weights* weights;
  void* inputs;
  float* states;
  StateRows at;
  void* convolved;
  float* scanned;
  int64_t rows;
};

template <typename T>
void run(const Arguments& a, int64_t threads) {
  const int64_t bytes = a.rows * a.weights->inner() * a.weights->state_width * static_cast<int64_t>(sizeof(float));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) {
    mamba2<T>(static_cast<T*>(a.out), static_cast<const T*>(a.projected), *a.weights, static_cast<T*>(a.inputs),
              a.states, a.at, a.rows, {static_cast<T*>(a.convolved), a.scanned}, worker);
  });
}

}  // namespace
}  // namespace quire

extern "C" void quire_mamba2_bf16(const quire::Arguments* a, int64_t threads) { quire::run<quire::Bf16>(*a, threads); }
extern "C" void quire_mamba2_f32(const quire::Arguments* a, int64_t threads) { quire::run<float>(*a, threads); }
