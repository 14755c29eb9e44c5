// The activations of a gate, and their product with up.
#pragma once

#include "vectors.h"

namespace quire {

constexpr float kLog2E = 1.4426950408889634f;

// x / (1 + exp(-by)), computed from exp(-|by|), which cannot overflow. If `by` is NaN, x is NaN too.
inline Floats times_sigmoid(Floats x, Floats by) {
  const Floats small = power_of_two(larger(by, -by) * splat(-kLog2E));
  const Floats above = by >= 0.0f ? splat(1.0f) : small;
  const Floats value = x * above / (splat(1.0f) + small);
  return x == x ? value : x;
}

// What an activation makes of up.
struct UpAsItIs {
  static Floats of_up(Floats up) { return up; }
};

struct Silu : UpAsItIs {
  static Floats of(Floats x) { return times_sigmoid(x, x); }
};

// (1 + tanh(y)) / 2 is the sigmoid of 2 y, which has no cancellation where tanh is almost -1.
struct GeluTanh : UpAsItIs {
  static Floats of(Floats x) {
    const float scale = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
    return times_sigmoid(x, splat(scale) * x * fused(splat(0.044715f) * x, x, splat(1.0f)));
  }
};

// The normal distribution function below zero, at -|x|, is exp(-x^2 / 2) * t * P(t) with t = 1 / (1 + |x| / sqrt(8)).
// P was fitted for this to erfc: off by 3e-7 of the value at most where exp is not zero, in float.
struct Gelu : UpAsItIs {
  static Floats of(Floats x) {
    const Floats magnitude = larger(x, -x);
    const Floats t = splat(1.0f) / fused(magnitude, splat(0.35355339f), splat(1.0f));
    Floats p = splat(-0.0296932822f);
    p = fused(p, t, splat(0.143062221f));
    p = fused(p, t, splat(-0.245203647f));
    p = fused(p, t, splat(0.140867129f));
    p = fused(p, t, splat(-0.0145745712f));
    p = fused(p, t, splat(0.101876379f));
    p = fused(p, t, splat(0.121417532f));
    p = fused(p, t, splat(0.141206052f));
    p = fused(p, t, splat(0.141042166f));
    const Floats below = power_of_two(x * x * splat(-0.5f * kLog2E)) * (t * p);
    const Floats value = x * (x >= 0.0f ? splat(1.0f) - below : below);
    return x == x ? value : x;
  }
};

// That of gpt-oss. Comparisons keep NaN.
struct ClampedSwiglu {
  static Floats of(Floats x) {
    const Floats limited = x > kLimit ? splat(kLimit) : x;
    return times_sigmoid(limited, limited * splat(1.702f));
  }
  static Floats of_up(Floats up) {
    const Floats below = up > kLimit ? splat(kLimit) : up;
    return (below < -kLimit ? splat(-kLimit) : below) + splat(1.0f);
  }

 private:
  static constexpr float kLimit = 7.0f;
};

// The gate is up itself, so that this is the square.
struct Relu {
  static Floats of(Floats x) {
    const Floats value = larger(x, Floats{});
    return x == x ? value : x;
  }
  static Floats of_up(Floats up) { return of(up); }
};

struct Sigmoid : UpAsItIs {
  static Floats of(Floats x) { return x == x ? times_sigmoid(splat(1.0f), x) : x; }
};

constexpr int64_t kUngated = 4;

// Calls body with an activation of this number, which is its place in ACTIVATIONS of kernels/gated_activation.py; the
// number after them is that of the sigmoid.
template <typename Body>
inline void with_activation(int64_t number, Body body) {
  if (number == 0) body(Silu());
  else if (number == 1) body(GeluTanh());
  else if (number == 2) body(Gelu());
  else if (number == 3) body(ClampedSwiglu());
  else if (number == kUngated) body(Relu());
  else body(Sigmoid());
}

// activation(gate) * up for `width` elements; the activation is rounded to their type before the product.
template <typename Activation, typename T>
void multiply_gate(T* out, const T* gate, const T* up, int64_t width) {
  for_lanes(width, [&](int64_t d, int count) {
    const Floats opened = rounded(Activation::of(load_lanes(gate + d, count)), out);
    store_lanes(out + d, opened * Activation::of_up(load_lanes(up + d, count)), count);
  });
}

}  // namespace quire
