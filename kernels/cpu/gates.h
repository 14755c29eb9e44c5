// The activations of a gate, and their product with up.
#pragma once

#include "vectors.h"

namespace quire {

constexpr float kLog2E = 1.4426950408889634f;

// x / (1 + exp(-by)), computed from exp(-|by|), which cannot overflow. If `by` is NaN, x is NaN too.
inline Part times_sigmoid(Part x, Part by) {
  const Part small = power_of_two(larger(by, -by) * splat<Part>(-kLog2E));
  const Part above = by >= 0.0f ? splat<Part>(1.0f) : small;
  const Part value = x * above / (splat<Part>(1.0f) + small);
  return x == x ? value : x;
}

// What an activation makes of up.
struct UpAsItIs {
  static Part of_up(Part up) { return up; }
};

struct Silu : UpAsItIs {
  static Part of(Part x) { return times_sigmoid(x, x); }
};

// (1 + tanh(y)) / 2 is the sigmoid of 2 y, which has no cancellation where tanh is almost -1.
struct GeluTanh : UpAsItIs {
  static Part of(Part x) {
    const float scale = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
    return times_sigmoid(x, splat<Part>(scale) * x * fused(splat<Part>(0.044715f) * x, x, splat<Part>(1.0f)));
  }
};

// The normal distribution function below zero, at -|x|, is exp(-x^2 / 2) * t * P(t) with t = 1 / (1 + |x| / sqrt(8)).
// P was fitted for this to erfc: off by 3e-7 of the value at most where exp is not zero, in float.
struct Gelu : UpAsItIs {
  static Part of(Part x) {
    const Part magnitude = larger(x, -x);
    const Part t = splat<Part>(1.0f) / fused(magnitude, splat<Part>(0.35355339f), splat<Part>(1.0f));
    Part p = splat<Part>(-0.0296932822f);
    p = fused(p, t, splat<Part>(0.143062221f));
    p = fused(p, t, splat<Part>(-0.245203647f));
    p = fused(p, t, splat<Part>(0.140867129f));
    p = fused(p, t, splat<Part>(-0.0145745712f));
    p = fused(p, t, splat<Part>(0.101876379f));
    p = fused(p, t, splat<Part>(0.121417532f));
    p = fused(p, t, splat<Part>(0.141206052f));
    p = fused(p, t, splat<Part>(0.141042166f));
    const Part below = power_of_two(x * x * splat<Part>(-0.5f * kLog2E)) * (t * p);
    const Part value = x * (x >= 0.0f ? splat<Part>(1.0f) - below : below);
    return x == x ? value : x;
  }
};

// That of gpt-oss. Comparisons keep NaN.
struct ClampedSwiglu {
  static Part of(Part x) {
    const Part limited = x > kLimit ? splat<Part>(kLimit) : x;
    return times_sigmoid(limited, limited * splat<Part>(1.702f));
  }
  static Part of_up(Part up) {
    const Part below = up > kLimit ? splat<Part>(kLimit) : up;
    return (below < -kLimit ? splat<Part>(-kLimit) : below) + splat<Part>(1.0f);
  }

 private:
  static constexpr float kLimit = 7.0f;
};

// The gate is up itself, so that this is the square.
struct Relu {
  static Part of(Part x) {
    const Part value = larger(x, Part{});
    return x == x ? value : x;
  }
  static Part of_up(Part up) { return of(up); }
};

struct Sigmoid : UpAsItIs {
  static Part of(Part x) { return x == x ? times_sigmoid(splat<Part>(1.0f), x) : x; }
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
  for_parts(width, [&](int64_t d, int count) {
    const Part opened = rounded(Activation::of(load_lanes<Part>(gate + d, count)), out);
    store_lanes(out + d, opened * Activation::of_up(load_lanes<Part>(up + d, count)), count);
  });
}

}  // namespace quire
