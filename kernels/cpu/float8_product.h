// Products of rows and weights of 8-bit floats (e4m3).
//
// A weight [O, I] (kernels/float8_weight.py) is blocks of 16 outputs: the scales [S, 16] in float32, of `scale_inputs`
// inputs each, then the bytes in the order in which a packed weight has its elements (packed_product.h).
//
// An output is a sum over spans of inputs that have one scale, one after the other: the span's sum times the scale is added
// by a fused product. The span's sum is that of a packed weight with the same values, which bfloat16 holds exactly. So no
// value is rounded, and the bits depend neither on other rows, nor on threads, nor on the instruction set.
#pragma once

#include <numeric>

#include "linear.h"
#include "packed_product.h"

namespace quire {

struct Float8Weight {
  const uint8_t* data;
  int64_t inputs, scale_inputs;

  static constexpr int64_t kMostSpan = 128;

  int64_t scale_floats() const { return (inputs + scale_inputs - 1) / scale_inputs * kBlockOutputs; }
  // The inputs of a span, but for the last one.
  int64_t span() const { return scale_inputs >= inputs ? kMostSpan : std::gcd(scale_inputs, kMostSpan); }
};

// Writes the products of rows and blocks of a weight. `all` has none.
template <typename T>
void multiply_float8(const Products<T>& all, const Float8Weight& weight, int64_t begin, int64_t end);

// As `linear`, for such a weight.
template <typename T>
void float8_linear(const LinearArguments& a, const Float8Weight& weight, const Worker& worker);

}  // namespace quire
