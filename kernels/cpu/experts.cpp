// The chosen experts of tokens: see experts.h. kernels/experts.py checks the arguments.

#include "experts.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "dequantised_product.h"
#include "float8_product.h"
#include "gates.h"
#include "packed_product.h"
#include "scratch.h"

namespace quire {
namespace {

// The outputs of a task, in blocks.
constexpr int64_t kTaskBlocks = 4;

// The pairs sorted by expert; those of one expert in their original order.
struct Groups {
  std::vector<int64_t> pairs;   // [T * k]
  std::vector<int64_t> owners;  // [T * k], the expert of each
  std::vector<int64_t> starts;  // [E + 1], the index of each expert's first pair
  std::vector<int64_t> chosen;  // experts that have a pair

  // False if an expert id is out of range.
  bool fill(const ExpertsArguments& a, int64_t experts) {
    const int64_t count = a.tokens * a.choices;
    std::vector<int64_t> next(experts);
    for (int64_t pair = 0; pair < count; pair++) {
      const int64_t expert = a.expert_ids[pair];
      if (expert < 0 || expert >= experts) return false;
      next[expert]++;
    }
    chosen.clear();
    starts.assign(experts + 1, 0);
    for (int64_t expert = 0; expert < experts; expert++) {
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
  bool find(const ExpertsArguments& a, const ExpertLayer& layer, const Groups& groups) {
    gate_up.clear();
    down.clear();
    rows.groups.clear();
    if (a.lora_slots == nullptr || layer.gate_up_lora.slots == nullptr) return true;
    std::vector<int32_t> numbers(groups.pairs.size(), -1), slots;
    for (const int64_t expert : groups.chosen) {
      const size_t first = slots.size();
      for (int64_t place = groups.starts[expert]; place < groups.starts[expert + 1]; place++) {
        const int32_t slot = a.lora_slots[groups.pairs[place] / a.choices];
        if (slot >= layer.gate_up_lora.num_slots) return false;
        if (slot < 0) continue;
        const LoraPairs *into = layer.gate_up_lora.slots[slot], *out = layer.down_lora.slots[slot];
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

  void resize(int64_t pairs) {
    plain.resize(pairs);
    inputs.resize(pairs);
    results.resize(pairs);
  }
};

// Rounds one group of the row of a pair, if the weight of its expert multiplies rounded rows.
template <typename T>
void round_pair(const Groups& groups, const ExpertsProjection& projection, int64_t index, const Rows<T>& rows,
                RowGroup* rounded, int64_t place, int64_t group) {
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
void multiply_part(const Groups& groups, const ExpertsProjection& projection, int64_t expert, int64_t index,
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
void project(const Groups& groups, const ExpertsProjection& projection, Rows<T>& rows, RowGroup* rounded,
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

// The results [k, C] of a token's experts, weighted and summed in the order of its choices.
template <typename T>
void add_up(const ExpertsArguments& a, const T* results, int64_t width, int64_t token) {
  const float* weights = a.expert_weights + token * a.choices;
  T* out = static_cast<T*>(a.out) + token * width;
  for_parts(width, [&](int64_t d, int count) {
    Part total = load_lanes<Part>(results + d, count) * splat<Part>(weights[0]);
    for (int64_t choice = 1; choice < a.choices; choice++)
      total += load_lanes<Part>(results + choice * width + d, count) * splat<Part>(weights[choice]);
    if (a.adds) total = rounded(total, out) + load_lanes<Part>(out + d, count);
    store_lanes(out + d, total, count);
  });
}

// The address of a row of inputs for a product: its own, or that of its copy, which is made now.
template <typename T>
const InputOf<T>* as_inputs(const T* row, InputOf<T>* copies, int64_t index, int64_t inputs) {
  if (!needs_copy<T>(inputs)) return reinterpret_cast<const InputOf<T>*>(row);
  InputOf<T>* copy = copies + index * copied_row(inputs);
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
int64_t weight_bytes(const Groups& groups, const ExpertsProjection& projection) {
  int64_t bytes = 0;
  for (const int64_t expert : groups.chosen)
    for (int64_t index = 0; index < projection.num_parts; index++)
      bytes += projection.part(expert, index).bytes(projection.inputs, sizeof(T));
  return bytes;
}

// Space for rows in between.
template <typename T>
struct Space {
  T *both, *inner, *results;  // [T * k, 2 * I], [T * k, I] by expert; [T * k, C] by pair, at first the rows of x by expert
  InputOf<T> *x_copies, *inner_copies;  // [T, C] and [T * k, I] by expert, if rows need copies
  RowGroup* rounded;                    // of [T * k, C] or [T * k, I] by expert, if rows are rounded
  LoraScratch<T> lora;

  void take(Arrays& from, const ExpertLayer& layer, int64_t tokens, int64_t pairs, bool has_lora) {
    const int64_t width = layer.width(), inner_width = layer.inner_width(), widest = std::max(width, inner_width);
    const bool rounds = layer.gate_up.has_rounded || layer.down.has_rounded;
    const int64_t adapted = has_lora ? std::min(pairs, kLoraRows) : 0;
    from.take(both, pairs * layer.gate_up.outputs);
    from.take(inner, pairs * inner_width);
    from.take(results, pairs * width);
    from.take(x_copies, layer.gate_up.has_plain && needs_copy<T>(width) ? tokens * copied_row(width) : 0);
    from.take(inner_copies, layer.down.has_plain && needs_copy<T>(inner_width) ? pairs * copied_row(inner_width) : 0);
    from.take(rounded, rounds ? pairs * groups_of(widest) : 0);
    from.take(lora.inner, adapted * kLoraRanks);
    from.take(lora.inner_copies, adapted * kLoraRanks);
    from.take(lora.x_copies, adapted * copied_row(widest));
  }
};

}  // namespace

template <typename T>
struct ExpertsWork<T>::State {
  Scratch scratch;
  // Of a call.
  ExpertLayer layer;
  ExpertsArguments call;
  Groups groups;
  Adapted adapted;
  Space<T> space;
  std::vector<int64_t> token_of;          // of each pair by its index in `Groups::pairs`
  std::vector<const InputOf<T>*> tokens;  // the rows of x as weights take them that do not round rows
  Rows<T> outer_rows, inner_rows;

  template <typename Activation>
  void run(const Worker& worker);
};

template <typename T>
ExpertsWork<T>::ExpertsWork() = default;
template <typename T>
ExpertsWork<T>::~ExpertsWork() = default;

template <typename T>
bool ExpertsWork<T>::reserve(const ExpertLayer& layer, int64_t tokens, int64_t choices, bool has_lora) {
  if (state_ == nullptr) state_ = std::make_unique<State>();
  Arrays arrays(0);
  Space<T>().take(arrays, layer, tokens, tokens * choices, has_lora);
  return state_->scratch.reserve(arrays.bytes());
}

template <typename T>
bool ExpertsWork<T>::prepare(const ExpertLayer& layer, const ExpertsArguments& a) {
  State& own = *state_;
  const int64_t pairs = a.tokens * a.choices;
  own.layer = layer;
  own.call = a;
  Arrays arrays(own.scratch.begin());
  own.space.take(arrays, layer, a.tokens, pairs, a.lora_slots != nullptr);
  if (!own.groups.fill(a, layer.experts) || !own.adapted.find(a, layer, own.groups)) return false;
  own.token_of.resize(pairs);
  for (int64_t place = 0; place < pairs; place++) own.token_of[place] = own.groups.pairs[place] / a.choices;
  own.tokens.resize(a.tokens);
  own.outer_rows.resize(pairs);
  own.inner_rows.resize(pairs);
  return true;
}

template <typename T>
int64_t ExpertsWork<T>::bytes() const {
  const State& own = *state_;
  return weight_bytes<T>(own.groups, own.layer.gate_up) + weight_bytes<T>(own.groups, own.layer.down) +
         own.call.tokens * own.call.choices * own.layer.width() * static_cast<int64_t>(sizeof(T));
}

template <typename T>
void ExpertsWork<T>::run(const Worker& worker) {
  with_activation(state_->layer.activation,
                  [&](auto activation) { state_->template run<decltype(activation)>(worker); });
}

template <typename T>
template <typename Activation>
void ExpertsWork<T>::State::run(const Worker& worker) {
  const int64_t pairs = call.tokens * call.choices, both_width = layer.gate_up.outputs;
  const int64_t width = layer.width(), inner_width = layer.inner_width();
  const T* x = static_cast<const T*>(call.x);
  const bool is_adapted = !adapted.rows.groups.empty();
  const int64_t num_adapted = static_cast<int64_t>(adapted.gate_up.size());
  const LoraTable into_lora{adapted.gate_up.data(), num_adapted, {inner_width, inner_width}};
  const LoraTable out_lora{adapted.down.data(), num_adapted, {width}};
  if (layer.gate_up.has_plain)
    worker.for_shares(call.tokens, [&](int64_t token) {
      tokens[token] = as_inputs(x + token * call.x_stride, space.x_copies, token, width);
    });
  worker.for_shares(pairs, [&](int64_t place) {
    const int64_t token = token_of[place];
    outer_rows.plain[place] = x + token * call.x_stride;
    outer_rows.inputs[place] = tokens[token];
    if constexpr (kGathers<T>)
      if (layer.gate_up.has_plain && width % kGroupInputs == 0) {
        T* gathered = space.results + place * width;  // where there is nothing yet
        outer_rows.inputs[place] = std::copy_n(tokens[token], width, gathered) - width;
      }
    outer_rows.results[place] = space.both + place * both_width;
    inner_rows.results[place] = space.results + groups.pairs[place] * width;
  });
  project<T>(groups, layer.gate_up, outer_rows, space.rounded, worker);
  if (is_adapted)
    add_lora<T>(space.both, x, call.x_stride, width, into_lora, adapted.rows, space.lora, worker,
                {token_of.data(), nullptr});
  worker.for_shares(pairs, [&](int64_t place) {
    T *row = space.inner + place * inner_width, *gate = space.both + place * both_width;
    multiply_gate<Activation>(row, gate, gate + both_width - inner_width, inner_width);
    inner_rows.plain[place] = row;
    if (layer.down.has_plain) inner_rows.inputs[place] = as_inputs(row, space.inner_copies, place, inner_width);
  });
  project<T>(groups, layer.down, inner_rows, space.rounded, worker);
  if (is_adapted)
    add_lora<T>(space.results, space.inner, inner_width, inner_width, out_lora, adapted.rows, space.lora, worker,
                {nullptr, groups.pairs.data()});
  worker.for_shares(call.tokens, [&](int64_t token) {
    add_up<T>(call, space.results + token * call.choices * width, width, token);
  });
}

template class ExpertsWork<Bf16>;
template class ExpertsWork<float>;

namespace {

// In the order of _OUTCOMES in kernels/cpu/experts.py.
enum Outcome { kDone, kNoSuchExpertOrSlot, kNoMemory };

template <typename T>
Outcome run(const ExpertLayer& layer, const ExpertsArguments& a, int64_t threads) {
  ExpertsWork<T> work;
  if (!work.reserve(layer, a.tokens, a.choices, a.lora_slots != nullptr)) return kNoMemory;
  if (!work.prepare(layer, a)) return kNoSuchExpertOrSlot;
  run_together(threads_for(work.bytes(), threads), [&](const Worker& worker) { work.run(worker); });
  return kDone;
}

}  // namespace
}  // namespace quire

// Nothing is computed if the outcome is not kDone.
QUIRE_EXPORT(int, quire_experts,
             (const quire::ExpertLayer* layer, const quire::ExpertsArguments* a, int64_t threads), quire::run,
             (*layer, *a, threads))
