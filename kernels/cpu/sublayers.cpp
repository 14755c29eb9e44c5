// Runs sublayers of decoder layers one after the other in one call: norm, projections, rotation, KV write, attention,
// gate and residual. Each operation is that of its own file, so results have the same bits as if they were called one by
// one. workers/models/layers.py has the formula.
//
// Letters: T rows; C hidden width; H query heads; K key-value heads; D head width; R rotated elements; I intermediate
// width; N items.

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention.h"
#include "causal_conv.h"
#include "float8_product.h"
#include "gated_activation.h"
#include "gates.h"
#include "kv_pages.h"
#include "linear.h"
#include "packed_product.h"
#include "rms_norm.h"
#include "rope_kv_write.h"
#include "scratch.h"
#include "sublayers.h"

namespace quire {
namespace {

// What a model's sublayers share. It is kept from step to step.
struct Memory {
  Scratch scratch;
  AttentionWork attention;
  LoraRows lora, wanted_lora;  // of a step
};

struct Sublayers {
  std::vector<Sublayer> all;
  Memory& memory;

  int64_t num_lora_slots() const { return all.front().into.lora == nullptr ? 0 : all.front().into.lora->num_slots; }

  // The mean size of a matrix.
  int64_t mean_bytes(int64_t element_bytes) const {
    int64_t bytes = 0;
    for (const Sublayer& one : all) bytes += one.bytes(element_bytes);
    return bytes / (2 * static_cast<int64_t>(all.size()));
  }
};

// Space for the rows of a step. Without a type of their own elements have the sublayers' type.
template <typename T>
struct Buffers {
  T *normed, *wide, *inner, *gates;
  ScanSpace<T> scan;
  char* copies;
  float *lora_inner, *lora_copies;     // of elements of the sublayers' type, or of float
  float *router_rows, *router_logits;  // of routers in float32
  int64_t* expert_ids;                 // [T, k]
  float* expert_weights;               // likewise

  // False if there is not so much memory.
  bool find(Sublayers& sublayers, int64_t rows, bool has_lora) {
    Arrays needed(0);
    take(needed, sublayers, rows, has_lora);
    if (!sublayers.memory.scratch.reserve(needed.bytes())) return false;
    Arrays arrays(sublayers.memory.scratch.begin());
    take(arrays, sublayers, rows, has_lora);
    return true;
  }

  template <typename R>
  LoraScratch<R> lora() const {
    return {reinterpret_cast<R*>(lora_inner), reinterpret_cast<InputOf<R>*>(lora_copies),
            reinterpret_cast<InputOf<R>*>(copies)};
  }

 private:
  void take(Arrays& from, const Sublayers& sublayers, int64_t rows, bool has_lora) {
    int64_t width = 0, wide_size = 0, inner_size = 0, inputs = 0, num_gates = 0, convolved = 0, prepared = 0, scanned = 0;
    int64_t choices = 0, wide_experts = 0;
    for (const Sublayer& one : sublayers.all) {
      width = std::max(width, one.into.inputs);
      const int64_t at_once = one.rows_at_once(rows, has_lora);
      wide_size = std::max(wide_size, at_once * one.into.outputs);
      inner_size = std::max(inner_size, at_once * one.out.inputs);
      inputs = std::max(inputs, one.out.inputs);
      num_gates = std::max(num_gates, one.num_gates());
      if (one.kind == kExperts) {
        choices = std::max(choices, one.mixture().rule.choices);
        if (one.mixture().wide_router) wide_experts = std::max(wide_experts, one.into.outputs);
      }
      if (one.kind != kMamba2 && one.kind != kGatedDelta) continue;
      convolved = std::max(convolved, one.kind == kMamba2 ? one.mamba2().convolved() : one.gated_delta().convolved());
      prepared = std::max(prepared, one.into.outputs);
      scanned = std::max(scanned, one.out.inputs);
    }
    const int64_t widest = std::max(width, inputs);
    const int64_t copied = std::min(rows, kCopiedRows) * copied_row(widest) * static_cast<int64_t>(sizeof(float));
    const int64_t ranks = has_lora ? std::min(rows, kLoraRows) * kLoraRanks : 0;
    from.take(normed, rows * width);
    from.take(wide, wide_size);
    from.take(inner, inner_size);
    from.take(copies, std::max(copied, rounded_bytes(rows, widest)));
    from.take(lora_inner, ranks);
    from.take(lora_copies, ranks);
    from.take(scan.convolved, rows * convolved);
    from.take(scan.scanned, rows * scanned);
    from.take(scan.prepared, rows * prepared);
    from.take(gates, rows * num_gates);
    from.take(router_rows, wide_experts > 0 ? rows * width : 0);
    from.take(router_logits, rows * wide_experts);
    from.take(expert_ids, rows * choices);
    from.take(expert_weights, rows * choices);
  }
};

// What one worker does of a step.
template <typename T>
struct Run {
  const Step& step;
  const Buffers<T>& buffers;
  AttentionWork& work;
  ExpertsWork& experts;
  std::atomic<bool>& experts_exist;
  const Worker& worker;
  const LoraRows& wanted_lora;
  int64_t rows;
  const LoraRows* lora;  // null: no row has an adapter
  int64_t* chosen;       // where the experts of the next mixture are captured, or null

  // x: the output of the last sublayer, if there is one, becomes that of this one. residual: x is added to it.
  void run(const Sublayer& sublayer, bool has_x) {
    const T* entered = sublayer.is_beside ? entered_before(sublayer.before)
                                          : enter(sublayer.before, sublayer.into.inputs, has_x);
    if (sublayer.kind == kAttention) attend(sublayer, entered);
    else if (sublayer.kind == kShortConv) convolve(sublayer, entered);
    else if (sublayer.kind == kMamba2) scan(mamba2<T>, sublayer.mamba2(), sublayer, entered);
    else if (sublayer.kind == kGatedDelta) scan(gated_delta<T>, sublayer.gated_delta(), sublayer, entered);
    else if (sublayer.kind == kExperts) mix(sublayer, entered);
    else gate(sublayer, entered);
    normalise(sublayer.after, static_cast<T*>(step.x), sublayer.out.outputs);
    if (sublayer.scale != 1.0) multiply_x(static_cast<float>(sublayer.scale), sublayer.out.outputs);
  }

 private:
  const T* enter(const Norm& norm, int64_t width, bool has_x) {
    T* residual = static_cast<T*>(step.residual);
    if (!has_x && norm.weight == nullptr) return residual;
    add_rms_norm<T>({buffers.normed, has_x ? step.x : residual, has_x ? residual : nullptr, norm.weight, rows, width,
                     width, width, width, norm.wide_weight, norm.eps},
                    worker);
    return entered_before(norm);
  }

  // What `enter` has returned.
  const T* entered_before(const Norm& norm) const {
    return norm.weight == nullptr ? static_cast<const T*>(step.residual) : buffers.normed;
  }

  // R: T, or float.
  template <typename R>
  void project(R* to, const Matrix& matrix, const R* from) {
    int64_t first = 0;  // output of a part
    for (const MatrixPart* part = matrix.parts; part < matrix.parts + matrix.num_parts; part++) {
      const R* bias = matrix.bias == nullptr ? nullptr : static_cast<const R*>(matrix.bias) + first;
      const LinearArguments product{to + first,    from,          part->weight,  bias,          buffers.copies, rows,
                                    matrix.inputs, part->outputs, matrix.inputs, matrix.outputs};
      if (part->format != nullptr) {
        grouped_linear<R>(product, *part->format, worker);
      } else if (part->is_float8()) {
        const Float8Weight weight{static_cast<const uint8_t*>(part->weight), matrix.inputs, part->scale_inputs};
        float8_linear<R>(product, weight, worker);
      } else {
        linear<R>(product, worker);
      }
      first += part->outputs;
    }
    if (lora != nullptr && matrix.lora != nullptr)
      add_lora<R>(to, from, matrix.inputs, matrix.inputs, *matrix.lora, *lora, buffers.template lora<R>(), worker);
    if (matrix.scales == nullptr) return;
    worker.for_shares(rows, [&](int64_t row) {
      R* y = to + row * matrix.outputs;
      for_lanes(matrix.outputs, [&](int64_t d, int count) {
        store_lanes(y + d, load_lanes(y + d, count) * load_lanes(matrix.scales + d, count), count);
      });
    });
  }

  // In place, of parts of rows that are `stride` elements apart.
  void normalise(const Norm& norm, T* part, int64_t stride) {
    if (norm.weight == nullptr) return;
    add_rms_norm<T>({part, part, nullptr, norm.weight, rows, norm.width, stride, stride, 0, norm.wide_weight, norm.eps},
                    worker);
  }

  void multiply_x(float factor, int64_t width) {
    worker.for_shares(rows, [&](int64_t row) {
      T* x = static_cast<T*>(step.x) + row * width;
      for_lanes(width, [&](int64_t d, int count) { store_lanes(x + d, load_lanes(x + d, count) * factor, count); });
    });
  }

  void gate(const Sublayer& sublayer, const T* entered) {
    const int64_t width = sublayer.out.inputs, all = rows, at_once = sublayer.rows_at_once(all, lora != nullptr);
    for (int64_t first = 0; first < all; first += at_once) {
      rows = std::min(at_once, all - first);
      project(buffers.wide, sublayer.into, entered + first * sublayer.into.inputs);
      gated_activation<T>({buffers.inner, buffers.wide, rows, width, sublayer.into.outputs, sublayer.activation}, worker);
      T* x = static_cast<T*>(step.x) + first * sublayer.out.outputs;
      project<T>(x, sublayer.out, buffers.inner);
      if (sublayer.row_gate.num_parts > 0) {
        project(buffers.wide, sublayer.row_gate, entered + first * sublayer.into.inputs);
        multiply_rows(x, buffers.wide, sublayer.out.outputs);
      }
    }
    rows = all;
  }

  // Each row by the sigmoid of its gate, which is rounded first.
  void multiply_rows(T* x, const T* gates, int64_t width) {
    worker.for_shares(rows, [&](int64_t row) {
      const Part open = splat<Part>(rounded(Sigmoid::of(load_lanes<Part>(gates + row, 1)), gates)[0]);
      T* own = x + row * width;
      for_parts(width, [&](int64_t d, int count) { store_lanes(own + d, load_lanes<Part>(own + d, count) * open, count); });
    });
  }

  // The experts that are given, or that the router chooses.
  void mix(const Sublayer& sublayer, const T* entered) {
    const Mixture& mixture = sublayer.mixture();
    const int64_t width = sublayer.into.inputs, choices = mixture.rule.choices;
    int64_t* ids = chosen == nullptr ? buffers.expert_ids : chosen;
    if (mixture.wide_router) {
      worker.for_shares(rows, [&](int64_t row) {
        for_lanes(width, [&](int64_t d, int count) {
          store_lanes(buffers.router_rows + row * width + d, load_lanes(entered + row * width + d, count), count);
        });
      });
      route<float>(sublayer, buffers.router_rows, buffers.router_logits, ids);
    } else {
      route<T>(sublayer, entered, buffers.wide, ids);
    }
    const int32_t* slots = lora == nullptr ? nullptr : step.lora_slots;
    const ExpertsArguments arguments{&mixture.layer, step.x, entered, ids, buffers.expert_weights, slots, rows, choices,
                                     width, sublayer.is_beside};
    if (worker.index == 0 && experts_exist && !experts.prepare(arguments)) experts_exist = false;
    worker.barrier();
    if (!experts_exist) return;
    run_experts<T>(arguments, experts, worker);
    if (chosen != nullptr) chosen += rows * choices;
  }

  // Writes the experts of each row to `ids` [T, k], and their weights.
  template <typename R>
  void route(const Sublayer& sublayer, const R* entered, R* logits, int64_t* ids) {
    const Mixture& mixture = sublayer.mixture();
    const int64_t choices = mixture.rule.choices;
    project(logits, sublayer.into, entered);
    Router router(mixture.rule);
    worker.for_shares(rows, [&](int64_t row) {
      float* weights = buffers.expert_weights + row * choices;
      const int64_t* given = step.given == nullptr ? nullptr : step.given + row * step.given_stride + sublayer.layer * choices;
      if (!router.route(logits + row * sublayer.into.outputs, given, ids + row * choices, weights)) experts_exist = false;
      if (mixture.wide_weights) return;
      for_parts(choices, [&](int64_t i, int count) {
        store_lanes(weights + i, rounded(load_lanes<Part>(weights + i, count), static_cast<const T*>(nullptr)), count);
      });
    });
  }

  void convolve(const Sublayer& sublayer, const T* entered) {
    const int64_t width = sublayer.out.inputs;
    project(buffers.wide, sublayer.into, entered);
    CausalConv<T, GatedInput<T>>{buffers.inner, static_cast<const T*>(sublayer.taps),
                                 static_cast<const T*>(sublayer.taps_bias),
                                 static_cast<T*>(step.states[sublayer.layer]), {buffers.wide, width}, step.state_rows,
                                 rows, width, sublayer.num_taps}
        .run(worker);
    project_wanted(sublayer, buffers.inner, buffers.wide);
  }

  template <typename Scan, typename Weights>
  void scan(Scan scan, const Weights& weights, const Sublayer& sublayer, const T* entered) {
    project(buffers.wide, sublayer.into, entered);
    scan(buffers.inner, buffers.wide, weights, static_cast<T*>(step.states[sublayer.layer]),
         static_cast<float*>(step.states[sublayer.layer + 1]), step.state_rows, rows, buffers.scan, worker);
    project_wanted(sublayer, buffers.inner, buffers.wide);
  }

  // The output of a sublayer, of what comes before its last product; after the last attention of a model, or what is
  // in its place, of the wanted rows only, which are copied to `gathered`.
  void project_wanted(const Sublayer& sublayer, const T* inner, T* gathered) {
    const int64_t outputs = sublayer.out.outputs;
    T* x = static_cast<T*>(step.x);
    // Nothing is read any more of what has entered.
    if (sublayer.is_beside)
      worker.for_shares(rows, [&](int64_t row) { std::copy_n(x + row * outputs, outputs, buffers.normed + row * outputs); });
    if (sublayer.wanted_only) {
      const int64_t width = sublayer.out.inputs;
      worker.for_shares(step.num_wanted, [&](int64_t row) {
        std::copy_n(inner + step.wanted[row] * width, width, gathered + row * width);
      });
      rows = step.num_wanted;
      if (lora != nullptr) lora = &wanted_lora;
      inner = gathered;
    }
    if (rows == 0) return;
    project(x, sublayer.out, inner);
    if (!sublayer.is_beside) return;
    worker.for_shares(rows, [&](int64_t row) {
      const T* other = buffers.normed + (sublayer.wanted_only ? step.wanted[row] : row) * outputs;
      T* own = x + row * outputs;
      for_lanes(outputs, [&](int64_t d, int count) {
        store_lanes(own + d, load_lanes(own + d, count) + load_lanes(other + d, count), count);
      });
    });
  }

  void attend(const Sublayer& sublayer, const T* entered) {
    const int64_t row_width = sublayer.into.outputs, attended_width = sublayer.out.inputs;
    project(buffers.wide, sublayer.into, entered);
    const int64_t num_gates = sublayer.num_gates();
    // What is attended takes their place.
    if (num_gates > 0)
      worker.for_shares(rows, [&](int64_t row) {
        std::copy_n(buffers.wide + row * row_width, num_gates, buffers.gates + row * num_gates);
      });
    T *projected = buffers.wide + num_gates, *query = buffers.inner;
    normalise(sublayer.query_norm, projected, row_width);
    normalise(sublayer.key_norm, projected + sublayer.query_norm.width, row_width);
    const float* rotations = sublayer.rope < 0 ? nullptr : step.rotations[sublayer.rope];
    const int64_t rotary_dim = rotations == nullptr ? 0 : step.rotary_dim;
    rope_kv_write<T>({query, projected, sublayer.head_norm.weight, rotations, step.slots,
                      step.keys[sublayer.layer], step.values[sublayer.layer], rows, sublayer.heads, sublayer.kv_heads,
                      sublayer.width, rotary_dim, row_width, rotary_dim, sublayer.head_norm.wide_weight,
                      step.is_quantised, step.is_wide, sublayer.head_norm.eps},
                     worker);
    if (sublayer.wanted_only && step.num_wanted == 0) {
      rows = 0;
      return;
    }
    T* attended = buffers.wide;  // [T, H * D]
    // Rows of padding are not written.
    worker.for_shares(rows, [&](int64_t row) {
      if (step.slots[row] < 0) std::fill_n(attended + row * attended_width, attended_width, T{});
    });
    const AttentionArguments arguments = attention_arguments(sublayer, attended, query);
    if (step.is_wide) paged_attention<Bf16>(arguments, work, worker);
    else paged_attention<T>(arguments, work, worker);
    if (num_gates > 0) multiply_gates(attended, num_gates);
    project_wanted(sublayer, attended, buffers.inner);
  }

  // By sigmoid(gate), which is rounded first.
  void multiply_gates(T* attended, int64_t width) {
    worker.for_shares(rows, [&](int64_t row) {
      const T* gates = buffers.gates + row * width;
      T* values = attended + row * width;
      for_parts(width, [&](int64_t d, int count) {
        const Part open = rounded(Sigmoid::of(load_lanes<Part>(gates + d, count)), gates);
        store_lanes(values + d, load_lanes<Part>(values + d, count) * open, count);
      });
    });
  }

  AttentionArguments attention_arguments(const Sublayer& sublayer, T* attended, const T* query) const {
    AttentionArguments a{};
    a.out = attended;
    a.query = query;
    a.keys = step.keys[sublayer.layer];
    a.values = step.values[sublayer.layer];
    a.tables = step.tables;
    a.starts = step.starts;
    a.contexts = step.contexts;
    a.roots = step.roots;
    a.ancestors = step.ancestors;
    a.items = step.items;
    a.table_stride = step.table_stride;
    a.query_stride = sublayer.heads * sublayer.width;
    a.head_stride = a.width = a.value_width = sublayer.width;
    a.heads = sublayer.heads;
    a.kv_heads = sublayer.kv_heads;
    a.page_size = step.page_size;
    a.is_quantised = step.is_quantised;
    a.is_wide = step.is_wide;
    a.window = sublayer.window;
    a.scale = sublayer.attention_scale;
    a.softcap = sublayer.softcap;
    a.sinks = sublayer.sinks;
    return a;
  }
};

// In the order of _OUTCOMES in kernels/cpu/sublayers.py. Nothing is written but with kDone and kNoSuchExpert.
enum Outcome { kDone, kSlotBeyondPages, kNoMemory, kNoSuchLoraSlot, kNoSuchExpert };

template <typename T>
Outcome run(Sublayers& sublayers, const Step& step) {
  if (!slots_exist(step.slots, step.rows, step.num_slots)) return kSlotBeyondPages;
  LoraRows &lora = sublayers.memory.lora, &wanted_lora = sublayers.memory.wanted_lora;
  const bool has_lora = step.lora_slots != nullptr;
  const int64_t num_slots = sublayers.num_lora_slots();
  if (has_lora && !lora.find(step.lora_slots, nullptr, step.rows, num_slots)) return kNoSuchLoraSlot;
  if (has_lora && sublayers.all.back().wanted_only)
    wanted_lora.find(step.lora_slots, step.wanted, step.num_wanted, num_slots);
  Buffers<T> buffers;
  if (!buffers.find(sublayers, step.rows, has_lora)) return kNoMemory;
  ExpertsWork experts;
  std::atomic<bool> experts_exist{true};
  for (const Sublayer& one : sublayers.all)
    if (one.kind == kExperts &&
        !reserve_experts<T>(experts, one.mixture().layer, step.rows, one.mixture().rule.choices, has_lora))
      return kNoMemory;
  const int64_t bytes = sublayers.mean_bytes(sizeof(T)) * (1 + step.rows / 8);
  run_together(threads_for(bytes, step.threads), [&](const Worker& worker) {
    Run<T> mine{step, buffers, sublayers.memory.attention, experts, experts_exist, worker, wanted_lora, step.rows,
                has_lora ? &lora : nullptr, step.chosen};
    bool has_x = step.has_x;
    for (const Sublayer& sublayer : sublayers.all) {
      mine.run(sublayer, has_x);
      has_x = true;
    }
  });
  return experts_exist ? kDone : kNoSuchExpert;
}

}  // namespace
}  // namespace quire

extern "C" void* quire_memory_new() { return new quire::Memory; }
extern "C" void quire_memory_delete(void* memory) { delete static_cast<quire::Memory*>(memory); }
extern "C" void* quire_sublayers_new(const quire::Sublayer* all, int64_t count, void* memory) {
  return new quire::Sublayers{{all, all + count}, *static_cast<quire::Memory*>(memory)};
}
extern "C" void quire_sublayers_delete(void* sublayers) { delete static_cast<quire::Sublayers*>(sublayers); }
QUIRE_EXPORT(int, quire_sublayers_run, (quire::Sublayers* sublayers, const quire::Step* step),
             quire::run, (*sublayers, *step))
