// RMSNorm of one row, rounded as kernels/rms_norm.py describes.
#pragma once

#include <algorithm>
#include <cmath>

#include "threads.h"
#include "vectors.h"

namespace quire {

// Plain data, filled by kernels/rms_norm.py: the fields must agree. Strides are in elements.
struct NormArguments {
  void* out;            // [T, D]; may be x
  const void* x;        // [T, D]
  void* residual;       // [T, D], which becomes the sum; null: x itself is normalised
  const void* weight;   // [D], of the type of x or float; null: only the sum is computed
  int64_t rows, width, out_stride, x_stride, residual_stride;
  int64_t wide_weight;  // whether the weight is float
  double eps;
};

// Residual add and RMSNorm. kernels/rms_norm.py has the formula.
template <typename T>
void add_rms_norm(const NormArguments& a, const Worker& worker);

// The factor of a row: 1 / sqrt(mean of squares + eps).
template <typename T>
inline float inverse_rms(const T* row, int64_t width, float eps) {
  Part sums[kLaneParts]{};
  for_lanes(width, [&](int64_t d, int count) {
    for (int i = 0; i < kLaneParts; i++) {
      const Part x = load_lanes<Part>(row + d + i * kPartLanes, std::clamp(count - i * kPartLanes, 0, kPartLanes));
      sums[i] = fused(x, x, sums[i]);
    }
  });
  const float total = reduce(sums, [](auto a, auto b) { return a + b; });
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

// weight * (row * factor, rounded to the type of the weight). The caller rounds the result.
template <typename T, typename W>
inline Part normalised(const T* row, const W* weight, float factor, int64_t d, int count) {
  return load_lanes<Part>(weight + d, count) * rounded(load_lanes<Part>(row + d, count) * splat<Part>(factor), weight);
}

}  // namespace quire
