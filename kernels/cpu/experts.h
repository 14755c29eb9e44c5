// A mixture of experts with packed or quantised weights: see packed_product.h, grouped_product.h and float8_product.h.
// The products of all experts run in one call, divided among threads by (expert, blocks of outputs). The weight of a
// chosen expert is read once for all of its rows; other experts are not read.
//
// The bits of a row depend neither on the other rows, nor on the number of threads.
#pragma once

#include <vector>

#include "grouped_product.h"
#include "lora.h"
#include "scratch.h"
#include "threads.h"

namespace quire {

// Plain data, filled by kernels/cpu/experts.py: the fields of these four must agree.

// The matrices [O, I] of a projection of all experts.
struct ExpertsProjection {
  const MatrixPart* parts;  // [E, num_parts], one after the other; those without outputs fill up
  const void* bias;         // [E, O], or null
  int64_t num_parts, outputs, inputs;
  int64_t has_plain, has_rounded;  // whether parts multiply rows as they are, or rounded

  const MatrixPart& part(int64_t expert, int64_t index) const { return parts[expert * num_parts + index]; }

  int64_t bytes(int64_t expert, int64_t element_bytes) const {
    int64_t all = 0;
    for (int64_t index = 0; index < num_parts; index++) all += part(expert, index).bytes(inputs, element_bytes);
    return all;
  }

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

// The experts of a layer.
struct ExpertLayer {
  ExpertsProjection gate_up, down;  // [2 * I, C], or [I, C] without gates; and [C, I]
  ExpertLora gate_up_lora, down_lora;
  int64_t experts;
  int64_t activation;  // see `with_activation`

  int64_t width() const { return down.outputs; }
  int64_t inner_width() const { return down.inputs; }
};

// A pair is a token and one of its k choices; T * k of them are numbered by token.
struct ExpertsArguments {
  const ExpertLayer* layer;
  void* out;                    // [T, C] contiguous
  const void* x;                // [T, C]
  const int64_t* expert_ids;    // [T, k]
  const float* expert_weights;  // [T, k]
  const int32_t* lora_slots;    // [T]; null: no token has an adapter
  int64_t tokens, choices, x_stride;  // in elements
  int64_t adds;                 // to the rows that `out` has, after it is rounded
};

// The pairs sorted by expert; those of one expert in their original order.
struct ExpertGroups {
  std::vector<int64_t> pairs;   // [T * k]
  std::vector<int64_t> owners;  // [T * k], the expert of each
  std::vector<int64_t> starts;  // [E + 1], the index of each expert's first pair
  std::vector<int64_t> chosen;  // experts that have a pair

  // False if an expert id is out of range.
  bool fill(const ExpertsArguments& a);
};

// What adapters add to the pairs. Those of one expert and one adapter have a number, which is their slot in tables of the
// call.
struct AdaptedPairs {
  std::vector<LoraPairs> gate_up, down;
  LoraRows rows;  // by their index in `ExpertGroups::pairs`

  // False if there is no such slot.
  bool find(const ExpertsArguments& a, const ExpertGroups& groups);
};

// What all workers of a call share. It is not kept for the next one: for a prefill of large experts it is 100 MB and more.
struct ExpertsWork {
  Scratch scratch;
  ExpertGroups groups;
  AdaptedPairs adapted;

  // Before `run_experts`, by one worker. False if an expert id or a slot is out of range.
  bool prepare(const ExpertsArguments& a) { return groups.fill(a) && adapted.find(a, groups); }
};

// Has memory for calls with so many tokens, or fewer. False if there is not so much.
template <typename T>
bool reserve_experts(ExpertsWork& work, const ExpertLayer& layer, int64_t tokens, int64_t choices, bool has_lora);

// All workers must call this.
template <typename T>
void run_experts(const ExpertsArguments& a, const ExpertsWork& work, const Worker& worker);

}  // namespace quire
