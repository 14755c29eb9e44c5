// Formats of quantised weights (kernels/group_formats.py), and their layout in memory (kernels/group_layout.py).
#pragma once

#include "packed_product.h"

namespace quire {

constexpr int64_t kChunkGroups = 8;
constexpr int64_t kStepBytes = kBlockOutputs * 4;  // of four inputs of a block, 8 bits each

constexpr int64_t groups_of(int64_t inputs) { return (inputs + kGroupInputs - 1) / kGroupInputs; }

// Plain data, filled by kernels/group_formats.py: the fields must agree.
struct GroupFormat {
  int64_t bits, offset, scale_kind, span, subscales, packs_subscales, minima, zeros, table;
  int64_t rounds_rows;  // whether rows are rounded to 8 bits before they are multiplied

  enum { kFloat16, kBfloat16, kFloat32 };  // scale_kind

  bool has_wide_table() const { return table >= 3; }
  int64_t halves() const { return subscales == 2 ? 2 : 1; }
  int64_t num_scales(int64_t groups) const { return (groups + span - 1) / span; }
  int64_t scale_bytes() const { return scale_kind == kFloat32 ? 4 : 2; }

  // The bytes of a chunk of so many groups before its values, and all of them.
  int64_t values_at(int64_t groups) const {
    const int64_t of_scale = scale_bytes() * (1 + minima) + zeros;
    const int64_t of_group = subscales * (minima && !packs_subscales ? 2 : 1);
    return ((num_scales(groups) * of_scale + groups * of_group) * kBlockOutputs + 63) / 64 * 64;
  }
  int64_t chunk_bytes(int64_t groups) const { return values_at(groups) + groups * bits * kStepBytes; }

  // Of a block of outputs.
  int64_t block_bytes(int64_t groups) const {
    const int64_t rest = groups % kChunkGroups;
    return groups / kChunkGroups * chunk_bytes(kChunkGroups) + (rest == 0 ? 0 : chunk_bytes(rest));
  }
};

}  // namespace quire
