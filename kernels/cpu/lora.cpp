// Low-rank adapters: see lora.h.
//
// The products are those of packed weights, so the bits of a row depend neither on the other rows nor on the number of
// threads. All adapters of a step share two rounds of products, x A^T and then B, so that threads wait for each other as
// often for many adapters as for one.

#include "lora.h"

#include <algorithm>
#include <numeric>

namespace quire {

namespace {

// The rows of a task: few, so that one adapter gives tasks to several threads.
constexpr int64_t kTaskRows = 16;
// The blocks of a task.
constexpr int64_t kMostShrinkBlocks = 4, kMostExpandBlocks = 64;

// Some of the rows: those that pass at a time.
template <typename T>
class Pass {
 public:
  Pass(T* y, const T* x, int64_t x_stride, int64_t inputs, const LoraTable& table, const LoraRows& rows, size_t begin,
       size_t end, const LoraScratch<T>& scratch, const LoraPlaces& places)
      : y_(y), x_(x), x_stride_(x_stride), inputs_(inputs), table_(table),
        width_(std::accumulate(table.outputs, table.outputs + kLoraParts, int64_t{})), scratch_(scratch),
        places_(places), rows_(&rows.rows[rows.groups[begin].first]), first_(rows.groups[begin].first) {
    for (size_t i = begin; i < end; i++) {
      const LoraRows::Group& group = rows.groups[i];
      const LoraPairs& pairs = table.slots[group.slot];
      if (pairs.a == nullptr) continue;
      groups_[num_groups_++] = &group;
      most_ranks_ = std::max(most_ranks_, pairs.num_ranks);
    }
    count_ = rows.groups[end - 1].first + rows.groups[end - 1].count - first_;
  }

  void run(const Worker& worker) const {
    if (num_groups_ == 0) return;
    if (needs_copy<T>(inputs_)) {
      worker.for_shares(count_, [&](int64_t place) {
        copy_row(scratch_.x_copies + place * copied_row(inputs_), row_of_x(place), inputs_);
      });
    }
    for_blocks(blocks_of(most_ranks_), kMostShrinkBlocks, worker,
               [&](const LoraRows::Group& group, int64_t begin, int64_t end) { shrink(group, begin, end); });
    int64_t blocks = 0;
    for (int64_t outputs : table_.outputs) blocks += blocks_of(outputs);
    for_blocks(blocks, kMostExpandBlocks, worker,
               [&](const LoraRows::Group& group, int64_t begin, int64_t end) { expand(group, begin, end); });
  }

 private:
  const T* row_of_x(int64_t place) const {
    return x_ + (places_.x == nullptr ? rows_[place] : places_.x[rows_[place]]) * x_stride_;
  }

  T* row_of_y(int64_t place) const { return y_ + (places_.y == nullptr ? rows_[place] : places_.y[rows_[place]]) * width_; }

  // Calls body(group, begin, end) for each group and a few of its `blocks`.
  template <typename Body>
  void for_blocks(int64_t blocks, int64_t most, const Worker& worker, Body body) const {
    // Some four tasks for each worker.
    const int64_t width = std::clamp<int64_t>(num_groups_ * blocks / (4 * worker.count), 1, most);
    const int64_t parts = (blocks + width - 1) / width;
    worker.for_each(num_groups_ * parts, [&](int64_t task) {
      const int64_t begin = task % parts * width;
      body(*groups_[task / parts], begin, std::min(begin + width, blocks));
    });
  }

  // x A^T, of some blocks of the ranks of all parts.
  void shrink(const LoraRows::Group& group, int64_t begin, int64_t end) const {
    const LoraPairs& pairs = table_.slots[group.slot];
    const int64_t ranks = pairs.num_ranks, place = group.first - first_;
    end = std::min(end, blocks_of(ranks));
    if (begin >= end) return;
    const InputOf<T>* rows[kTaskRows];
    T* results[kTaskRows];
    for (int64_t i = 0; i < group.count; i++) {
      rows[i] = needs_copy<T>(inputs_) ? scratch_.x_copies + (place + i) * copied_row(inputs_)
                                       : reinterpret_cast<const InputOf<T>*>(row_of_x(place + i));
      results[i] = scratch_.inner + (place + i) * kLoraRanks;
    }
    Products<T>{static_cast<const T*>(pairs.a), nullptr, rows, results, group.count, inputs_, ranks}.multiply_blocks(
        begin, end);
    if constexpr (!std::is_same_v<T, InputOf<T>>) {
      const int64_t rank = begin * kBlockOutputs;
      for (int64_t i = 0; i < group.count; i++)
        copy_row(scratch_.inner_copies + (place + i) * kLoraRanks + rank, results[i] + rank,
                 std::min(end * kBlockOutputs, ranks) - rank);
    }
  }

  // Adds the product with B, of some blocks of the outputs of all parts.
  void expand(const LoraRows::Group& group, int64_t begin, int64_t end) const {
    const LoraPairs& pairs = table_.slots[group.slot];
    const int64_t place = group.first - first_;
    int64_t output = 0, block = 0;  // where the part begins
    for (int64_t part = 0; part < kLoraParts; part++) {
      const int64_t outputs = table_.outputs[part], blocks = blocks_of(outputs);
      if (pairs.ranks[part] > 0 && begin < block + blocks && end > block) {
        const InputOf<T>* rows[kTaskRows];
        T* results[kTaskRows];
        for (int64_t i = 0; i < group.count; i++) {
          rows[i] = inner() + (place + i) * kLoraRanks + pairs.starts[part];
          results[i] = row_of_y(place + i) + output;
        }
        const int64_t first = std::max<int64_t>(begin - block, 0), last = std::min(end - block, blocks);
        Products<T>{static_cast<const T*>(pairs.b[part]), nullptr, rows, results, group.count, pairs.ranks[part],
                    outputs, true}
            .multiply_blocks(first, last);
        if (pairs.scales != nullptr)
          for (int64_t i = 0; i < group.count; i++)
            rescale(results[i], pairs, output, first * kBlockOutputs, std::min(last * kBlockOutputs, outputs));
      }
      output += outputs;
      block += blocks;
    }
  }

  // Some results of a part whose outputs begin at `output`.
  static void rescale(T* results, const LoraPairs& pairs, int64_t output, int64_t begin, int64_t end) {
    for_parts(end - begin, [&](int64_t i, int count) {
      T* at = results + begin + i;
      const int64_t first = output + begin + i;
      Part values = load_lanes<Part>(at, count) * load_lanes<Part>(pairs.scales + first, count);
      if (pairs.shifts != nullptr) values += load_lanes<Part>(pairs.shifts + first, count);
      store_lanes(at, values, count);
    });
  }

  const InputOf<T>* inner() const {
    if constexpr (std::is_same_v<T, InputOf<T>>) return scratch_.inner;
    else return scratch_.inner_copies;
  }

  T* y_;
  const T* x_;
  int64_t x_stride_, inputs_;
  const LoraTable& table_;
  int64_t width_;  // of y
  const LoraScratch<T>& scratch_;
  const LoraPlaces& places_;
  const int64_t* rows_;  // [count_], from the place first_ on
  int64_t first_, count_, num_groups_ = 0, most_ranks_ = 0;
  const LoraRows::Group* groups_[kLoraRows];  // those whose adapters add something
};

}  // namespace

bool LoraRows::find(const int32_t* slots, const int64_t* wanted, int64_t count, int64_t num_slots) {
  const auto slot_of = [&](int64_t row) { return slots[wanted == nullptr ? row : wanted[row]]; };
  rows.clear();
  groups.clear();
  for (int64_t row = 0; row < count; row++) {
    if (slot_of(row) >= num_slots) return false;
    if (slot_of(row) >= 0) rows.push_back(row);
  }
  std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return slot_of(a) < slot_of(b); });
  for (int64_t place = 0; place < static_cast<int64_t>(rows.size()); place++) {
    const int64_t slot = slot_of(rows[place]);
    if (place % kLoraRows == 0 || groups.back().slot != slot || groups.back().count == kTaskRows)
      groups.push_back({slot, place, 0});
    groups.back().count++;
  }
  return true;
}

template <typename T>
void add_lora(T* y, const T* x, int64_t x_stride, int64_t inputs, const LoraTable& table, const LoraRows& rows,
              const LoraScratch<T>& scratch, const Worker& worker, const LoraPlaces& places) {
  for (size_t begin = 0, end = 0; begin < rows.groups.size(); begin = end) {
    while (end < rows.groups.size() && rows.groups[end].first < rows.groups[begin].first + kLoraRows) end++;
    Pass<T>(y, x, x_stride, inputs, table, rows, begin, end, scratch, places).run(worker);
  }
}

template void add_lora(Bf16*, const Bf16*, int64_t, int64_t, const LoraTable&, const LoraRows&, const LoraScratch<Bf16>&,
                       const Worker&, const LoraPlaces&);
template void add_lora(float*, const float*, int64_t, int64_t, const LoraTable&, const LoraRows&,
                       const LoraScratch<float>&, const Worker&, const LoraPlaces&);

namespace {

// Plain data, filled by kernels/cpu/lora.py: the fields must agree. The scratch is as in LoraScratch.
struct Arguments {
  void* y;
  const void* x;
  const LoraTable* table;
  const int32_t* slots;
  void *inner, *inner_copies, *x_copies;
  int64_t rows, inputs, x_stride, threads;
};

template <typename T>
bool run(const Arguments& a) {
  LoraRows rows;
  if (!rows.find(a.slots, nullptr, a.rows, a.table->num_slots)) return false;
  const LoraScratch<T> scratch{static_cast<T*>(a.inner), static_cast<InputOf<T>*>(a.inner_copies),
                               static_cast<InputOf<T>*>(a.x_copies)};
  const int64_t bytes = static_cast<int64_t>(rows.groups.size()) * a.inputs * kBlockOutputs * sizeof(T);
  run_together(threads_for(bytes, a.threads), [&](const Worker& worker) {
    add_lora<T>(static_cast<T*>(a.y), static_cast<const T*>(a.x), a.x_stride, a.inputs, *a.table, rows, scratch, worker);
  });
  return true;
}

}  // namespace
}  // namespace quire

// False if there is no such slot; nothing is added then.
QUIRE_EXPORT(bool, quire_lora, (const quire::Arguments* a), quire::run, (*a))
