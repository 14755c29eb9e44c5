// Products of rows and weights that are quantised in groups, of those whose format rounds rows: see group_format.h, and
// dequantised_product.h for the others.
//
// Rows are rounded to signed bytes in groups of 32, from -127 to 127, so that no instruction's sum saturates. The sum of a
// group, or of half of it where halves have scales, is an integer, which is exact in any order. Groups are added in their
// order, and halves in theirs:
//
//     sum = fma(scale of the weight * scale of the row, sum of the group, sum)
//     sum = fma(minimum of the weight, scale of the row * sum of the row's values, sum)   if there are minima
//
// With a table of 16 bits there are two such sums over each chunk: of the lower bytes of its numbers, and of the upper ones
// with 256 times the scale.
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

// Rounds one group of a row [I], of so many rows up to kRoundedRows, to its place: tile after tile of rows, group after
// group of a tile, its rows.
template <typename T>
void round_group_of(RowGroup* rounded, int64_t row, int64_t count, int64_t group, const T* from, int64_t inputs,
                    const GroupFormat& format);

// Writes the products of some rows and blocks of a weight, each result rounded once, after the bias is added. A block is
// read after the other and each chunk in its order: memory is one stream, which processors foresee.
template <typename T>
struct GroupedProducts {
  const void* weight;
  const GroupFormat* format;
  const T* bias;            // [O], or null
  const RowGroup* rounded;  // the rows; see `round_group_of`
  T* const* results;        // [count] addresses of rows [O]
  int64_t count, inputs, outputs;

  void multiply_blocks(int64_t begin, int64_t end) const;
};

// Outputs of a matrix, in one format.
struct MatrixPart {
  const void* weight;         // [outputs, inputs]
  const GroupFormat* format;  // of a weight in groups, or null
  int64_t outputs;
  int64_t scale_inputs;       // of 8-bit floats those with one scale; 0 without a format: it is packed

  bool is_float8() const { return scale_inputs > 0; }
  bool rounds_rows() const { return format != nullptr && format->rounds_rows; }

  int64_t bytes(int64_t inputs, int64_t element_bytes) const {
    return outputs * inputs * (format != nullptr ? format->bits : is_float8() ? 8 : 8 * element_bytes) / 8;
  }
};

// As `linear`, for a quantised weight. The scratch is for `rounded_bytes`.
template <typename T>
void grouped_linear(const LinearArguments& a, const GroupFormat& format, const Worker& worker);

}  // namespace quire
