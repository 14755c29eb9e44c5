// Products of rows and weights that are quantised in groups of 32 inputs.
//
// A weight [O, I] (kernels/grouped_weight.py) is blocks of 16 outputs. With G groups, a block is the scales [G, 16] in
// float16, with one group more if G is odd, then [G, 8, 16, 4] signed bytes; or of 4 bits [G, 4, 16, 4] bytes, whose low
// halves are the first 16 inputs of a group and whose high halves are the last ones, each with 8 added. The last block and
// the last group are filled up with zeros.
//
// Rows are rounded to signed bytes in the same groups. Bytes are from -127 to 127, so that no instruction's sum saturates.
// The sum of a group is an integer, which is exact in any order; the groups are added in their order:
//
//     sum = fma(scale of the weight * scale of the row, sum of the group, sum)
//
// So the bits of a result depend neither on the instruction set, nor on the other rows, nor on threads.
#pragma once

#include "linear.h"
#include "packed_product.h"

namespace quire {

// The rows that are rounded at a time: they stay in the cache while the weight passes.
constexpr int64_t kRoundedRows = 128;

constexpr int64_t groups_of(int64_t inputs) { return (inputs + kGroupInputs - 1) / kGroupInputs; }

constexpr int64_t kStepBytes = kBlockOutputs * 4;  // of four inputs of a block, or of eight halves

// The bytes of a block before its values, and all of them.
constexpr int64_t scale_bytes(int64_t groups) { return (groups + 1) / 2 * 2 * kBlockOutputs * 2; }
constexpr int64_t block_bytes(int64_t groups, int64_t bits) { return scale_bytes(groups) + groups * bits * kStepBytes; }

// 32 inputs of a row: values * scale.
struct RowGroup {
  float scale;
  int32_t sum;  // of the values
  int8_t values[kGroupInputs];
};

// The bytes that the rounded copies of some rows take.
constexpr int64_t rounded_bytes(int64_t rows, int64_t inputs) {
  return (rows < kRoundedRows ? rows : kRoundedRows) * groups_of(inputs) * static_cast<int64_t>(sizeof(RowGroup));
}

// As `linear`, for a weight of 8 or 4 bits. The scratch is for `rounded_bytes`.
template <typename T>
void grouped_linear(const LinearArguments& a, int64_t bits, const Worker& worker);

}  // namespace quire
