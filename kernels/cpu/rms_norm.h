// RMSNorm of one row, with the roundings that kernels/rms_norm.py describes.
#pragma once

#include <cmath>

#include "vectors.h"

namespace quire {

// The factor that a row is multiplied by: 1 / sqrt(mean of squares + eps).
template <typename T>
inline float inverse_rms(const T* row, int64_t width, float eps) {
  Floats sums{};
  for_lanes(width, [&](int64_t d, int count) {
    const Floats x = load_lanes(row + d, count);
    sums += x * x;
  });
  const float total = reduce(sums, [](Floats a, Floats b) { return a + b; });
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

// weight * (row * factor rounded to the type of the weight), before the last rounding, which is left to the caller.
template <typename T, typename W>
inline Floats normalised(const T* row, const W* weight, float factor, int64_t d, int count) {
  return load_lanes(weight + d, count) * rounded(load_lanes(row + d, count) * splat(factor), weight);
}

}  // namespace quire
