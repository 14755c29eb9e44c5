// A mixture of experts with packed or quantised weights: see packed_product.h, grouped_product.h and float8_product.h.
// The products of all experts run in one call, divided among threads by (expert, blocks of outputs). The weight of a
// chosen expert is read once for all of its rows; other experts are not read.
//
// The bits of a row depend neither on the other rows, nor on the number of threads.

#include <algorithm>
#include <vector>

#include "dequantised_product.h"
#include "float8_product.h"
#include "gates.h"
#include "grouped_product.h"
#include "lora.h"
#include "packed_product.h"
#include "threads.h"

namespace quire {
namespace {

// The outputs of a task, in blocks.
constexpr int64_t kTaskBlocks = 4;

// Plain data, filled by kernels/cpu/experts.py: the fields of these two must agree.

// The matrices [O, I] of a projection of all experts.
struct Projection {
  const MatrixPart* parts;  // [E, num_parts], one after the other; those without outputs fill up
  const void* bias;         // [E, O], or null
  int64_t num_parts, outputs, inputs;
  int64_t has_plain, has_rounded;  // whether parts multiply rows as they are, or rounded

  const MatrixPart& part(int64_t expert, int64_t index) const { return parts[expert * num_parts + index]; }

  // That of the outputs of a part, or null.
  template <typename T>
  const T* bias_of(int64_t expert, int64_t index) const {
    if (bias == nullptr) return nullptr;
    const T* found = static_cast<const T*>(bias) + expert * outputs;
    for (int64_t before = 0; before < index; before++) found += part(expert, before).outputs;
    return found;
  }
};

// The adapters of a projection of all experts.
struct ExpertLora {
  const LoraPairs* const* slots;  // those of each expert; null: the slot adds nothing
  int64_t num_slots;
};

// A pair is a token and one of its k choices; T * k of them are numbered by token. Strides are in elements. Copies have the
// type of inputs, and rows filled up to whole steps; there are none if rows need no copy.
struct Arguments {
  void* out;                     // [T, C] contiguous
  const void* x;                 // [T, C]
  Projection gate_up, down;      // [2 * I, C], or [I, C] without gates; and [C, I]
  const int64_t* expert_ids;     // [T, k]
  const float* expert_weights;   // [T, k]
  // Scratch: [T * k, 2 * I] and [T * k, I] by expert; [T * k, C] by pair, at first for the rows of x by expert.
  void *both, *inner, *results;
  void *x_copy, *inner_copy;     // scratch: [T, C] and [T * k, I] by expert
  void* rounded;                 // scratch: groups of [T * k, C] or [T * k, I] by expert, if rows are rounded
  int64_t tokens, choices, experts, width, inner_width, x_stride, threads;
  int64_t activation;            // see `with_activation`
  const int32_t* lora_slots;     // [T]; null: no token has an adapter
  ExpertLora gate_up_lora, down_lora;
  void *lora_inner, *lora_inner_copies, *lora_x_copies;  // as in LoraScratch, of pairs
};

// The pairs sorted by expert; those of one expert in their original order.
struct Groups {
  std::vector<int64_t> pairs;   // [T * k]
  std::vector<int64_t> owners;  // [T * k], the expert of each
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
    owners.resize(count);
    for (int64_t pair = 0; pair < count; pair++) {
      const int64_t expert = a.expert_ids[pair], place = next[expert]++;
      pairs[place] = pair;
      owners[place] = expert;
    }
    return true;
  }
};

// What adapters add to the pairs. Those of one expert and one adapter have a number, which is their slot in tables of the
// call.
struct Adapted {
  std::vector<LoraPairs> gate_up, down;
  LoraRows rows;  // by their index in `Groups::pairs`

  // False if there is no such slot.
  bool find(const Arguments& a, const Groups& groups) {
    if (a.lora_slots == nullptr) return true;
    std::vector<int32_t> numbers(groups.pairs.size(), -1), slots;
    for (const int64_t expert : groups.chosen) {
      const size_t first = slots.size();
      for (int64_t place = groups.starts[expert]; place < groups.starts[expert + 1]; place++) {
        const int32_t slot = a.lora_slots[groups.pairs[place] / a.choices];
        if (slot >= a.gate_up_lora.num_slots) return false;
        if (slot < 0) continue;
        const LoraPairs *into = a.gate_up_lora.slots[slot], *out = a.down_lora.slots[slot];
        if (into == nullptr && out == nullptr) continue;
        const auto found = std::find(slots.begin() + first, slots.end(), slot);
        numbers[place] = static_cast<int32_t>(found - slots.begin());
        if (found != slots.end()) continue;
        slots.push_back(slot);
        gate_up.push_back(into == nullptr ? LoraPairs{} : into[expert]);
        down.push_back(out == nullptr ? LoraPairs{} : out[expert]);
      }
    }
    return rows.find(numbers.data(), nullptr, groups.pairs.size(), slots.size());
  }
};

// What a projection multiplies, and where results go: of each pair, by its index in `Groups::pairs`.
template <typename T>
struct Rows {
  std::vector<const T*> plain;             // rows [I], which are rounded for some weights in groups
  std::vector<const InputOf<T>*> inputs;   // the same as other weights take them
  std::vector<T*> results;                 // rows [O]

  explicit Rows(int64_t pairs) : plain(pairs), inputs(pairs), results(pairs) {}
};

// Rounds one group of the row of a pair, if the weight of its expert multiplies rounded rows.
template <typename T>
void round_pair(const Groups& groups, const Projection& projection, int64_t index, const Rows<T>& rows, RowGroup* rounded,
                int64_t place, int64_t group) {
  const int64_t expert = groups.owners[place], start = groups.starts[expert];
  const MatrixPart& part = projection.part(expert, index);
  if (!part.rounds_rows()) return;
  const int64_t row = place - start, first = start + row / kRoundedRows * kRoundedRows;
  const int64_t count = std::min(kRoundedRows, groups.starts[expert + 1] - first);
  round_group_of(rounded + first * groups_of(projection.inputs), place - first, count, group, rows.plain[place],
                 projection.inputs, *part.format);
}

// The results of an expert's rows and some blocks of a part of its matrix.
template <typename T>
void multiply_part(const Groups& groups, const Projection& projection, int64_t expert, int64_t index,
                   const Rows<T>& rows, const RowGroup* rounded, int64_t begin, int64_t end) {
  const int64_t start = groups.starts[expert], stop = groups.starts[expert + 1];
  const MatrixPart& part = projection.part(expert, index);
  const T* bias = projection.template bias_of<T>(expert, index);
  if (!part.rounds_rows()) {
    Products<T> products{nullptr, bias, rows.inputs.data() + start, rows.results.data() + start, stop - start,
                         projection.inputs, part.outputs};
    if (part.is_float8()) {
      const Float8Weight weight{static_cast<const uint8_t*>(part.weight), projection.inputs, part.scale_inputs};
      return multiply_float8(products, weight, begin, end);
    }
    if (part.format != nullptr) return multiply_dequantised(products, part.weight, *part.format, begin, end);
    products.weight = static_cast<const T*>(part.weight);
    return products.multiply_blocks(begin, end);
  }
  for (int64_t first = start; first < stop; first += kRoundedRows) {
    const GroupedProducts<T> products{part.weight,
                                      part.format,
                                      bias,
                                      rounded + first * groups_of(projection.inputs),
                                      rows.results.data() + first,
                                      std::min(kRoundedRows, stop - first),
                                      projection.inputs,
                                      part.outputs};
    products.multiply_blocks(begin, end);
  }
}

// The products of all experts. Afterwards the results point to the last part. All workers must call this.
template <typename T>
void project(const Groups& groups, const Projection& projection, Rows<T>& rows, RowGroup* rounded,
             const Worker& worker) {
  const int64_t pairs = static_cast<int64_t>(groups.pairs.size()), num_groups = groups_of(projection.inputs);
  const int64_t tasks = (blocks_of(projection.outputs) + kTaskBlocks - 1) / kTaskBlocks;  // of an expert, at most
  for (int64_t index = 0; index < projection.num_parts; index++) {
    if (index > 0)
      worker.for_shares(pairs, [&](int64_t place) {
        rows.results[place] += projection.part(groups.owners[place], index - 1).outputs;
      });
    if (projection.has_rounded)
      worker.for_shares(pairs * num_groups, [&](int64_t i) {
        round_pair(groups, projection, index, rows, rounded, i / num_groups, i % num_groups);
      });
    worker.for_each(static_cast<int64_t>(groups.chosen.size()) * tasks, [&](int64_t task) {
      const int64_t expert = groups.chosen[task / tasks], first = task % tasks * kTaskBlocks;
      const int64_t blocks = blocks_of(projection.part(expert, index).outputs);
      if (first < blocks)
        multiply_part(groups, projection, expert, index, rows, rounded, first, std::min(first + kTaskBlocks, blocks));
    });
  }
}

// The results of a token's experts, weighted and summed in the order of its choices.
template <typename T>
void add_up(const Arguments& a, int64_t token) {
  const T* results = static_cast<const T*>(a.results) + token * a.choices * a.width;
  const float* weights = a.expert_weights + token * a.choices;
  for_parts(a.width, [&](int64_t d, int count) {
    Part total = load_lanes<Part>(results + d, count) * splat<Part>(weights[0]);
    for (int64_t choice = 1; choice < a.choices; choice++)
      total += load_lanes<Part>(results + choice * a.width + d, count) * splat<Part>(weights[choice]);
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

// The bytes that are read of the chosen experts' weights.
template <typename T>
int64_t weight_bytes(const Groups& groups, const Projection& projection) {
  int64_t bytes = 0;
  for (const int64_t expert : groups.chosen)
    for (int64_t index = 0; index < projection.num_parts; index++)
      bytes += projection.part(expert, index).bytes(projection.inputs, sizeof(T));
  return bytes;
}

template <typename Activation, typename T>
bool run(const Arguments& a) {
  Groups groups;
  if (!groups.fill(a)) return false;
  const int64_t pairs = a.tokens * a.choices, both_width = a.gate_up.outputs;
  const int64_t bytes = weight_bytes<T>(groups, a.gate_up) + weight_bytes<T>(groups, a.down) +
                        pairs * a.width * static_cast<int64_t>(sizeof(T));
  const T* x = static_cast<const T*>(a.x);
  T *both = static_cast<T*>(a.both), *inner = static_cast<T*>(a.inner), *results = static_cast<T*>(a.results);
  Adapted adapted;
  if (!adapted.find(a, groups)) return false;
  const bool is_adapted = !adapted.rows.groups.empty();
  const int64_t num_adapted = static_cast<int64_t>(adapted.gate_up.size());
  const LoraTable into_lora{adapted.gate_up.data(), num_adapted, {a.inner_width, a.inner_width}};
  const LoraTable out_lora{adapted.down.data(), num_adapted, {a.width}};
  const LoraScratch<T> scratch{static_cast<T*>(a.lora_inner), static_cast<InputOf<T>*>(a.lora_inner_copies),
                               static_cast<InputOf<T>*>(a.lora_x_copies)};
  std::vector<int64_t> token_of(is_adapted ? pairs : 0);
  for (size_t place = 0; place < token_of.size(); place++) token_of[place] = groups.pairs[place] / a.choices;
  std::vector<const InputOf<T>*> tokens(a.tokens);
  Rows<T> outer_rows(pairs), inner_rows(pairs);
  run_together(threads_for(bytes, a.threads), [&](const Worker& worker) {
    RowGroup* rounded = static_cast<RowGroup*>(a.rounded);
    if (a.gate_up.has_plain)
      worker.for_shares(a.tokens, [&](int64_t token) {
        tokens[token] = as_inputs(x + token * a.x_stride, a.x_copy, token, a.width);
      });
    worker.for_shares(pairs, [&](int64_t place) {
      const int64_t token = groups.pairs[place] / a.choices;
      outer_rows.plain[place] = x + token * a.x_stride;
      outer_rows.inputs[place] = tokens[token];
      if constexpr (kGathers<T>)
        if (a.gate_up.has_plain && a.width % kGroupInputs == 0) {
          T* gathered = results + place * a.width;  // where there is nothing yet
          outer_rows.inputs[place] = std::copy_n(tokens[token], a.width, gathered) - a.width;
        }
      outer_rows.results[place] = both + place * both_width;
      inner_rows.results[place] = results + groups.pairs[place] * a.width;
    });
    project<T>(groups, a.gate_up, outer_rows, rounded, worker);
    if (is_adapted)
      add_lora<T>(both, x, a.x_stride, a.width, into_lora, adapted.rows, scratch, worker, {token_of.data(), nullptr});
    worker.for_shares(pairs, [&](int64_t place) {
      T *row = inner + place * a.inner_width, *gate = both + place * both_width;
      multiply_gate<Activation>(row, gate, gate + both_width - a.inner_width, a.inner_width);
      inner_rows.plain[place] = row;
      if (a.down.has_plain) inner_rows.inputs[place] = as_inputs(inner_rows.plain[place], a.inner_copy, place, a.inner_width);
    });
    project<T>(groups, a.down, inner_rows, rounded, worker);
    if (is_adapted)
      add_lora<T>(results, inner, a.inner_width, a.inner_width, out_lora, adapted.rows, scratch, worker,
                  {nullptr, groups.pairs.data()});
    worker.for_shares(a.tokens, [&](int64_t token) { add_up<T>(a, token); });
  });
  return true;
}

template <typename T>
bool run_activated(const Arguments& a) {
  bool found = false;
  with_activation(a.activation, [&](auto activation) { found = run<decltype(activation), T>(a); });
  return found;
}

}  // namespace
}  // namespace quire

// False if an expert id or a slot is out of range; nothing is computed then.
QUIRE_EXPORT(bool, quire_experts, (const quire::Arguments* a), quire::run_activated, (*a))
