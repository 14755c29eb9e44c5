// Runs sublayers of decoder layers one after the other in one call: norm, projections, rotation, KV write, attention,
// gate and residual. Each operation is that of its own file, so results have the same bits as if they were called one by
// one. workers/models/layers.py has the formula.
//
// Letters: T rows; C hidden width; H query heads; K key-value heads; D head width; R rotated elements; I intermediate
// width; N items.

#include <algorithm>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "attention.h"
#include "causal_conv.h"
#include "float8_product.h"
#include "gated_activation.h"
#include "gated_delta.h"
#include "gates.h"
#include "grouped_product.h"
#include "kv_pages.h"
#include "linear.h"
#include "lora.h"
#include "mamba2.h"
#include "packed_product.h"
#include "rms_norm.h"
#include "rope_kv_write.h"

namespace quire {
namespace {

// Plain data, filled by kernels/cpu/sublayers.py: the fields of these four must agree.

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

// In the order of KINDS in kernels/cpu/sublayers.py.
enum Kind : int64_t { kGatedMlp, kAttention, kShortConv, kMamba2, kGatedDelta };

// What is the same in every step.
struct Sublayer {
  Norm before, after;
  // Gates [H * D, C] if there are any, queries, keys and values [(H + 2 * K) * D, C], and output [C, H * D]; or gate, if
  // there is one, and up, and down.
  Matrix into, out;
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
  const void* scan;              // the weights; `layer` is that of the inputs of its convolution, its states are the next

  const Mamba2Weights& mamba2() const { return *static_cast<const Mamba2Weights*>(scan); }
  const GatedDeltaWeights& gated_delta() const { return *static_cast<const GatedDeltaWeights*>(scan); }
  int64_t num_gates() const { return has_gates ? heads * width : 0; }

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
  int64_t has_x, rows, num_wanted, rotary_dim, num_slots, page_size, items, table_stride, threads;
  int64_t is_quantised, is_wide;  // of pages: see SlotOfHead
  void* const* states;            // of each recurrent layer
  StateRows state_rows;
};

// What a model's sublayers share. It grows to what the largest step needs, and is kept.
struct Memory {
  std::unique_ptr<char[]> scratch;
  size_t scratch_bytes = 0;
  AttentionWork attention;
  LoraRows lora, wanted_lora;  // of a step

  // False if there is not so much memory.
  bool reserve(size_t bytes) {
    if (bytes <= scratch_bytes) return true;
    scratch_bytes = 0;
    scratch.reset();
    scratch.reset(new (std::nothrow) char[bytes]);
    if (scratch != nullptr) scratch_bytes = bytes;
    return scratch != nullptr;
  }
};

struct Sublayers {
  std::vector<Sublayer> all;
  Memory& memory;

  int64_t num_lora_slots() const { return all.front().into.lora == nullptr ? 0 : all.front().into.lora->num_slots; }

  // The mean size of a matrix.
  int64_t mean_bytes(int64_t element_bytes) const {
    int64_t bytes = 0;
    for (const Sublayer& one : all) bytes += one.into.bytes(element_bytes) + one.out.bytes(element_bytes);
    return bytes / (2 * static_cast<int64_t>(all.size()));
  }
};

// Space for the rows of a step. All have the sublayers' type, but for the copies.
template <typename T>
struct Buffers {
  T *normed, *wide, *inner, *gates;
  ScanSpace<T> scan;
  InputOf<T>* copies;
  LoraScratch<T> lora;

  // False if there is not so much memory.
  bool find(Sublayers& sublayers, int64_t rows, bool has_lora) {
    int64_t width = 0, wide_size = 0, inner_size = 0, inputs = 0, num_gates = 0, convolved = 0, prepared = 0, scanned = 0;
    for (const Sublayer& one : sublayers.all) {
      width = std::max(width, one.into.inputs);
      const int64_t at_once = one.rows_at_once(rows, has_lora);
      wide_size = std::max(wide_size, at_once * one.into.outputs);
      inner_size = std::max(inner_size, at_once * one.out.inputs);
      inputs = std::max(inputs, one.out.inputs);
      num_gates = std::max(num_gates, one.num_gates());
      if (one.kind != kMamba2 && one.kind != kGatedDelta) continue;
      convolved = std::max(convolved, one.kind == kMamba2 ? one.mamba2().convolved() : one.gated_delta().convolved());
      prepared = std::max(prepared, one.into.outputs);
      scanned = std::max(scanned, one.out.inputs);
    }
    const int64_t widest = std::max(width, inputs);
    const int64_t copied = std::min(rows, kCopiedRows) * copied_row(widest) * static_cast<int64_t>(sizeof(InputOf<T>));
    const int64_t ranks = has_lora ? std::min(rows, kLoraRows) * kLoraRanks : 0;
    const int64_t sizes[] = {whole(rows * width * sizeof(T)), whole(wide_size * sizeof(T)),
                             whole(inner_size * sizeof(T)), whole(std::max(copied, rounded_bytes(rows, widest))),
                             whole(ranks * sizeof(T)), whole(ranks * sizeof(InputOf<T>)),
                             whole(rows * convolved * sizeof(T)), whole(rows * scanned * sizeof(float)),
                             whole(rows * prepared * sizeof(float)), whole(rows * num_gates * sizeof(T))};
    const size_t bytes = std::accumulate(std::begin(sizes), std::end(sizes), kLine);
    if (!sublayers.memory.reserve(bytes)) return false;
    char* at = sublayers.memory.scratch.get();
    at += whole(reinterpret_cast<uintptr_t>(at)) - reinterpret_cast<uintptr_t>(at);
    normed = reinterpret_cast<T*>(at);
    wide = reinterpret_cast<T*>(at += sizes[0]);
    inner = reinterpret_cast<T*>(at += sizes[1]);
    copies = reinterpret_cast<InputOf<T>*>(at += sizes[2]);
    lora.inner = reinterpret_cast<T*>(at += sizes[3]);
    lora.inner_copies = reinterpret_cast<InputOf<T>*>(at += sizes[4]);
    lora.x_copies = copies;
    scan.convolved = reinterpret_cast<T*>(at += sizes[5]);
    scan.scanned = reinterpret_cast<float*>(at += sizes[6]);
    scan.prepared = reinterpret_cast<float*>(at += sizes[7]);
    gates = reinterpret_cast<T*>(at += sizes[8]);
    return true;
  }

 private:
  static constexpr int64_t kLine = 64;
  static int64_t whole(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
};

// What one worker does of a step.
template <typename T>
struct Run {
  const Step& step;
  const Buffers<T>& buffers;
  AttentionWork& work;
  const Worker& worker;
  const LoraRows& wanted_lora;
  int64_t rows;
  const LoraRows* lora;  // null: no row has an adapter

  // x: the output of the last sublayer, if there is one, becomes that of this one. residual: x is added to it.
  void run(const Sublayer& sublayer, bool has_x) {
    const T* entered = sublayer.is_beside ? entered_before(sublayer.before)
                                          : enter(sublayer.before, sublayer.into.inputs, has_x);
    if (sublayer.kind == kAttention) attend(sublayer, entered);
    else if (sublayer.kind == kShortConv) convolve(sublayer, entered);
    else if (sublayer.kind == kMamba2) scan(mamba2<T>, sublayer.mamba2(), sublayer, entered);
    else if (sublayer.kind == kGatedDelta) scan(gated_delta<T>, sublayer.gated_delta(), sublayer, entered);
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

  void project(T* to, const Matrix& matrix, const T* from) {
    int64_t first = 0;  // output of a part
    for (const MatrixPart* part = matrix.parts; part < matrix.parts + matrix.num_parts; part++) {
      const T* bias = matrix.bias == nullptr ? nullptr : static_cast<const T*>(matrix.bias) + first;
      const LinearArguments product{to + first,    from,          part->weight,  bias,          buffers.copies, rows,
                                    matrix.inputs, part->outputs, matrix.inputs, matrix.outputs};
      if (part->format != nullptr) {
        grouped_linear<T>(product, *part->format, worker);
      } else if (part->is_float8()) {
        const Float8Weight weight{static_cast<const uint8_t*>(part->weight), matrix.inputs, part->scale_inputs};
        float8_linear<T>(product, weight, worker);
      } else {
        linear<T>(product, worker);
      }
      first += part->outputs;
    }
    if (lora != nullptr && matrix.lora != nullptr)
      add_lora<T>(to, from, matrix.inputs, matrix.inputs, *matrix.lora, *lora, buffers.lora, worker);
    if (matrix.scales == nullptr) return;
    worker.for_shares(rows, [&](int64_t row) {
      T* y = to + row * matrix.outputs;
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
      project(static_cast<T*>(step.x) + first * sublayer.out.outputs, sublayer.out, buffers.inner);
    }
    rows = all;
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

// In the order of _OUTCOMES in kernels/cpu/sublayers.py. Nothing is written if the outcome is not kDone.
enum Outcome { kDone, kSlotBeyondPages, kNoMemory, kNoSuchLoraSlot };

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
  const int64_t bytes = sublayers.mean_bytes(sizeof(T)) * (1 + step.rows / 8);
  run_together(threads_for(bytes, step.threads), [&](const Worker& worker) {
    Run<T> mine{step, buffers, sublayers.memory.attention, worker, wanted_lora, step.rows,
                has_lora ? &lora : nullptr};
    bool has_x = step.has_x;
    for (const Sublayer& sublayer : sublayers.all) {
      mine.run(sublayer, has_x);
      has_x = true;
    }
  });
  return kDone;
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
