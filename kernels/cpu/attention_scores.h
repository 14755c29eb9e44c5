// Turns products of a query and a key into scores, as exponents of 2. kernels/attention_scoring.py has the formulas.
//
// Template parameters select the formulas, so that other models have no extra cost.
#pragma once

#include <cmath>

#include "attention_arguments.h"
#include "vectors.h"

namespace quire {

enum class Shaping { kNone, kSoftcap, kAlibi };

constexpr double kLog2E = 1.4426950408889634;

// Accurate relative to the result, also for small results. On [-0.5, 0.5]: the odd polynomial x + x^3 * p(x^2) of
// least relative error, 1.5e-8. Elsewhere: (1 - e) / (1 + e) with e = exp(-2 |x|), without cancellation there.
inline Part hyperbolic_tangent(Part x) {
  const Part size = larger(x, -x);
  const Part e = power_of_two(size * static_cast<float>(-2 * kLog2E));
  const Part far = (1.0f - e) / (1.0f + e);
  const Part square = x * x;
  Part p = splat<Part>(1.7241490e-2f);
  p = fused(p, square, splat<Part>(-5.3045494e-2f));
  p = fused(p, square, splat<Part>(1.3325879e-1f));
  p = fused(p, square, splat<Part>(-3.3333144e-1f));
  const Part near = fused(x, square * p, x);
  return size < 0.5f ? near : x < 0.0f ? -far : far;
}

// The parameters of the formulas, in the form in which they are used.
template <Shaping kShaping>
struct Scores {
  float scale, softcap;
  const float* slopes;  // [H]

  explicit Scores(const AttentionArguments& a)
      : scale(static_cast<float>(kShaping == Shaping::kSoftcap ? a.scale / a.softcap : a.scale * kLog2E)),
        softcap(static_cast<float>(a.softcap * kLog2E)),
        slopes(a.slopes) {}

  // The scores of a query of this head and keys that are so many positions after the query.
  Part operator()(Part products, int64_t head, PartInts aheads) const {
    if constexpr (kShaping == Shaping::kNone) return products * scale;
    if constexpr (kShaping == Shaping::kSoftcap) return hyperbolic_tangent(products * scale) * softcap;
    const float slope = static_cast<float>(slopes[head] * kLog2E);
    return fused(products, splat<Part>(scale), slope * __builtin_convertvector(aheads, Part));
  }
};

// The term of a head's sink in the sum of a row's weights, which are relative to `highest`. Infinity if the sink is
// far above all scores: the row becomes zeros.
inline float sink_weight(const AttentionArguments& a, int64_t head, float highest) {
  if (a.sinks == nullptr) return 0.0f;
  const float above = static_cast<float>(a.sinks[head] * kLog2E) - highest;
  return above > 0.0f ? 1.0f / power_of_two(-above) : power_of_two(above);
}

}  // namespace quire
