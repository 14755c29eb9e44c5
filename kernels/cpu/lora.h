// Low-rank adapters: y += (x A^T) B^T, with an adapter of its own for each row, or none. kernels/lora.py has the formula.
#pragma once

#include <vector>

#include "packed_product.h"
#include "threads.h"

namespace quire {

constexpr int64_t kLoraParts = 6;  // MAX_PARTS of kernels/lora.py
// The rows that are added to at a time, which limits the memory for what is in between.
constexpr int64_t kLoraRows = 256;  // _ROWS of lora.py
// The elements of a row in between: the ranks of all parts.
constexpr int64_t kLoraRanks = kLoraParts * 256;  // _RANKS of lora.py

// Plain data, filled by kernels/cpu/lora.py: the fields of these two must agree.

// What one adapter adds to one projection.
struct LoraPairs {
  const void* a;              // packed [sum of the ranks, I]; null: it adds nothing
  const void* b[kLoraParts];  // packed [outputs of the part, rank]
  int64_t ranks[kLoraParts];  // even; 0: the part has none
  // Where the ranks of each part begin in `a`: after those before it, or all at 0 if they share them.
  int64_t starts[kLoraParts];
  int64_t num_ranks;  // of `a`
  // Of the outputs of all parts that it has, [O]: results are scales * y + shifts in the end. Null: they stay as they are.
  const float *scales, *shifts;
};

// The adapters of one projection.
struct LoraTable {
  const LoraPairs* slots;
  int64_t num_slots;
  int64_t outputs[kLoraParts];  // of each part; 0: there are no more parts
};

// The rows of a step that have an adapter, which are the same for all projections.
struct LoraRows {
  // Rows with the same adapter.
  struct Group {
    int64_t slot, first, count;  // first: an index into `rows`
  };

  std::vector<int64_t> rows;  // by slot
  std::vector<Group> groups;  // none reaches beyond a multiple of kLoraRows

  // Finds them. `slots` are of all rows, or, of a step that goes on with the `wanted` ones, of the rows before. False if
  // there is no such slot.
  bool find(const int32_t* slots, const int64_t* wanted, int64_t count, int64_t num_slots);
};

// Which rows of x and y a row of `LoraRows` is; null: those of its number.
struct LoraPlaces {
  const int64_t *x = nullptr, *y = nullptr;
};

// Memory for some rows in between.
template <typename T>
struct LoraScratch {
  T* inner;                 // [min(T, kLoraRows), kLoraRanks]
  InputOf<T>* inner_copies;  // likewise, if InputOf<T> is not T
  InputOf<T>* x_copies;     // for min(T, kLoraRows) copied rows; unused if rows need no copy
};

// x: [T, I], rows at a distance of x_stride elements. y: [T, O] contiguous. All workers must call this.
template <typename T>
void add_lora(T* y, const T* x, int64_t x_stride, int64_t inputs, const LoraTable& table, const LoraRows& rows,
              const LoraScratch<T>& scratch, const Worker& worker, const LoraPlaces& places = {});

}  // namespace quire
