// x W^T + b for a few rows: see linear_block.h. The bits of a row do not depend on the others, nor on the number of
// threads.

#include "linear_block.h"
#include "threads.h"

#if defined(__AVX512BF16__)

namespace quire {
namespace {

constexpr int64_t kMostRows = 8;  // MOST_ROWS of linear.py

// Plain data, filled by kernels/cpu/linear.py: the fields must agree. Strides are in elements.
struct Arguments {
  Bf16* out;           // [T, O] contiguous
  const Bf16* x;       // [T, I]
  const Bf16* weight;  // [O / 64, I_padded / 2, 64, 2], the last blocks padded
  const Bf16* bias;    // [O], or null
  int64_t rows, inputs, outputs, padded_inputs, x_stride, threads;
};

void project_block(const Arguments& a, int64_t block) {
  float sums[kMostRows * kBlockOutputs];
  const Bf16* rows[kMostRows];
  for (int64_t row = 0; row < a.rows; row++) rows[row] = a.x + row * a.x_stride;
  const int64_t first = block * kBlockOutputs;
  multiply_block(sums, a.weight + first * a.padded_inputs, rows, a.rows, a.inputs / 2);
  for (int64_t row = 0; row < a.rows; row++)
    for_lanes(std::min(kBlockOutputs, a.outputs - first), [&](int64_t o, int count) {
      Floats total = load<Floats>(sums + row * kBlockOutputs + o);
      if (a.bias != nullptr) total += load_lanes(a.bias + first + o, count);
      store_lanes(a.out + row * a.outputs + first + o, total, count);
    });
}

}  // namespace
}  // namespace quire

extern "C" void quire_linear_bf16(const void* arguments) {
  using namespace quire;
  const Arguments& a = *static_cast<const Arguments*>(arguments);
  const int64_t blocks = blocks_of(a.outputs);
#pragma omp parallel for schedule(static) num_threads(threads_for(a.outputs * a.inputs * 2, a.threads))
  for (int64_t block = 0; block < blocks; block++) project_block(a, block);
}

#endif
