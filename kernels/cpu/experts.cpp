// A mixture of experts for a step of few rows, with weights in the layout of kernels/cpu/linear.py. The products of all
// experts run in one call, divided among threads by (expert, block of outputs). The weight of a chosen expert is read
// once for all of its rows; other experts are not read.
//
// The bits of a row do not depend on the other rows, nor on the number of threads: see linear_block.h.

#include <vector>

#include "gates.h"
#include "linear_block.h"
#include "threads.h"

#if defined(__AVX512BF16__)

namespace quire {
namespace {

constexpr int64_t kMostRows = 32;  // MOST_ROWS of experts.py

// Plain data, filled by kernels/cpu/experts.py: the fields must agree. A pair is a token and one of its k choices;
// T * k of them are numbered by token. Strides are in elements.
struct Arguments {
  Bf16* out;                     // [T, C] contiguous
  const Bf16* x;                 // [T, C]
  const Bf16* const* gate_up;    // [E] weights [2 * I, C]
  const Bf16* const* down;       // [E] weights [C, I]
  const int64_t* expert_ids;     // [T, k]
  const float* expert_weights;   // [T, k]
  Bf16 *both, *inner, *results;  // scratch: [T * k, 2 * I] and [T * k, I] by expert, [T * k, C] by pair
  int64_t tokens, choices, experts, width, inner_width, padded_width, padded_inner_width, x_stride, threads;
};

// The pairs sorted by expert; those of one expert in their original order.
struct Groups {
  std::vector<int64_t> pairs;   // [T * k]
  std::vector<int64_t> starts;  // [E + 1], the index of each expert's first pair
  std::vector<int64_t> few;     // experts with 1 to kMostRows pairs

  // False if an expert id is out of range.
  bool fill(const Arguments& a) {
    const int64_t count = a.tokens * a.choices;
    std::vector<int64_t> next(a.experts);
    for (int64_t pair = 0; pair < count; pair++) {
      const int64_t expert = a.expert_ids[pair];
      if (expert < 0 || expert >= a.experts) return false;
      next[expert]++;
    }
    starts.assign(a.experts + 1, 0);
    for (int64_t expert = 0; expert < a.experts; expert++) {
      if (next[expert] > 0 && next[expert] <= kMostRows) few.push_back(expert);
      starts[expert + 1] = starts[expert] + next[expert];
      next[expert] = starts[expert];
    }
    pairs.resize(count);
    for (int64_t pair = 0; pair < count; pair++) pairs[next[a.expert_ids[pair]]++] = pair;
    return true;
  }
};

// The products of all experts with few rows. `row_of(place)` is the address of the inputs of a pair, `result_of(place)`
// that of its outputs, by its index in `pairs`. All threads of a parallel region must call this.
template <typename RowOf, typename ResultOf>
void project(const Groups& groups, const Bf16* const* weights, int64_t outputs, int64_t inputs, int64_t padded_inputs,
             RowOf row_of, ResultOf result_of) {
  const int64_t blocks = blocks_of(outputs), tasks = static_cast<int64_t>(groups.few.size()) * blocks;
  // Dynamic, since experts have different numbers of rows.
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < tasks; task++) {
    const int64_t expert = groups.few[task / blocks], first = task % blocks * kBlockOutputs;
    const int64_t start = groups.starts[expert], count = groups.starts[expert + 1] - start;
    float sums[kMostRows * kBlockOutputs];
    const Bf16* rows[kMostRows];
    for (int64_t row = 0; row < count; row++) rows[row] = row_of(start + row);
    multiply_block(sums, weights[expert] + first * padded_inputs, rows, count, inputs / 2);
    for (int64_t row = 0; row < count; row++) {
      Bf16* to = result_of(start + row) + first;
      for_lanes(std::min(kBlockOutputs, outputs - first), [&](int64_t o, int lanes) {
        store_lanes(to + o, load<Floats>(sums + row * kBlockOutputs + o), lanes);
      });
    }
  }
}

// A rounded product. Otherwise the compiler would fuse it with the sum.
inline Floats apart(Floats product) {
  asm("" : "+v"(product));
  return product;
}

// The results of a token's experts, weighted and summed in the order of its choices.
void add_up(const Arguments& a, int64_t token) {
  const Bf16* results = a.results + token * a.choices * a.width;
  const float* weights = a.expert_weights + token * a.choices;
  for_lanes(a.width, [&](int64_t d, int count) {
    Floats total = apart(load_lanes(results + d, count) * splat(weights[0]));
    for (int64_t choice = 1; choice < a.choices; choice++)
      total += apart(load_lanes(results + choice * a.width + d, count) * splat(weights[choice]));
    store_lanes(a.out + token * a.width + d, total, count);
  });
}

template <typename Activation>
bool run(const Arguments& a) {
  Groups groups;
  if (!groups.fill(a)) return false;
  const int64_t pairs = a.tokens * a.choices, both_width = 2 * a.inner_width;
  const int64_t bytes = static_cast<int64_t>(groups.few.size()) * 3 * a.inner_width * a.width * 2;
#pragma omp parallel num_threads(threads_for(bytes + pairs * a.width * 2, a.threads))
  {
    project(
        groups, a.gate_up, both_width, a.width, a.padded_width,
        [&](int64_t place) { return a.x + groups.pairs[place] / a.choices * a.x_stride; },
        [&](int64_t place) { return a.both + place * both_width; });
#pragma omp for schedule(dynamic)
    for (size_t index = 0; index < groups.few.size(); index++)
      for (int64_t place = groups.starts[groups.few[index]]; place < groups.starts[groups.few[index] + 1]; place++) {
        const Bf16* gate = a.both + place * both_width;
        multiply_gate<Activation>(a.inner + place * a.inner_width, gate, gate + a.inner_width, a.inner_width);
      }
    project(
        groups, a.down, a.width, a.inner_width, a.padded_inner_width,
        [&](int64_t place) { return a.inner + place * a.inner_width; },
        [&](int64_t place) { return a.results + groups.pairs[place] * a.width; });
#pragma omp for
    for (int64_t token = 0; token < a.tokens; token++) add_up(a, token);
  }
  return true;
}

}  // namespace
}  // namespace quire

// False if an expert id is out of range; nothing is computed then.
#define QUIRE_EXPERTS(NAME, ACTIVATION)                                                     \
  extern "C" bool NAME(const void* arguments) {                                             \
    return quire::run<quire::ACTIVATION>(*static_cast<const quire::Arguments*>(arguments)); \
  }
QUIRE_EXPERTS(quire_experts_silu_bf16, Silu)
QUIRE_EXPERTS(quire_experts_gelu_tanh_bf16, GeluTanh)
QUIRE_EXPERTS(quire_experts_gelu_bf16, Gelu)

#endif
