// Sublayers as sublayers.cpp runs them, which has the letters too.
#pragma once

#include <algorithm>

#include "experts.h"
#include "gated_delta.h"
#include "grouped_product.h"
#include "lora.h"
#include "mamba2.h"
#include "routing.h"
#include "state_scan.h"

namespace quire {

// Plain data, filled by kernels/cpu/sublayers.py: the fields of these must agree.

struct Norm {
  const void* weight;  // null: the norm is left out
  int64_t width, wide_weight;
  double eps;
};

struct Matrix {
  const MatrixPart* parts;  // one after the other
  int64_t num_parts;
  const void* bias;  // [outputs] or null
  int64_t outputs, inputs;
  const LoraTable* lora;  // or null
  const float* scales;    // [outputs], which multiply the outputs, or null

  int64_t bytes(int64_t element_bytes) const {
    int64_t all = 0;
    for (const MatrixPart* part = parts; part < parts + num_parts; part++) all += part->bytes(inputs, element_bytes);
    return all;
  }

  bool rounds_rows() const {
    return std::all_of(parts, parts + num_parts,
                       [](const MatrixPart& part) { return part.format != nullptr && part.format->rounds_rows; });
  }
};

// GATED_MLP and so on in kernels/cpu/sublayers.py have these numbers.
enum Kind : int64_t { kGatedMlp, kAttention, kShortConv, kMamba2, kGatedDelta, kExperts };

// Experts and how they are chosen.
struct Mixture {
  ExpertLayer layer;
  RoutingRule rule;
  int64_t wide_router;   // the router and its product are float32
  int64_t wide_weights;  // those of experts stay float32, and are not rounded to the type of rows

  // What is read for one row, if experts are as large as the first.
  int64_t bytes(int64_t element_bytes) const {
    return rule.choices * (layer.gate_up.bytes(0, element_bytes) + layer.down.bytes(0, element_bytes));
  }
};

// What is the same in every step.
struct Sublayer {
  Norm before, after;
  // Gates [H * D, C] if there are any, queries, keys and values [(H + 2 * K) * D, C], and output [C, H * D]; or gate, if
  // there is one, and up, and down; or the router [E, C], and of `out` only how many outputs there are.
  Matrix into, out;
  Matrix row_gate;  // [1, C]: the sigmoid of its output multiplies that of a gated MLP; without parts there is none
  double scale;
  int64_t kind;
  int64_t activation;          // of a gated MLP
  int64_t is_beside;           // it reads the rows that the sublayer before it has read, and its output is added to that
  Norm head_norm;              // [H + K, D]
  Norm query_norm, key_norm;   // of whole rows
  int64_t layer, rope, heads, kv_heads, width, window;  // rope: which rotations; -1: none
  int64_t wanted_only;         // whether only the wanted rows are returned
  int64_t has_gates;           // whether what is attended is multiplied by sigmoid(gate)
  double attention_scale, softcap;
  const float* sinks;          // [H], or null
  const void *taps, *taps_bias;  // of a short convolution [L, C] and [C], or null; `layer` is that of its states
  int64_t num_taps;
  // Those of a scan, whose `layer` is that of the inputs of its convolution, its states are the next; or a mixture, whose
  // `layer` is its number among those with experts.
  const void* weights;

  const Mamba2Weights& mamba2() const { return *static_cast<const Mamba2Weights*>(weights); }
  const GatedDeltaWeights& gated_delta() const { return *static_cast<const GatedDeltaWeights*>(weights); }
  const Mixture& mixture() const { return *static_cast<const Mixture*>(weights); }
  int64_t num_gates() const { return has_gates ? heads * width : 0; }

  int64_t bytes(int64_t element_bytes) const {
    return into.bytes(element_bytes) + out.bytes(element_bytes) + (kind == kExperts ? mixture().bytes(element_bytes) : 0);
  }

  // Of how many rows a gated MLP is computed at a time: products of rounded rows read their weights for each kRoundedRows
  // in any case, and what is between two of them takes less memory so. Other sublayers: all.
  int64_t rows_at_once(int64_t rows, bool has_lora) const {
    const bool parted = kind == kGatedMlp && !has_lora && into.rounds_rows() && out.rounds_rows();
    return parted ? std::min(rows, kRoundedRows) : rows;
  }
};

struct Step {
  void *x, *residual;  // [T, C]; see `run`
  const int64_t *slots, *wanted;
  const float* const* rotations;  // [T, R] each
  void *const *keys, *const *values;  // of each layer
  const int32_t *tables, *starts, *contexts, *roots;  // as in attention_arguments.h
  const uint64_t* ancestors;
  const int32_t* lora_slots;  // [T]; null: no row has an adapter
  const int64_t* given;       // [T, layers with experts, k], experts that are chosen in any case; -1: not so; or null
  int64_t* chosen;            // [those of these sublayers, T, k], which experts were chosen; or null
  int64_t has_x, rows, num_wanted, rotary_dim, num_slots, page_size, items, table_stride, threads;
  int64_t is_quantised, is_wide;  // of pages: see SlotOfHead
  int64_t given_stride;           // of rows
  void* const* states;            // of each recurrent layer
  StateRows state_rows;
};

}  // namespace quire
