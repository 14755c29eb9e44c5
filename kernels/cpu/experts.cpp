// The chosen experts of tokens: see experts.h. kernels/experts.py checks the arguments.

#include "experts.h"

#include <algorithm>
#include <type_traits>

#include "dequantised_product.h"
#include "float8_product.h"
#include "gates.h"
#include "packed_product.h"

namespace quire {
namespace {

// The outputs of a task, in blocks.
constexpr int64_t kTaskBlocks = 4;

// What a projection multiplies, and where results go: of each pair, by its index in `ExpertGroups::pairs`.
template <typename T>
struct Rows {
  const T** plain;            // rows [I], which are rounded for some weights in groups
  const InputOf<T>** inputs;  // the same as other weights take them
  T** results;                // rows [O]

  void take(Arrays& from, int64_t pairs) {
    from.take(plain, pairs);
    from.take(inputs, pairs);
    from.take(results, pairs);
  }
};

// Rounds one group of the row of a pair, if the weight of its expert multiplies rounded rows.
template <typename T>
void round_pair(const ExpertGroups& groups, const ExpertsProjection& projection, int64_t index, const Rows<T>& rows,
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
void multiply_part(const ExpertGroups& groups, const ExpertsProjection& projection, int64_t expert, int64_t index,
                   const Rows<T>& rows, const RowGroup* rounded, int64_t begin, int64_t end) {
  const int64_t start = groups.starts[expert], stop = groups.starts[expert + 1];
  const MatrixPart& part = projection.part(expert, index);
  const T* bias = projection.template bias_of<T>(expert, index);
  if (!part.rounds_rows()) {
    Products<T> products{nullptr, bias, rows.inputs + start, rows.results + start, stop - start,
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
                                      rows.results + first,
                                      std::min(kRoundedRows, stop - first),
                                      projection.inputs,
                                      part.outputs};
    products.multiply_blocks(begin, end);
  }
}

// The products of all experts. Afterwards the results point to the last part. All workers must call this.
template <typename T>
void project(const ExpertGroups& groups, const ExpertsProjection& projection, Rows<T>& rows, RowGroup* rounded,
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
void add_up(const ExpertsArguments& a, const T* results, int64_t token) {
  const int64_t width = a.layer->width();
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
int64_t weight_bytes(const ExpertGroups& groups, const ExpertsProjection& projection) {
  int64_t bytes = 0;
  for (const int64_t expert : groups.chosen) bytes += projection.bytes(expert, sizeof(T));
  return bytes;
}

// Space for rows in between.
template <typename T>
struct Space {
  T *both, *inner, *results;  // [T * k, 2 * I], [T * k, I] by expert; [T * k, C] by pair, at first the rows of x by expert
  InputOf<T> *x_copies, *inner_copies;  // [T, C] and [T * k, I] by expert, if rows need copies
  RowGroup* rounded;                    // of [T * k, C] or [T * k, I] by expert, if rows are rounded
  LoraScratch<T> lora;
  const InputOf<T>** tokens;  // the rows of x as weights take them that do not round rows
  int64_t* token_of;          // of each pair, by its index in `ExpertGroups::pairs`
  Rows<T> outer_rows, inner_rows;

  Space(Arrays& from, const ExpertLayer& layer, int64_t num_tokens, int64_t choices, bool has_lora) {
    const int64_t width = layer.width(), inner_width = layer.inner_width(), widest = std::max(width, inner_width);
    const int64_t pairs = num_tokens * choices, adapted = has_lora ? std::min(pairs, kLoraRows) : 0;
    const bool rounds = layer.gate_up.has_rounded || layer.down.has_rounded;
    from.take(both, pairs * layer.gate_up.outputs);
    from.take(inner, pairs * inner_width);
    from.take(results, pairs * width);
    from.take(x_copies, layer.gate_up.has_plain && needs_copy<T>(width) ? num_tokens * copied_row(width) : 0);
    from.take(inner_copies, layer.down.has_plain && needs_copy<T>(inner_width) ? pairs * copied_row(inner_width) : 0);
    from.take(rounded, rounds ? pairs * groups_of(widest) : 0);
    from.take(lora.inner, adapted * kLoraRanks);
    from.take(lora.inner_copies, adapted * kLoraRanks);
    from.take(lora.x_copies, adapted * copied_row(widest));
    from.take(tokens, num_tokens);
    from.take(token_of, pairs);
    outer_rows.take(from, pairs);
    inner_rows.take(from, pairs);
  }
};

template <typename Activation, typename T>
void run_activated(const ExpertsArguments& a, const ExpertsWork& work, const Worker& worker) {
  const ExpertLayer& layer = *a.layer;
  const ExpertGroups& groups = work.groups;
  const AdaptedPairs& adapted = work.adapted;
  Arrays arrays(work.scratch.begin());
  Space<T> space(arrays, layer, a.tokens, a.choices, a.lora_slots != nullptr);
  Rows<T>&outer_rows = space.outer_rows, &inner_rows = space.inner_rows;
  const int64_t pairs = a.tokens * a.choices, both_width = layer.gate_up.outputs;
  const int64_t width = layer.width(), inner_width = layer.inner_width();
  const T* x = static_cast<const T*>(a.x);
  const bool is_adapted = !adapted.rows.groups.empty();
  const int64_t num_adapted = static_cast<int64_t>(adapted.gate_up.size());
  const LoraTable into_lora{adapted.gate_up.data(), num_adapted, {inner_width, inner_width}};
  const LoraTable out_lora{adapted.down.data(), num_adapted, {width}};
  if (layer.gate_up.has_plain)
    worker.for_shares(a.tokens, [&](int64_t token) {
      space.tokens[token] = as_inputs(x + token * a.x_stride, space.x_copies, token, width);
    });
  worker.for_shares(pairs, [&](int64_t place) {
    const int64_t token = groups.pairs[place] / a.choices;
    space.token_of[place] = token;
    outer_rows.plain[place] = x + token * a.x_stride;
    if (layer.gate_up.has_plain) outer_rows.inputs[place] = space.tokens[token];
    if constexpr (kGathers<T>)
      if (layer.gate_up.has_plain && width % kGroupInputs == 0) {
        T* gathered = space.results + place * width;  // where there is nothing yet
        outer_rows.inputs[place] = std::copy_n(space.tokens[token], width, gathered) - width;
      }
    outer_rows.results[place] = space.both + place * both_width;
    inner_rows.results[place] = space.results + groups.pairs[place] * width;
  });
  project<T>(groups, layer.gate_up, outer_rows, space.rounded, worker);
  if (is_adapted)
    add_lora<T>(space.both, x, a.x_stride, width, into_lora, adapted.rows, space.lora, worker, {space.token_of, nullptr});
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
  worker.for_shares(a.tokens, [&](int64_t token) { add_up<T>(a, space.results + token * a.choices * width, token); });
}

}  // namespace

bool ExpertGroups::fill(const ExpertsArguments& a) {
  const int64_t count = a.tokens * a.choices, experts = a.layer->experts;
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

bool AdaptedPairs::find(const ExpertsArguments& a, const ExpertGroups& groups) {
  const ExpertLora &into_lora = a.layer->gate_up_lora, &out_lora = a.layer->down_lora;
  gate_up.clear();
  down.clear();
  rows.groups.clear();
  if (a.lora_slots == nullptr || into_lora.slots == nullptr) return true;
  std::vector<int32_t> numbers(groups.pairs.size(), -1), slots;
  for (const int64_t expert : groups.chosen) {
    const size_t first = slots.size();
    for (int64_t place = groups.starts[expert]; place < groups.starts[expert + 1]; place++) {
      const int32_t slot = a.lora_slots[groups.pairs[place] / a.choices];
      if (slot >= into_lora.num_slots) return false;
      if (slot < 0) continue;
      const LoraPairs *into = into_lora.slots[slot], *out = out_lora.slots[slot];
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

template <typename T>
bool reserve_experts(ExpertsWork& work, const ExpertLayer& layer, int64_t tokens, int64_t choices, bool has_lora) {
  Arrays needed(0);
  Space<T>(needed, layer, tokens, choices, has_lora);
  return work.scratch.reserve(needed.bytes());
}

template <typename T>
void run_experts(const ExpertsArguments& a, const ExpertsWork& work, const Worker& worker) {
  with_activation(a.layer->activation,
                  [&](auto activation) { run_activated<decltype(activation), T>(a, work, worker); });
}

template bool reserve_experts<Bf16>(ExpertsWork&, const ExpertLayer&, int64_t, int64_t, bool);
template bool reserve_experts<float>(ExpertsWork&, const ExpertLayer&, int64_t, int64_t, bool);
template void run_experts<Bf16>(const ExpertsArguments&, const ExpertsWork&, const Worker&);
template void run_experts<float>(const ExpertsArguments&, const ExpertsWork&, const Worker&);

namespace {

// In the order of _OUTCOMES in kernels/cpu/experts.py.
enum Outcome { kDone, kNoSuchExpertOrSlot, kNoMemory };

template <typename T>
Outcome run(const ExpertsArguments& a, int64_t threads) {
  ExpertsWork work;
  if (!reserve_experts<T>(work, *a.layer, a.tokens, a.choices, a.lora_slots != nullptr)) return kNoMemory;
  if (!work.prepare(a)) return kNoSuchExpertOrSlot;
  const int64_t bytes = weight_bytes<T>(work.groups, a.layer->gate_up) + weight_bytes<T>(work.groups, a.layer->down) +
                        a.tokens * a.choices * a.layer->width() * static_cast<int64_t>(sizeof(T));
  run_together(threads_for(bytes, threads), [&](const Worker& worker) { run_experts<T>(a, work, worker); });
  return kDone;
}

}  // namespace
}  // namespace quire

// Nothing is computed if the outcome is not kDone.
QUIRE_EXPORT(int, quire_experts, (const quire::ExpertsArguments* a, int64_t threads), quire::run, (*a, threads))
