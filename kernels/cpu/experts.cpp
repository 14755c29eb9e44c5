// A mixture of experts with packed weights: see packed_product.h. The products of all experts run in one call, divided
// among threads by (expert, blocks of outputs). The weight of a chosen expert is read once for all of its rows; other
// experts are not read.
//
// The bits of a row depend neither on the other rows, nor on the number of threads.

#include <vector>

#include "gates.h"
#include "packed_product.h"
#include "threads.h"

namespace quire {
namespace {

// The outputs of a task, in blocks.
constexpr int64_t kTaskBlocks = 4;

// Plain data, filled by kernels/cpu/experts.py: the fields must agree. A pair is a token and one of its k choices;
// T * k of them are numbered by token. Strides are in elements. Copies have the type of inputs, and rows filled up to
// whole steps; there are none if rows need no copy.
struct Arguments {
  void* out;                     // [T, C] contiguous
  const void* x;                 // [T, C]
  const void* const* gate_up;    // [E] packed weights [2 * I, C]
  const void* const* down;       // [E] packed weights [C, I]
  const int64_t* expert_ids;     // [T, k]
  const float* expert_weights;   // [T, k]
  // Scratch: [T * k, 2 * I] and [T * k, I] by expert; [T * k, C] by pair, at first for the rows of x by expert.
  void *both, *inner, *results;
  void *x_copy, *inner_copy;     // scratch: [T, C] and [T * k, I] by expert
  int64_t tokens, choices, experts, width, inner_width, x_stride, threads;
};

// The pairs sorted by expert; those of one expert in their original order.
struct Groups {
  std::vector<int64_t> pairs;   // [T * k]
  std::vector<int64_t> starts;  // [E + 1], the index of each expert's first pair
  std::vector<int64_t> chosen;  // experts that have a pair

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
      if (next[expert] > 0) chosen.push_back(expert);
      starts[expert + 1] = starts[expert] + next[expert];
      next[expert] = starts[expert];
    }
    pairs.resize(count);
    for (int64_t pair = 0; pair < count; pair++) pairs[next[a.expert_ids[pair]]++] = pair;
    return true;
  }
};

// The products of all experts. Rows and results are those of each pair, by its index in `pairs`. All workers must call this.
template <typename T>
void project(const Groups& groups, const void* const* weights, int64_t outputs, int64_t inputs,
             const std::vector<const InputOf<T>*>& rows, const std::vector<T*>& results, const Worker& worker) {
  const int64_t blocks = blocks_of(outputs), parts = (blocks + kTaskBlocks - 1) / kTaskBlocks;
  worker.for_each(static_cast<int64_t>(groups.chosen.size()) * parts, [&](int64_t task) {
    const int64_t expert = groups.chosen[task / parts], first = task % parts * kTaskBlocks;
    const int64_t start = groups.starts[expert], count = groups.starts[expert + 1] - start;
    const Products<T> products{static_cast<const T*>(weights[expert]), nullptr, rows.data() + start,
                               results.data() + start, count, inputs, outputs};
    products.multiply_blocks(first, std::min(first + kTaskBlocks, blocks));
  });
}

// The results of a token's experts, weighted and summed in the order of its choices.
template <typename T>
void add_up(const Arguments& a, int64_t token) {
  const T* results = static_cast<const T*>(a.results) + token * a.choices * a.width;
  const float* weights = a.expert_weights + token * a.choices;
  for_lanes(a.width, [&](int64_t d, int count) {
    Floats total = load_lanes(results + d, count) * splat(weights[0]);
    for (int64_t choice = 1; choice < a.choices; choice++)
      total += load_lanes(results + choice * a.width + d, count) * splat(weights[choice]);
    store_lanes(static_cast<T*>(a.out) + token * a.width + d, total, count);
  });
}

// The address of a row of inputs for a product: its own, or that of its copy, which is made now.
template <typename T>
const InputOf<T>* as_inputs(const T* row, void* copies, int64_t index, int64_t inputs) {
  if (!needs_copy<T>(inputs)) return reinterpret_cast<const InputOf<T>*>(row);
  InputOf<T>* copy = static_cast<InputOf<T>*>(copies) + index * copied_row(inputs);
  copy_row(copy, row, inputs);
  return copy;
}

// Tiles of AMX are loaded from rows at equal distances: those of an expert are copied, once for all of its outputs.
#if defined(QUIRE_AMX)
template <typename T>
constexpr bool kGathers = std::is_same_v<T, Bf16>;
#else
template <typename T>
constexpr bool kGathers = false;
#endif

template <typename Activation, typename T>
bool run(const Arguments& a) {
  Groups groups;
  if (!groups.fill(a)) return false;
  const int64_t pairs = a.tokens * a.choices, both_width = 2 * a.inner_width;
  const int64_t bytes =
      (static_cast<int64_t>(groups.chosen.size()) * 3 * a.inner_width + pairs) * a.width * static_cast<int64_t>(sizeof(T));
  const T* x = static_cast<const T*>(a.x);
  T *both = static_cast<T*>(a.both), *inner = static_cast<T*>(a.inner), *results = static_cast<T*>(a.results);
  std::vector<const InputOf<T>*> tokens(a.tokens), outer_rows(pairs), inner_rows(pairs);
  std::vector<T*> both_rows(pairs), result_rows(pairs);
  run_together(threads_for(bytes, a.threads), [&](const Worker& worker) {
    worker.for_shares(a.tokens, [&](int64_t token) {
      tokens[token] = as_inputs(x + token * a.x_stride, a.x_copy, token, a.width);
    });
    worker.for_shares(pairs, [&](int64_t place) {
      outer_rows[place] = tokens[groups.pairs[place] / a.choices];
      if constexpr (kGathers<T>)
        if (a.width % kGroupInputs == 0) {
          T* gathered = results + place * a.width;  // where there is nothing yet
          outer_rows[place] = std::copy_n(outer_rows[place], a.width, gathered) - a.width;
        }
      both_rows[place] = both + place * both_width;
      result_rows[place] = results + groups.pairs[place] * a.width;
    });
    project<T>(groups, a.gate_up, both_width, a.width, outer_rows, both_rows, worker);
    worker.for_shares(pairs, [&](int64_t place) {
      T* row = inner + place * a.inner_width;
      multiply_gate<Activation>(row, both_rows[place], both_rows[place] + a.inner_width, a.inner_width);
      inner_rows[place] = as_inputs(static_cast<const T*>(row), a.inner_copy, place, a.inner_width);
    });
    project<T>(groups, a.down, a.width, a.inner_width, inner_rows, result_rows, worker);
    worker.for_shares(a.tokens, [&](int64_t token) { add_up<T>(a, token); });
  });
  return true;
}

}  // namespace
}  // namespace quire

// False if an expert id is out of range; nothing is computed then.
#define QUIRE_EXPERTS(NAME, ACTIVATION, T)                                                     \
  extern "C" bool NAME(const void* arguments) {                                                \
    return quire::run<quire::ACTIVATION, T>(*static_cast<const quire::Arguments*>(arguments)); \
  }
QUIRE_EXPERTS(quire_experts_silu_bf16, Silu, quire::Bf16)
QUIRE_EXPERTS(quire_experts_silu_f32, Silu, float)
QUIRE_EXPERTS(quire_experts_gelu_tanh_bf16, GeluTanh, quire::Bf16)
QUIRE_EXPERTS(quire_experts_gelu_tanh_f32, GeluTanh, float)
QUIRE_EXPERTS(quire_experts_gelu_bf16, Gelu, quire::Bf16)
QUIRE_EXPERTS(quire_experts_gelu_f32, Gelu, float)
