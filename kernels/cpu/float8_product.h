// Products of rows and weights of 8-bit floats: see float8_product.cpp.
#pragma once

#include "linear.h"
#include "packed_product.h"

namespace quire {

// A weight [O, I] (kernels/float8_weight.py), with a scale for so many inputs of an output.
struct Float8Weight {
  const uint8_t* data;
  int64_t inputs, scale_inputs;

  int64_t scale_floats() const { return (inputs + scale_inputs - 1) / scale_inputs * kBlockOutputs; }
};

// The elements that a thread dequantises at a time.
template <typename T>
int64_t float8_elements(int64_t inputs);

// Writes the products of rows and blocks of a weight. `all` has none; `decoded` is space for `float8_elements`.
template <typename T>
void multiply_float8(const Products<T>& all, const Float8Weight& weight, int64_t begin, int64_t end, T* decoded);

// As `linear`, for such a weight. `decoded` is space of all workers.
template <typename T>
void float8_linear(const LinearArguments& a, const Float8Weight& weight, T* decoded, const Worker& worker);

}  // namespace quire
