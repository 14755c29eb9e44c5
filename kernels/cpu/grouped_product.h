// Products of rows and weights that are quantised in groups: see group_format.h.
//
// Rows are rounded to signed bytes in groups of 32, from -127 to 127, so that no instruction's sum saturates. The sum of a
// group, or of half of it where halves have scales, is an integer, which is exact in any order. Groups are added in their
// order, and halves in theirs:
//
//     sum = fma(scale of the weight * scale of the row, sum of the group, sum)
//     sum = fma(minimum of the weight, scale of the row * sum of the row's values, sum)   if there are minima
//
// So the bits of a result depend neither on the instruction set, nor on the other rows, nor on threads.
#pragma once

#include "group_format.h"
#include "linear.h"

namespace quire {

// The rows that are rounded at a time: they stay in the cache while the weight passes.
constexpr int64_t kRoundedRows = 128;

// 32 inputs of a row: values * scale. What else there is depends on the weight; the last two of each are for halves.
struct RowGroup {
  float scale;
  float factors[2];   // what minima or minus zero points are multiplied by
  int32_t starts[2];  // what is added where products have unsigned values, not moved by the weight's offset
  int8_t values[kGroupInputs];
};

// The bytes that the rounded copies of some rows take.
constexpr int64_t rounded_bytes(int64_t rows, int64_t inputs) {
  return (rows < kRoundedRows ? rows : kRoundedRows) * groups_of(inputs) * static_cast<int64_t>(sizeof(RowGroup));
}

// As `linear`, for a quantised weight. The scratch is for `rounded_bytes`.
template <typename T>
void grouped_linear(const LinearArguments& a, const GroupFormat& format, const Worker& worker);

}  // namespace quire
