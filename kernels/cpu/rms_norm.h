// RMSNorm of one row, rounded as kernels/rms_norm.py describes.
#pragma once

#include <cmath>

#include "vectors.h"

namespace quire {

// The factor of a row: 1 / sqrt(mean of squares + eps).
template <typename T>
inline float inverse_rms(const T* row, int64_t width, float eps) {
  Floats sums{};
  for_lanes(width, [&](int64_t d, int count) {
    const Floats x = load_lanes(row + d, count);
    sums = fused(x, x, sums);
  });
  const float total = reduce(sums, [](Floats a, Floats b) { return a + b; });
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

// weight * (row * factor, rounded to the type of the weight). The caller rounds the result.
template <typename T, typename W>
inline Floats normalised(const T* row, const W* weight, float factor, int64_t d, int count) {
  return load_lanes(weight + d, count) * rounded(load_lanes(row + d, count) * splat(factor), weight);
}

}  // namespace quire
