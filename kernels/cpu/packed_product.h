// Products of rows and packed weights.
//
// The layout of a weight [O, I] (kernels/packed_weight.py): blocks of 16 outputs, the last one filled up with zeros. Of
// bfloat16 a block is [I / 2, 16, 2], pairs of inputs: each KiB of it is a tile of AMX. I is filled up to a multiple of
// 32, or of 2 if it is less than 32. Of float32 a block is [I, 16].
//
// An output is the sum over its inputs one after the other, in float32, by fused multiply-adds. Of bfloat16 each pair of
// inputs is added as AVX512-BF16 does it, first the odd one, with denormals as zero, also where a CPU has no such
// instructions. So its bits depend neither on the other rows, nor on how rows and outputs are divided into tiles and among
// threads, nor on the instruction set; only AMX has an order of its own (amx_product.cpp).
#pragma once

#include <type_traits>

#include "vectors.h"

namespace quire {

constexpr int64_t kBlockOutputs = 16;
constexpr int64_t kGroupInputs = 32;

// The rows that pass a block of a weight at a time, which limits the memory for their sums.
constexpr int64_t kPassRows = 256;

// The type that rows must have for products with a weight. Without instructions for bfloat16 it is float.
#if defined(QUIRE_AVX512_BF16)
template <typename Weight>
using InputOf = Weight;
#else
template <typename Weight>
using InputOf = float;
#endif

constexpr int64_t blocks_of(int64_t outputs) { return (outputs + kBlockOutputs - 1) / kBlockOutputs; }

// The elements of a block of a weight.
template <typename Weight>
constexpr int64_t block_size_of(int64_t inputs) {
  const int64_t group = sizeof(Weight) == sizeof(float) ? 1 : inputs < kGroupInputs ? 2 : kGroupInputs;
  return kBlockOutputs * ((inputs + group - 1) / group * group);
}

// Of blocks that are smaller than a page of memory, processors do not foresee the next ones. A few rows, which wait for
// memory, load those so far ahead.
constexpr int64_t kPageBytes = 4 << 10, kAheadBytes = 8 << 10;
template <typename Weight>
constexpr bool are_small(int64_t inputs) {
  return block_size_of<Weight>(inputs) * static_cast<int64_t>(sizeof(Weight)) < kPageBytes;
}

// Whether rows have to be copied to be multiplied: converted, or filled up to a whole pair.
template <typename Weight>
constexpr bool needs_copy(int64_t inputs) {
  return !std::is_same_v<Weight, InputOf<Weight>> || (sizeof(Weight) < sizeof(float) && inputs % 2 != 0);
}

// The elements of a copy of a row.
constexpr int64_t copied_row(int64_t inputs) { return (inputs + 1) / 2 * 2; }

template <typename Weight>
inline void copy_row(InputOf<Weight>* to, const Weight* from, int64_t inputs) {
  for_lanes(inputs, [&](int64_t i, int count) { store_lanes(to + i, load_lanes(from + i, count), count); });
  if (inputs % 2) to[inputs] = {};
}

// Writes the products of some rows and blocks of a weight, each result rounded once, after the bias is added, or what was
// there before.
template <typename Weight>
struct Products {
  const Weight* weight;                // packed
  const Weight* bias;                  // [O], or null
  const InputOf<Weight>* const* rows;  // [count] addresses of rows [I]
  Weight* const* results;              // [count] addresses of rows [O]
  int64_t count, inputs, outputs;
  bool adds = false;                   // to the results that are there

  void multiply_blocks(int64_t begin, int64_t end) const;
};

#if defined(QUIRE_AMX)
template <>
void Products<Bf16>::multiply_blocks(int64_t begin, int64_t end) const;  // amx_product.cpp
#endif

}  // namespace quire
